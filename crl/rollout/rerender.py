"""Rendering of finished episodes without some of their segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from crl.modeling.tokens import SAMPLED_ORIGINS, ChatRenderer, Conversation
from crl.rollout.episode import Limits
from crl.types import CURRENT_POLICY, Completion, Origin, TokenTrace, Trajectory


@dataclass(frozen=True)
class Rerenderer:
    """`crl.protocols.Rerender` with the run's renderer and context windows."""

    renderer: ChatRenderer
    limits: Mapping[str, Limits]
    """Limits by task name; their context window is used."""

    def without(
        self, trajectory: Trajectory, origins: Set[Origin], *, version: int = CURRENT_POLICY
    ) -> tuple[TokenTrace, ...]:
        conversation = Conversation(self.renderer, self.limits[trajectory.task.name].window)
        answers = _answers(trajectory)
        for segment in trajectory.segments:
            answer = next(answers, ()) if segment.origin in SAMPLED_ORIGINS else ()
            if segment.origin in origins:
                continue
            if segment.origin not in SAMPLED_ORIGINS:
                conversation.add([segment])
            elif answer:
                conversation.prompt()
                conversation.add_completion(self._completion(answer, version))
            else:  # an overtime answer, which is not trained
                break
        return conversation.traces

    def _completion(self, ids: tuple[int, ...], version: int) -> Completion:
        stopped = ids[-1] in self.renderer.stop_ids
        finish = "stop" if stopped else "length"
        return Completion(ids, (0.0,) * len(ids), (version,) * len(ids), finish)


def _answers(trajectory: Trajectory) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of every sampled answer, in order."""
    for trace in trajectory.traces:
        for positions in trace.completions():
            yield trace.ids[positions.start : positions.stop]
