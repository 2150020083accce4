"""Samples of self-distillation (CRL §4.3): guided episodes with the prompts of unguided ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from crl.modeling.tokens import SAMPLED_ORIGINS, ChatRenderer, Conversation
from crl.rollout.episode import Limits
from crl.types import GUIDANCE_ORIGINS, Completion, TokenTrace, Trajectory

NOT_SAMPLED_VERSION = -1
"""Policy version of tokens that no policy sampled after the prompt that precedes them."""


def unguided_traces(
    trajectory: Trajectory, renderer: ChatRenderer, limits: Mapping[str, Limits]
) -> tuple[TokenTrace, ...]:
    """Return the trajectory's trained answers after the prompts of an unguided episode.

    Experience, the offer of the tool, questions and their answers are left out. The trained tokens
    are those that were sampled, with log-prob 0 and version `NOT_SAMPLED_VERSION`. A learner takes
    the gradient of their log-likelihood. `limits`: limits by task name; their context window is
    used.
    """
    conversation = Conversation(renderer, limits[trajectory.task.name].window)
    answers = _answers(trajectory)
    for segment in trajectory.segments:
        answer = next(answers, ()) if segment.origin in SAMPLED_ORIGINS else ()
        if segment.origin in GUIDANCE_ORIGINS:
            continue
        if segment.origin not in SAMPLED_ORIGINS:
            conversation.add([segment])
        elif answer:
            conversation.prompt()
            conversation.add_completion(_completion(answer, renderer))
        else:  # an overtime answer, which is not trained
            break
    return conversation.traces


def _answers(trajectory: Trajectory) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of every sampled answer: the runs of trained tokens, in order."""
    for trace in trajectory.traces:
        tokens = zip(trace.mask, trace.ids, strict=True)
        for trained, run in groupby(tokens, key=lambda token: token[0]):
            if trained:
                yield tuple(token for _, token in run)


def _completion(ids: tuple[int, ...], renderer: ChatRenderer) -> Completion:
    stopped = ids[-1] in renderer.stop_ids
    return Completion(
        ids, (0.0,) * len(ids), (NOT_SAMPLED_VERSION,) * len(ids), "stop" if stopped else "length"
    )
