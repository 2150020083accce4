"""Engine without a model, for tests that do not need one.

A completion is a function of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crl.modeling.tokens import ChatRenderer
from crl.protocols import PublishHandle
from crl.types import Completion, Sampling


class ScriptedEngine:
    """`crl.protocols.Engine` that answers the prompt `text` with `answer(text)`."""

    def __init__(self, renderer: ChatRenderer, answer: Callable[[str], str]) -> None:
        self.version, self.busy_s = 0, 0.0
        self.requests: list[tuple[str | None, tuple[int, ...]]] = []
        """(session, prompt ids) of all requests so far, in order."""
        self._renderer, self._answer = renderer, answer

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        self.requests.append((session, tuple(ids)))
        sampled = (
            *self._renderer.encode(self._answer(self._renderer.decode(ids))),
            sampling.stop_ids[0],
        )[: sampling.max_tokens]
        finish = "stop" if sampled[-1] in sampling.stop_ids else "length"
        return Completion(sampled, (-1.0,) * len(sampled), (self.version,) * len(sampled), finish)

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        return [-1.0] * (len(ids) - 1)

    async def update_weights(self, handle: PublishHandle) -> None:
        self.version = handle.version

    async def health(self) -> None:
        """Return without an error; a scripted engine cannot fail."""

    def details(self) -> list[str]:
        return []

    async def aclose(self) -> None:
        """Do nothing; there is no resource to release."""
