"""Game of question answering: searches that end with an answer."""

from __future__ import annotations

from crl.envs.base import Rendering
from crl.envs.search_qa.library import Library
from crl.envs.search_qa.questions import Question
from crl.envs.search_qa.scoring import exact_match
from crl.envs.search_qa.text import RENDERERS
from crl.types import StepResult, Task


class SearchGame:
    """`Game` of one question. An answer ends it.

    The reward is 1 if the answer matches a gold answer exactly after normalisation, else 0.
    """

    def __init__(self, rendering: Rendering, library: Library, top_k: int) -> None:
        """Create a game. `top_k`: number of documents that a search returns."""
        self._renderer = RENDERERS[rendering]
        self._library, self._top_k = library, top_k
        self._question: Question | None = None

    def reset(self, task: Task) -> str:
        """Ask the question of the task's `lgen` and `core`.

        Raise `KeyError` if the task's params lack one of them.
        """
        lgen, core = int(task.params["lgen"]), int(task.params["core"])
        self._question = self._library.topics.question(lgen, core)
        return self._renderer.question(self._question)

    def step(self, action: str) -> StepResult:
        """Search or answer.

        Raise `RuntimeError` outside an episode, and `RolloutError` if the search fails.
        """
        if self._question is None:
            raise RuntimeError("the episode is over: call reset first")
        call = self._renderer.parse(action)
        if call is None:
            return StepResult(self._renderer.invalid, valid=False)
        name, text = call
        if name == "search":
            return StepResult(
                self._renderer.found(self._library.retriever.search(text, self._top_k))
            )
        right = exact_match(text, self._question.answers)
        self._question = None
        return StepResult(
            self._renderer.verdict(right), reward=float(right), done=True, success=right
        )

    def close(self) -> None:
        """Do nothing. The library belongs to the process."""
