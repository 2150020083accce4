"""Rendering of finished episodes again. Episodes with questions are in `test_asking.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crl.engines.scripted import ScriptedEngine
from crl.rollout.episode import EpisodeKey, Limits
from crl.rollout.rerender import Rerenderer
from crl.types import (
    BEHAVIOUR,
    CURRENT_POLICY,
    GUIDANCE_ORIGINS,
    RolloutPlan,
    TokenTrace,
    Trajectory,
)
from support.doors import TASK, RecordingRetriever, open_host, renderer, runner, script
from support.kept_sets import kept_set

LIMITS = {"doors": Limits(max_turns=3, max_response_tokens=32)}


async def guided_episode() -> Trajectory:
    engine = ScriptedEngine(renderer(), script("wait", "open"))
    async with open_host() as hosted:
        play = runner(engine, hosted.host, limits=LIMITS, retriever=RecordingRetriever()).play
        return await play(EpisodeKey("train", 2, 5, 1), TASK, RolloutPlan("guided"))


def sampled(traces: tuple[TokenTrace, ...]) -> list[tuple[int, float]]:
    """Return id and log-prob of every sampled token."""
    return [
        (token, logprob)
        for trace in traces
        for token, logprob, mask in zip(trace.ids, trace.logprobs, trace.mask, strict=True)
        if mask
    ]


async def test_without_dropped_origins_the_episode_is_rendered_as_it_was() -> None:
    episode = await guided_episode()
    again = Rerenderer(renderer(), LIMITS).without(episode, set())
    assert [trace.ids for trace in again] == [trace.ids for trace in episode.traces]
    assert [trace.mask for trace in again] == [trace.mask for trace in episode.traces]


async def test_samples_can_keep_the_logprobs_of_the_policy_that_sampled_them() -> None:
    episode = await guided_episode()
    rerenderer = Rerenderer(renderer(), LIMITS)
    assert len(set(sampled(episode.traces))) > 2
    kept = rerenderer.without(episode, GUIDANCE_ORIGINS, version=BEHAVIOUR)
    assert sampled(kept) == sampled(episode.traces)
    assert {v for t in kept for v, mask in zip(t.versions, t.mask, strict=True) if mask} == {
        BEHAVIOUR
    }
    dropped = rerenderer.without(episode, GUIDANCE_ORIGINS)
    assert {logprob for _, logprob in sampled(dropped)} == {0.0}


async def test_kept_sets_do_not_apply_after_another_prompt() -> None:
    episode = await guided_episode()
    traces = tuple(
        replace(trace, kept=tuple(kept_set(1) if m else b"" for m in trace.mask))
        for trace in episode.traces
    )
    assert any(traces[0].kept)
    rerenderer = Rerenderer(renderer(), LIMITS)
    for version in (BEHAVIOUR, CURRENT_POLICY):
        views = rerenderer.without(
            replace(episode, traces=traces), GUIDANCE_ORIGINS, version=version
        )
        assert not any(ids for view in views for ids in view.kept)


async def test_invalid_arguments_are_refused() -> None:
    episode = await guided_episode()
    rerenderer = Rerenderer(renderer(), LIMITS)
    with pytest.raises(ValueError, match=r"version must be one of .* not 7"):
        rerenderer.without(episode, GUIDANCE_ORIGINS, version=7)  # pyright: ignore
    with pytest.raises(ValueError, match="no message remains before an answer"):
        rerenderer.without(episode, {"task", "env", "experience"})
