"""Episode: its trajectory, its end, and the effect of a failure in any part."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from crl.engines.scripted import ScriptedEngine
from crl.envs.hosting.threads import ThreadHost
from crl.errors import EngineError, RolloutError, TransientError
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.tokens import LONG_PROMPT, ChatRenderer, Conversation
from crl.protocols import Environment, Response, SearchRequest
from crl.rollout.episode import EpisodeKey, Limits, Observer, Report
from crl.types import (
    Activity,
    Completion,
    EpisodeAddress,
    Outcome,
    RolloutPlan,
    Sampling,
    Segment,
    TokenTrace,
    Trajectory,
)
from support.doors import (
    HIT,
    RULES,
    TASK,
    Doors,
    OpenHost,
    RecordingRetriever,
    open_host,
    renderer,
    runner,
    script,
    scripted,
    until,
)

ANSWER_NEXT = "<|im_end|>\n<|im_start|>assistant\n"
FREE, GUIDED = RolloutPlan("free"), RolloutPlan("guided")
KEY = EpisodeKey("train", step=2, group=5, member=1)


class FailingEngine(ScriptedEngine):
    """Engine that raises `error` from request number `turn` on (counted from 0)."""

    def __init__(self, error: Exception, turn: int) -> None:
        super().__init__(renderer(), script("wait"))
        self.error, self.turn = error, turn

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        if len(self.requests) == self.turn:
            raise self.error
        return await super().generate(ids, sampling, session=session, rng=rng)


class SeedRecorder(ScriptedEngine):
    """Engine that records the seed of every request."""

    def __init__(self) -> None:
        super().__init__(renderer(), script("wait"))
        self.seeds: list[int | None] = []

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        self.seeds.append(rng)
        return await super().generate(ids, sampling, session=session, rng=rng)


async def play_actions(*actions: str, **changes) -> tuple[Trajectory, ScriptedEngine, list[Doors]]:
    engine = scripted(*actions)
    async with open_host() as hosted:
        trajectory = await runner(engine, hosted.host, **changes).play(KEY, TASK, FREE)
        assert not acquired_count(hosted.host), "the environment was not released"
        return trajectory, engine, hosted.games


def acquired_count(host: ThreadHost) -> int:
    return len(host._acquired)


def text(trace: TokenTrace) -> str:
    return renderer().decode(trace.ids)


def sampled(trace: TokenTrace) -> str:
    """Return the text that the policy sampled in all turns, including stop tokens."""
    return renderer().decode(
        [token for token, mask in zip(trace.ids, trace.mask, strict=True) if mask]
    )


def prompts(engine: ScriptedEngine) -> list[str]:
    return [renderer().decode(ids) for _, ids in engine.requests]


# ── a whole episode ───────────────────────────────────────────────────────────────────────────────


async def test_a_whole_episode() -> None:
    trajectory, engine, (game,) = await play_actions("wait", "shout", "open")
    assert game.actions == ["wait", "shout", "open"]
    assert trajectory.segments == (
        Segment("system", RULES, "task"),
        Segment("user", "Open it.", "task"),
        Segment("user", "A door.", "env"),
        Segment("assistant", "wait", "policy"),
        Segment("user", "Nothing happens.", "env"),
        Segment("assistant", "shout", "policy"),
        Segment("user", "You cannot do that.", "env"),
        Segment("assistant", "open", "policy"),
        Segment("user", "It opens.", "env"),
    )
    (trace,) = trajectory.traces
    assert text(trace) == (
        "<|im_start|>system\nFind the right door.<|im_end|>\n"
        "<|im_start|>user\nOpen it.\nA door.<|im_end|>\n"
        "<|im_start|>assistant\nwait<|im_end|>\n"
        "<|im_start|>user\nNothing happens.<|im_end|>\n"
        "<|im_start|>assistant\nshout<|im_end|>\n"
        "<|im_start|>user\nYou cannot do that.<|im_end|>\n"
        "<|im_start|>assistant\nopen<|im_end|>"
    )
    assert sampled(trace) == "wait<|im_end|>shout<|im_end|>open<|im_end|>"
    assert trace.logprobs == tuple(-1.0 if mask else 0.0 for mask in trace.mask)
    assert trace.versions == tuple(0 if mask else -1 for mask in trace.mask)
    assert [session for session, _ in engine.requests] == ["train/00000002/00000005/0001"] * 3
    assert [len(ids) for _, ids in engine.requests] == [
        i for i in range(1, len(trace.ids)) if trace.mask[i] and not trace.mask[i - 1]
    ]
    assert trajectory == Trajectory(
        TASK, EpisodeAddress(2, 5, 1), "free", trajectory.segments, trajectory.traces,
        Outcome({"outcome": 1.0}, success=True),
        Activity((0.0, 0.0, 1.0), invalid_actions=1, sampled_tokens=sum(trace.mask)),
    )  # fmt: skip


async def test_a_lost_episode_ends_without_error() -> None:
    trajectory, _, _ = await play_actions("coin", "lose")
    assert (trajectory.turns, trajectory.reward, trajectory.success) == (2, 0.5, False)
    assert (trajectory.truncated, trajectory.error) == (False, None)


async def test_success_is_never_withdrawn() -> None:
    trajectory, _, _ = await play_actions("peek", "lose")
    assert (trajectory.success, trajectory.turns) == (True, 2)


async def test_the_shaper_determines_the_reward() -> None:
    class Doubled:
        def shape(self, trajectory: Trajectory) -> dict[str, float]:
            return {"outcome": trajectory.rewards["outcome"], "turns": -0.1 * trajectory.turns}

    trajectory, _, _ = await play_actions("wait", "open", shaper=Doubled())
    assert trajectory.rewards == {"outcome": 1.0, "turns": pytest.approx(-0.2)}
    assert trajectory.reward == pytest.approx(0.8)


async def test_the_trajectory_records_the_experience() -> None:
    retriever = RecordingRetriever()
    async with open_host() as hosted:
        guided = await runner(scripted("open"), hosted.host, retriever=retriever).play(
            KEY, TASK, GUIDED
        )
    assert (guided.condition, guided.used, guided.guidance.shown) == (
        "guided",
        (HIT.use,),
        (HIT.text,),
    )
    assert guided.segments[2] == Segment("user", "Open means open.", "experience")
    assert "Open means open." in text(guided.traces[0])
    assert retriever.requests == [SearchRequest(TASK.goal, TASK, 5, 1)]


async def test_a_free_episode_never_searches() -> None:
    retriever = RecordingRetriever()
    async with open_host() as hosted:
        free = await runner(scripted("open"), hosted.host, retriever=retriever).play(
            KEY, TASK, FREE
        )
        without = await runner(scripted("open"), hosted.host).play(KEY, TASK, FREE)
    assert retriever.requests == [], "no search, although the retriever would return a hit"
    assert (free.condition, free.used, free.guidance.shown) == ("free", (), ())
    assert free == without


async def test_a_guided_episode_without_a_hit_stays_guided() -> None:
    retriever, engine = RecordingRetriever(None), scripted("open")
    async with open_host() as hosted:
        guided = await runner(engine, hosted.host, retriever=retriever).play(KEY, TASK, GUIDED)
        free = await runner(engine, hosted.host, retriever=retriever).play(KEY, TASK, FREE)
    assert len(retriever.requests) == 1
    assert (guided.condition, guided.used, guided.guidance.shown) == ("guided", (), ())
    assert guided.segments == free.segments
    assert engine.requests[0] == engine.requests[1], "the prompt equals that of a free episode"


@pytest.mark.parametrize("instructions", [RULES, ""], ids=["full", "compact"])
async def test_guidance_is_exactly_one_segment_of_the_prompt(instructions: str) -> None:
    """Compare the rendered prompts of a guided and a free episode on every turn.

    Without the line of the experience, they must be equal.
    """
    engine = scripted("wait")
    context = ChatContext({"doors": instructions})
    async with open_host() as hosted:
        guided = await runner(
            engine, hosted.host, retriever=RecordingRetriever(), context=context
        ).play(KEY, TASK, GUIDED)
        free = await runner(
            engine, hosted.host, retriever=RecordingRetriever(), context=context
        ).play(KEY, TASK, FREE)
    with_it, without_it = prompts(engine)[:3], prompts(engine)[3:]
    assert [prompt.count(HIT.text) for prompt in with_it] == [1, 1, 1]
    assert not any(HIT.text in prompt for prompt in without_it)
    assert [prompt.replace(f"{HIT.text}\n", "") for prompt in with_it] == without_it
    assert without_it[0].startswith(
        "<|im_start|>system\n" if instructions else "<|im_start|>user\nOpen it.\nA door."
    )
    assert tuple(s for s in guided.segments if s.origin != "experience") == free.segments


async def test_a_query_contains_the_first_observation_if_the_task_requires_it() -> None:
    cases: list[tuple[frozenset[str], str]] = [
        (frozenset(), "Open it."),
        (frozenset({"doors"}), "Open it.\nA door."),
    ]
    for observation_in_query, query in cases:
        retriever = RecordingRetriever()
        async with open_host() as hosted:
            context = ChatContext({"doors": RULES}, observation_in_query=observation_in_query)
            await runner(scripted("open"), hosted.host, retriever=retriever, context=context).play(
                KEY, TASK, GUIDED
            )
        assert [request.query for request in retriever.requests] == [query]


async def test_a_search_waits_for_its_turn() -> None:
    order: list[str] = []

    class Turns(RecordingSampler):
        async def wait_turn(self, session: str) -> None:
            order.append(f"turn {session}")

    class Noted(RecordingRetriever):
        async def search(self, requests: Sequence[SearchRequest]) -> list:
            order.append("search")
            return await super().search(requests)

    engine = scripted("open")
    async with open_host() as hosted:
        run = runner(engine, hosted.host, sampler=Turns(engine), retriever=Noted())
        await run.play(KEY, TASK, GUIDED)
        await run.play(KEY, TASK, FREE)
    assert order == [f"turn {KEY.session}", "search"]


# ── overtime ──────────────────────────────────────────────────────────────────────────────────────


async def test_overtime_is_only_recorded() -> None:
    limits = {"doors": Limits(2, 32, extra_turns=2)}
    late, _, (game,) = await play_actions("coin", "wait", "coin", "open", limits=limits)
    assert game.actions == ["coin", "wait", "coin", "open"]
    assert (late.turns, late.reward, late.rewards, late.success) == (
        2,
        0.5,
        {"outcome": 0.5},
        False,
    ), "a success in overtime does not count"
    assert (late.truncated, late.error) == (True, None)
    assert late.activity.overtime_turns == 2
    assert [s.text for s in late.segments if s.origin == "policy"] == [
        "coin",
        "wait",
        "coin",
        "open",
    ]
    assert late.segments[-1] == Segment("user", "It opens.", "env"), (
        "the extractor reads the overtime turns"
    )
    (trace,) = late.traces
    assert sampled(trace) == "coin<|im_end|>wait<|im_end|>", "overtime tokens are not trained"
    assert set(trace.versions) == {-1, 0}
    late_tokens = sum(len(renderer().encode(text + "<|im_end|>")) for text in ("coin", "open"))
    assert late.activity.sampled_tokens == sum(trace.mask) + late_tokens, (
        "overtime tokens count as sampled"
    )
    on_time, _, _ = await play_actions(
        "coin", "wait", "coin", "open", limits={"doors": Limits(2, 32)}
    )
    assert (late.turns, late.reward, late.success, late.truncated) == (
        on_time.turns, on_time.reward, on_time.success, on_time.truncated,
    )  # fmt: skip
    assert (on_time.activity.overtime_turns, on_time.activity.sampled_tokens) == (
        0,
        sum(trace.mask),
    )
    assert late.traces == on_time.traces, "overtime does not change the training samples"


async def test_overtime_is_limited() -> None:
    trajectory, engine, (game,) = await play_actions(
        "wait", limits={"doors": Limits(2, 32, extra_turns=3)}
    )
    assert (len(game.actions), len(engine.requests), trajectory.turns, trajectory.truncated) == (
        5,
        5,
        2,
        True,
    )
    assert trajectory.activity.overtime_turns == 3


async def test_a_finished_episode_has_no_overtime() -> None:
    for actions, success in ((("wait", "open"), True), (("wait", "lose"), False)):
        trajectory, _, (game,) = await play_actions(
            *actions, limits={"doors": Limits(2, 32, extra_turns=3)}
        )
        assert (game.actions, trajectory.turns) == (list(actions), 2)
        assert (trajectory.success, trajectory.truncated, trajectory.activity.overtime_turns) == (
            success,
            False,
            0,
        )


async def test_success_before_overtime_stays_and_late_invalid_actions_do_not_count() -> None:
    trajectory, _, _ = await play_actions(
        "peek", "shout", limits={"doors": Limits(1, 32, extra_turns=2)}
    )
    assert (trajectory.success, trajectory.activity.invalid_actions, trajectory.turns) == (
        True,
        0,
        1,
    )


async def test_the_score_is_the_last_one_before_overtime() -> None:
    assert (await play_actions("polish", "open"))[0].outcome.score is None, (
        "the last result has no score"
    )
    late, _, _ = await play_actions(
        "wait", "polish", "open", limits={"doors": Limits(2, 32, extra_turns=2)}
    )
    assert (late.outcome.score, late.reward) == (0.4, 0.0), "the score is not part of the reward"


async def test_every_overtime_turn_has_its_own_draw() -> None:
    engine = SeedRecorder()
    async with open_host() as hosted:
        await runner(engine, hosted.host, limits={"doors": Limits(2, 32, extra_turns=2)}).play(
            KEY, TASK, FREE
        )
        early = list(engine.seeds)
        await runner(engine, hosted.host, limits={"doors": Limits(4, 32)}).play(KEY, TASK, FREE)
    assert len(set(early)) == 4
    assert engine.seeds[4:] == early


async def test_a_failure_in_overtime_ends_the_record_without_error() -> None:
    trajectory, _, _ = await play_actions(
        "coin", "crash", limits={"doors": Limits(1, 32, extra_turns=2)}
    )
    assert (trajectory.error, trajectory.turns, trajectory.reward, trajectory.truncated) == (
        None,
        1,
        0.5,
        True,
    )
    assert trajectory.rewards == {"outcome": 0.5}
    limits = {"doors": Limits(2, 32, extra_turns=3)}
    async with open_host() as hosted:
        cut = await play_free(
            hosted, FailingEngine(RolloutError("engine", "no room"), 3), limits=limits
        )
        assert not acquired_count(hosted.host)
        whole = await play_free(hosted, scripted("wait"), limits=limits)
        early = await play_free(
            hosted, FailingEngine(RolloutError("engine", "no room"), 1), limits=limits
        )
    assert (cut.error, cut.turns, cut.truncated) == (None, 2, True)
    assert [s.text for s in cut.segments if s.origin == "policy"] == ["wait"] * 3
    assert (cut.traces, cut.rewards, cut.success) == (whole.traces, whole.rewards, whole.success)
    assert early.error == "engine: no room"


async def test_overtime_turns_of_a_window_are_not_trained() -> None:
    async with open_host() as hosted:
        late = await play_free(
            hosted,
            scripted("coin", "wait"),
            limits={"doors": Limits(2, 32, window=1, extra_turns=2)},
        )
    assert [sampled(trace) for trace in late.traces] == ["coin<|im_end|>", "coin<|im_end|>"]


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


async def test_the_turn_limit_truncates_and_keeps_the_reward() -> None:
    trajectory, engine, (game,) = await play_actions("coin")
    assert (trajectory.turns, len(engine.requests), len(game.actions)) == (3, 3, 3)
    assert (trajectory.truncated, trajectory.error, trajectory.success) == (True, None, False)
    assert trajectory.reward == 1.5
    assert trajectory.traces[0].mask[-1] == 1, "the trace ends with a sampled token"


async def test_success_in_the_last_turn_is_not_truncated() -> None:
    trajectory, _, _ = await play_actions("wait", "wait", "open")
    assert (trajectory.truncated, trajectory.success) == (False, True)


async def test_a_truncated_response_is_played_and_marked() -> None:
    just_the_word = len(renderer().encode("open"))
    trajectory, _, (game,) = await play_actions("open", limits={"doors": Limits(3, just_the_word)})
    assert game.actions == ["open"]
    assert (trajectory.truncated, trajectory.success, trajectory.reward) == (True, True, 1.0)
    assert sampled(trajectory.traces[0]) == "open", "no stop token was sampled"


async def test_a_truncated_response_in_the_middle_marks_the_whole_episode() -> None:
    one_too_few = len(renderer().encode("wait"))
    trajectory, _, _ = await play_actions("wait", "open", limits={"doors": Limits(3, one_too_few)})
    assert (trajectory.truncated, trajectory.success, trajectory.turns) == (True, True, 2)


async def context_for(turns: int, *actions: str) -> int:
    """Return the number of tokens in the prompt of turn `turns` (from 0)."""
    _, engine, _ = await play_actions(*actions)
    return len(engine.requests[turns][1])


async def test_the_context_limit_ends_the_episode_as_truncated() -> None:
    limit = await context_for(1, "coin")
    trajectory, engine, (game,) = await play_actions("coin", max_context=limit)
    assert (trajectory.turns, len(engine.requests), game.actions) == (1, 1, ["coin"])
    assert (trajectory.truncated, trajectory.error, trajectory.reward) == (True, None, 0.5)


async def test_a_response_is_limited_by_the_remaining_context() -> None:
    limit = await context_for(1, "coin", "polish") + len(renderer().encode("polish")) - 1
    trajectory, _, (game,) = await play_actions("coin", "polish", max_context=limit)
    assert game.actions[0] == "coin"
    assert "polish".startswith(game.actions[1])
    assert game.actions[1] != "polish"
    assert (trajectory.truncated, trajectory.turns) == (True, 2)
    assert [len(trace.ids) for trace in trajectory.traces] == [limit]


async def test_no_tokens_left_for_the_first_response() -> None:
    trajectory, engine, _ = await play_actions("open", max_context=10)
    assert (trajectory.turns, trajectory.truncated, trajectory.error, engine.requests) == (
        0,
        True,
        None,
        [],
    )
    assert trajectory.traces == ()


async def test_no_sample_is_longer_than_the_context() -> None:
    limit = await context_for(1, "coin")
    trajectory, _, _ = await play_actions("coin", max_context=limit)
    (trace,) = trajectory.traces
    assert len(trace.ids) <= limit
    assert trace.mask[-1] == 1, "the trace ends with a sampled token"


async def test_a_window_contains_the_task_and_the_last_turns() -> None:
    coin_first = ScriptedEngine(
        renderer(), lambda prompt: "coin" if prompt.endswith(f"A door.{ANSWER_NEXT}") else "wait"
    )
    async with open_host() as hosted:
        one = await play_free(hosted, coin_first, limits={"doors": Limits(3, 32, window=1)})
        two = await play_free(hosted, coin_first, limits={"doors": Limits(3, 32, window=2)})
    head = "<|im_start|>system\nFind the right door.<|im_end|>\n<|im_start|>user\nOpen it."
    assert prompts(coin_first)[:3] == [
        f"{head}\nA door.{ANSWER_NEXT}",
        f"{head}\nYou find a coin.{ANSWER_NEXT}",
        f"{head}\nNothing happens.{ANSWER_NEXT}",
    ]
    assert [sampled(trace) for trace in one.traces] == [
        "coin<|im_end|>",
        "wait<|im_end|>",
        "wait<|im_end|>",
    ]
    assert len(one.segments) == 9, "the trajectory has the whole conversation"
    assert prompts(coin_first)[5] == (
        f"{head}\nYou find a coin.{ANSWER_NEXT}wait<|im_end|>\n<|im_start|>user\n"
        f"Nothing happens.{ANSWER_NEXT}"
    )
    assert sampled(two.traces[2]) == "wait<|im_end|>", (
        "earlier turns are context; other samples train them"
    )


# ── responses ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<think>a door, so</think>\nopen", "open"),
        ("so</think> open \n", "open"),  # for templates that open the thought themselves
        ("<think>open</think> hm <think>no</think> wait", "wait"),
        ("open", "open"),
        ("", ""),
    ],
)
async def test_thinking_is_not_played(response: str, action: str) -> None:
    trajectory, _, (game,) = await play_actions(response, limits={"doors": Limits(1, 64)})
    assert game.actions == [action]
    assert trajectory.segments[3] == Segment("assistant", response, "policy"), (
        "the thinking stays in the conversation"
    )
    assert sampled(trajectory.traces[0]) == f"{response}<|im_end|>", "the thinking is trained"


# ── draws ─────────────────────────────────────────────────────────────────────────────────────────


async def test_every_turn_of_every_member_has_its_own_draw() -> None:
    engine = SeedRecorder()
    keys = [
        KEY,
        replace(KEY, member=2),
        replace(KEY, group=6),
        replace(KEY, step=3),
        replace(KEY, purpose="eval/doors/new"),
    ]
    async with open_host() as hosted:
        for key in keys:
            await runner(engine, hosted.host).play(key, TASK, FREE)
        first = list(engine.seeds)
        assert len(first) == len(set(first)) == 3 * len(keys)
        await runner(engine, hosted.host).play(KEY, TASK, FREE)
        assert engine.seeds[-3:] == first[:3], "equal addresses have equal draws"
        await runner(engine, hosted.host, seed=1).play(KEY, TASK, FREE)
        assert set(engine.seeds[-3:]).isdisjoint(first)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


async def play_free(hosted: OpenHost, engine: ScriptedEngine, **changes) -> Trajectory:
    return await runner(engine, hosted.host, **changes).play(KEY, TASK, FREE)


class EpisodeLog:
    """Record of the starts, ends and errors of episodes, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def episode(self, task: str) -> Iterator[Report]:
        self.events.append(f"start {task}")
        try:
            yield lambda error: self.events.append(f"end {error}")
        finally:
            self.events.append("left")


