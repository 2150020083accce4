"""Parts of search_and_ask: the agent's tool, and the extractor's prompt for a question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crl.methods.parts.distilling import Digest, quoted, with_transcript
from crl.modeling.tokens import ChatRenderer
from crl.protocols import Hit, Question
from crl.types import Segment

COMPACT_OFFER, COMPACT_CALL, COMPACT_NO_RESULT = "you may ask.", "ask", "nothing is known."
"""Texts of the tool for a tiny agent: its description, its call, and the reply without a result.

The call may be followed by the words of a question.
"""

_CALL = re.compile(
    r"<search_and_ask>((?:(?!<search_and_ask>).)*?)</search_and_ask>", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True)
class AskTool:
    """Description and syntax of the tool for the agents of a task."""

    offer: str
    """Description of the tool in the agent's prompt, optionally with a slot `{limit}`."""
    parse_query: Callable[[str], str | None]
    """Function from the completion's text after the thinking to the question, None if no call."""
    no_result: str
    """Reply when no experience is found."""


def compact_query(answer: str) -> str | None:
    """Return the words after the call, or None if `answer` is not a call."""
    call, *query = answer.split(maxsplit=1) or [""]
    return "".join(query).strip() if call.casefold() == COMPACT_CALL else None


def tagged_query(answer: str) -> str | None:
    """Return the content of the last `<search_and_ask>` tag (case-insensitive), or None.

    The agent's last decision counts: the result is None if an `<answer>` tag follows the call.
    """
    calls = list(_CALL.finditer(answer))
    return (
        calls[-1][1].strip()
        if calls and "<answer>" not in answer[calls[-1].end() :].lower()
        else None
    )


COMPACT_TOOL = AskTool(COMPACT_OFFER, compact_query, COMPACT_NO_RESULT)


def full_tool(offer: str) -> AskTool:
    """Return the tool for language models. `offer`: the text of the prompt `ask`."""
    return AskTool(offer, tagged_query, "Nothing is known about that.")


@dataclass(frozen=True)
class FullRefinePrompt:
    """`RefinePromptWriter` for language models: it fills the prompt `refine`.

    Quoting and shortening are those of `FullDistilPrompt`.
    """

    template: str
    """Text of the prompt `refine`."""
    renderer: ChatRenderer
    """Renderer of the extractor's model."""
    max_tokens: int
    """Maximum number of tokens of the rendered prompt."""

    def __call__(self, question: Question, hit: Hit) -> Sequence[Segment]:
        slots = {
            "goal": quoted(question.task.goal),
            "experience": quoted(hit.text),
            "question": quoted(question.query),
        }
        return with_transcript(
            self.template, slots, question.segments, self.renderer, self.max_tokens
        )


@dataclass(frozen=True)
class CompactRefinePrompt:
    """`RefinePromptWriter` for tiny extractors.

    The prompt holds the goal, the retrieved experience, the digest of the episode so far and the
    question.
    """

    digests: Mapping[str, Digest]
    """Digest function by task name."""

    def __call__(self, question: Question, hit: Hit) -> Sequence[Segment]:
        call = f"{COMPACT_CALL} {question.query}".rstrip()
        lines = [
            question.task.goal,
            f"hint 1 {hit.text}",
            self.digests[question.task.name](question.segments),
            call,
        ]
        return [Segment("user", "\n".join(lines), "task")]
