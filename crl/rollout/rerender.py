"""Rendering of finished episodes without some of their segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple, get_args

from crl.modeling.tokens import ChatRenderer, Conversation
from crl.rollout.episode import Limits
from crl.types import (
    BEHAVIOUR,
    CURRENT_POLICY,
    SAMPLED_ORIGINS,
    Completion,
    OldPolicy,
    Origin,
    TokenTrace,
    Trajectory,
)


class _Answer(NamedTuple):
    """Sampled answer of an episode."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Rerenderer:
    """`crl.protocols.Rerender` with the run's renderer and context windows."""

    renderer: ChatRenderer
    limits: Mapping[str, Limits]
    """Limits by task name; their context window is used."""

    def without(
        self, trajectory: Trajectory, origins: Set[Origin], *, version: OldPolicy = CURRENT_POLICY
    ) -> tuple[TokenTrace, ...]:
        if version not in get_args(OldPolicy):
            raise ValueError(f"version must be one of {get_args(OldPolicy)}, not {version}")
        conversation = Conversation(self.renderer, self.limits[trajectory.task.name].window)
        answers, messages = _answers(trajectory), 0
        for segment in trajectory.segments:
            answer = next(answers, None) if segment.origin in SAMPLED_ORIGINS else None
            if segment.origin in origins:
                continue
            if segment.origin not in SAMPLED_ORIGINS:
                conversation.add([segment])
                messages += 1
            elif answer is None:  # an overtime answer, which is not trained
                break
            elif not messages:
                raise ValueError(f"no message remains before an answer without {set(origins)}")
            else:
                conversation.prompt()
                conversation.add_completion(self._completion(answer, version))
        return conversation.traces

    def _completion(self, answer: _Answer, version: OldPolicy) -> Completion:
        count = len(answer.ids)
        finish = "stop" if answer.ids[-1] in self.renderer.stop_ids else "length"
        logprobs = answer.logprobs if version == BEHAVIOUR else (0.0,) * count
        return Completion(answer.ids, logprobs, (version,) * count, finish)


def _answers(trajectory: Trajectory) -> Iterator[_Answer]:
    """Yield every sampled answer, in order."""
    for trace in trajectory.traces:
        for positions in trace.completions():
            span = slice(positions.start, positions.stop)
            yield _Answer(trace.ids[span], trace.logprobs[span])
