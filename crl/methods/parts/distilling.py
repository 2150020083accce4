"""Parts of distillation: which episodes are distilled, and what the extractor is told of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crl.manager import DistilRequest
from crl.types import Segment, Trajectory

Digest = Callable[[Sequence[Segment]], str]
"""An episode in few words, from its texts alone."""


def whole_text(segments: Sequence[Segment]) -> str:
    """The `Digest` of an environment that has none of its own: everything that was said."""
    return "\n".join(segment.text for segment in segments if segment.origin in ("env", "policy"))


@dataclass(frozen=True)
class EveryEpisode:
    """`Distiller`: guided and free, won and lost (CRL §3.2.1); only what could not be played is left out."""

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return [t for t in trajectories if t.error is None]


@dataclass(frozen=True)
class NoEpisode:
    """`Distiller`: the bank stays as it is."""

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return ()


@dataclass(frozen=True)
class CompactDistilPrompt:
    """`PromptWriter` for tiny extractors: goal, what guided the episode, its digest, its outcome. digests: by task name."""

    digests: Mapping[str, Digest]

    def __call__(self, request: DistilRequest) -> Sequence[Segment]:
        hints = [f"hint {number} {hit.text}" for number, hit in enumerate(request.shown, start=1)]
        outcome = "success" if request.success else "failure"
        lines = [request.task.goal, *hints, self.digests[request.task.name](request.segments), outcome]
        return [Segment("user", "\n".join(lines), "task")]