@pytest.mark.parametrize(
    ("actions", "end"),
    [(("open",), "None"), (("crash",), "env: doors: step: ValueError: the door fell off")],
)
async def test_the_end_is_reported_before_the_environment_is_released(
    actions: tuple[str, ...], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, release = EpisodeLog(), ThreadHost.release

    async def recorded(host: ThreadHost, environment: Environment) -> None:
        observer.events.append("release")
        await release(host, environment)

    monkeypatch.setattr(ThreadHost, "release", recorded)
    await play_actions(*actions, observer=Observer(observer.episode))
    assert observer.events == ["start doors", f"end {end}", "release", "left"]


async def test_a_cancelled_episode_is_not_reported() -> None:
    observer = EpisodeLog()
    async with open_host() as hosted:
        play = runner(scripted("hang"), hosted.host, observer=Observer(observer.episode)).play
        episode = asyncio.create_task(play(KEY, TASK, FREE))
        await until(lambda: bool(hosted.games and hosted.games[0].actions))
        episode.cancel()
        await asyncio.wait({episode})
    assert observer.events == ["start doors", "left"]


async def test_a_failing_game_becomes_an_error_trajectory() -> None:
    async with open_host() as hosted:
        trajectory = await play_free(hosted, scripted("coin", "crash"))
        assert trajectory.error == "env: doors: step: ValueError: the door fell off"
        assert (trajectory.reward, trajectory.turns, trajectory.truncated) == (0.5, 1, False)
        assert trajectory.segments[-1].text == "crash", (
            "the conversation before the failure is recorded"
        )
        assert acquired_count(hosted.host) == 0
        assert (await play_free(hosted, scripted("open"))).success
        assert len(hosted.games) == 2, "the broken game is not played again"
    assert hosted.games[0].closed


async def test_a_failing_reset_becomes_an_error_trajectory() -> None:
    async with open_host(broken={TASK.seed}) as hosted:
        trajectory = await play_free(hosted, scripted("open"))
        assert trajectory.error == "env: doors: reset: ValueError: the hinges are rusty"
        assert (trajectory.segments, trajectory.traces, trajectory.turns) == ((), (), 0)
        assert acquired_count(hosted.host) == 0


async def test_a_hanging_game_becomes_an_error_trajectory() -> None:
    async with open_host() as hosted:
        timeout = hosted.host.thread_pool.timeout

        def hang(prompt: str) -> str:
            if script("wait", "hang")(prompt) == "hang":
                hosted.host.thread_pool.timeout = 0.1
            return script("wait", "hang")(prompt)

        trajectory = await play_free(hosted, ScriptedEngine(renderer(), hang))
        reason = "step exceeded its timeout (rollout.env_timeout = 0.1 s)"
        assert trajectory.error == f"env: doors: {reason}"
        assert trajectory.turns == 1
        assert acquired_count(hosted.host) == 0
        hosted.host.thread_pool.timeout = timeout
        assert (await play_free(hosted, scripted("open"))).success


async def test_a_rollout_error_of_the_engine_ends_the_episode_but_not_its_game() -> None:
    async with open_host() as hosted:
        trajectory = await play_free(
            hosted, FailingEngine(RolloutError("engine", "that prompt is too long"), turn=1)
        )
        assert trajectory.error == "engine: that prompt is too long"
        assert (trajectory.turns, len(trajectory.traces)) == (1, 1)
        assert acquired_count(hosted.host) == 0
        await play_free(hosted, scripted("open"))
        assert len(hosted.games) == 1, "the game is used again"


class CrashingEngine(ScriptedEngine):
    """Engine that loses the requests with the numbers in `lost`, counted from 0.

    It behaves like an engine that dies and is restarted.
    """

    def __init__(self, *lost: int) -> None:
        super().__init__(renderer(), script("wait", "coin", "open"))
        self.asked, self.lost = 0, lost

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        self.asked += 1
        if self.asked - 1 in self.lost:
            raise TransientError("engine", "it died")
        return await super().generate(ids, sampling, session=session, rng=rng)


async def test_an_episode_is_retried_once_after_a_transient_error() -> None:
    async with open_host() as hosted:
        whole = await play_free(hosted, CrashingEngine())
        again = await play_free(hosted, CrashingEngine(2))
        assert whole.success
        assert (again.segments, again.turns, again.reward, again.error) == (
            whole.segments,
            whole.turns,
            whole.reward,
            None,
        )
        assert acquired_count(hosted.host) == 0
        twice = await play_free(hosted, CrashingEngine(2, 4))
        assert (twice.error, twice.turns) == ("engine: it died", 1), (
            "the result is that of the second attempt"
        )
        assert acquired_count(hosted.host) == 0


@pytest.mark.parametrize("error", [EngineError("the engine is gone"), KeyError("a bug")])
async def test_other_errors_pass_through(error: Exception) -> None:
    async with open_host() as hosted:
        with pytest.raises(type(error)) as raised:
            await play_free(hosted, FailingEngine(error, turn=1))
        assert raised.value is error
        assert acquired_count(hosted.host) == 0


async def test_error_trajectories_are_not_shaped() -> None:
    class Never:
        def shape(self, trajectory: Trajectory) -> dict[str, float]:
            raise AssertionError("an episode that has no end has no outcome")

    async with open_host() as hosted:
        assert (await play_free(hosted, scripted("crash"), shaper=Never())).error


class RecordingSampler:
    """`Sampler` that records the sessions that left."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.left: list[str] = []

    def join(self, session: str) -> None:
        pass

    def leave(self, session: str) -> None:
        self.left.append(session)

    async def wait_turn(self, session: str) -> None:
        pass

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None
    ) -> Completion:
        return await self.engine.generate(ids, sampling, session=session, rng=rng)


@pytest.mark.parametrize("actions", [("open",), ("crash",), ("wait",)])
async def test_an_episode_always_leaves_its_sampler_once(actions: tuple[str, ...]) -> None:
    sampler = RecordingSampler(scripted(*actions))
    await play_actions(*actions, sampler=sampler)
    assert sampler.left == [KEY.session]


async def test_a_cancelled_episode_releases_its_environment_and_leaves() -> None:
    async with open_host() as hosted:
        sampler = RecordingSampler(scripted("hang"))
        playing = asyncio.create_task(
            runner(sampler.engine, hosted.host, sampler=sampler).play(KEY, TASK, FREE)
        )
        await until(lambda: any(game.actions for game in hosted.games))
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert acquired_count(hosted.host) == 0
        assert sampler.left == [KEY.session]


async def test_episodes_compute_one_after_another() -> None:
    """Check that the event loop runs once between the computations of any two episodes.

    This must hold for any number of simultaneous answers.
    """
    rounds, computed = 0, []

    class Watched(ChatContext):
        def opening(self, *args: Any, **options: Any) -> Sequence[Segment]:
            computed.append(rounds)
            return super().opening(*args, **options)

        def parse(self, *args: Any) -> Response:
            computed.append(rounds)
            return super().parse(*args)

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async with open_host() as hosted:
        episode_runner = runner(scripted("wait"), hosted.host, context=Watched({"doors": RULES}))
        counting = asyncio.create_task(count())
        await asyncio.gather(
            *(episode_runner.play(replace(KEY, member=member), TASK, FREE) for member in range(16))
        )
        counting.cancel()
    assert len(computed) == 16 * (1 + 3)
    assert len(set(computed)) == len(computed)


# ── long prompts ──────────────────────────────────────────────────────────────────────────────────


async def test_the_event_loop_runs_while_a_long_prompt_is_tokenised() -> None:
    """Tokenising waits for the event loop. On the loop it would wait forever."""
    released = threading.Event()

    class WaitingRenderer(ChatRenderer):
        def encode(self, text: str) -> tuple[int, ...]:
            if len(text) > LONG_PROMPT:
                assert released.wait(30), "the event loop is blocked"
            return super().encode(text)

    waiting = WaitingRenderer(renderer().tokenizer, renderer().stop_ids)
    rules = ChatContext({"doors": RULES + LONG_PROMPT * "x"})
    async with open_host() as hosted:
        player = runner(
            scripted("open"), hosted.host, renderer=waiting, context=rules, max_context=100_000
        )
        playing = asyncio.create_task(player.play(KEY, TASK, FREE))
        await asyncio.sleep(0.05)
        released.set()
        trajectory = await playing
    assert trajectory.success


def test_a_prompt_is_long_if_its_new_text_or_all_of_it_is() -> None:
    conversation = Conversation(renderer())
    conversation.add([Segment("user", LONG_PROMPT // 2 * "x", "env")])
    assert not conversation.is_long
    conversation.add([Segment("user", LONG_PROMPT * "x", "env")])
    assert conversation.is_long
    conversation.prompt()
    conversation.add_completion(Completion((5,), (-1.0,), (0,), "length"))
    conversation.add([Segment("user", "short", "env")])
    assert not conversation.is_long, "the prompt before is not tokenised again"
    window = Conversation(renderer(), window=3)
    window.add([Segment("user", LONG_PROMPT * "x", "env")])
    window.prompt()
    window.add_completion(Completion((5,), (-1.0,), (0,), "length"))
    window.add([Segment("user", "short", "env")])
    assert window.is_long, "a window tokenises all of its turns again"
