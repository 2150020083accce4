"""Guided episodes as if nothing had guided them: the samples of self-distillation (CRL §4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from crl.rollout.episode import Limits
from crl.tokens import SAMPLED_ORIGINS, ChatRenderer, Conversation
from crl.types import GUIDANCE_ORIGINS, Completion, TokenTrace, Trajectory

UNSAMPLED = -1
"""Policy version of tokens that no policy sampled from the prompt before them."""


def unguided_traces(
    trajectory: Trajectory, renderer: ChatRenderer, limits: Mapping[str, Limits]
) -> tuple[TokenTrace, ...]:
    """Return the trajectory's trained answers after the prompts of an unguided episode.

    Experience, the offer of the tool, questions and their answers are left out. The trained tokens
    are those that were sampled, with log-prob 0 and version `UNSAMPLED`: a learner takes the
    gradient of their log-likelihood. limits: by task name, for the context window.
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
            conversation.sampled(_completion(answer, renderer))
        else:  # overtime, which is not trained on
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
        ids, (0.0,) * len(ids), (UNSAMPLED,) * len(ids), "stop" if stopped else "length"
    )
