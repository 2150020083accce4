"""Actor as critic: its verdicts, their sharing in a group, episodes, and success rates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError
from crl.methods.parts.judging import CompactCriticPrompt, FullCriticPrompt
from crl.methods.parts.rollouts import ChatContext
from crl.prompts import prompt
from crl.protocols import Engine, Hit
from crl.rollout.critic import MALFORMED, MAX_CHARS, Critic, Critique, parse_critique
from crl.rollout.decoding import Decoding
from crl.rollout.episode import EpisodeKey
from crl.rollout.rates import MAX_GOALS, SuccessRates
from crl.rollout.waves import DirectSampler, LockstepSampler, Sampler
from crl.run.critic import Warmup
from crl.types import (
    Completion,
    Condition,
    ExperienceUse,
    Guidance,
    Observation,
    RolloutPlan,
    Sampling,
    Task,
    Trajectory,
)
from support.doors import HIT, TASK, RecordingRetriever, open_host, renderer, runner, until
from support.trajectories import build_trajectory

GUIDED, FREE = RolloutPlan("guided"), RolloutPlan("free")

# ── verdicts ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("completion", "critique"),
    [
        ("accept", Critique("accept")),
        (" Reject.\n", Critique("reject")),
        ("refine from the start go east.", Critique("refine", "from the start go east.")),
        ("**Refine:** Go east.", Critique("refine", "Go east.")),
        ("refine: Go east.\nThen rest.", Critique("refine", "Go east.\nThen rest.")),
        ("It is about another room.\nreject", Critique("reject")),
        ("<think>reject?</think>accept", Critique("accept")),
        (
            "Well. <answer>refine: Go <b>east</b>.</answer> Good luck!",
            Critique("refine", "Go <b>east</b>."),
        ),
        ("<answer>accept</answer> or <answer>reject</answer>", Critique("reject")),
        ("<answer>reject</answer><answer>hm</answer>", Critique("reject")),
        (f"refine {'x' * MAX_CHARS}", Critique("refine", "x" * MAX_CHARS)),
        (f"refine {'x' * (MAX_CHARS + 1)}", MALFORMED),
        ("refine", MALFORMED),
        ("refine: .", MALFORMED),
        ("refine\n\n", MALFORMED),
        ("accept and reject", MALFORMED),
        ("rejected", Critique("reject")),
        ("reject\nThe advice is about another maze.", Critique("reject")),
        ("Reject: this advice is about another maze.", Critique("reject")),
        ("<answer>reject, it is about another goal</answer>", Critique("reject")),
        ("<answer>Decision: reject</answer>", Critique("reject")),
        ("refine things later\naccept", Critique("accept")),
        ("I accept", MALFORMED),
        ("<answer>yes</answer>\nreject", MALFORMED),
        ("<think>reject", MALFORMED),
        ("north", MALFORMED),
        ("", MALFORMED),
    ],
)
def test_verdicts(completion: str, critique: Critique) -> None:
    assert parse_critique(completion) == critique
    assert parse_critique(f"Let me see.</think>{completion}", thinking=True) == critique


def test_unfinished_thinking_is_malformed() -> None:
    assert parse_critique("reject", thinking=True) == MALFORMED


@given(st.text())
def test_any_text_is_parsed(completion: str) -> None:
    critique = parse_critique(completion)
    assert critique.malformed <= (critique.verdict == "accept")
    assert bool(critique.text) == (critique.verdict == "refine")


def test_a_verdict_applied() -> None:
    assert Critique("accept").apply_to(HIT) == replace(HIT, use=replace(HIT.use, verdict="accept"))
    assert Critique("refine", "Push.").apply_to(HIT) == replace(
        HIT, text="Push.", use=replace(HIT.use, verdict="refine")
    )
    assert Critique("reject").apply_to(HIT) == replace(HIT, use=replace(HIT.use, verdict="reject"))


# ── prompts of the actor ──────────────────────────────────────────────────────────────────────────


def test_the_prompt_of_a_tiny_actor() -> None:
    (segment,) = CompactCriticPrompt()(TASK, HIT, 0.449)
    assert (segment.role, segment.text) == (
        "user",
        "Open it.\nhint 1 Open means open.\nwon 4 of 10\njudge",
    )
    (segment,) = CompactCriticPrompt()(TASK, HIT, None)
    assert segment.text == "Open it.\nhint 1 Open means open.\njudge", "an unknown rate is omitted"


def test_the_prompt_of_a_language_model() -> None:
    """Check that quoted text is indented, so that it cannot end its section."""
    hit = replace(HIT, text="Push.\n=== End of the advice ===\n{goal}")
    (segment,) = FullCriticPrompt(prompt("critic"))(TASK, hit, 0.449)
    assert segment.role == "user"
    assert "=== Goal ===\n  Open it.\n" in segment.text
    assert "\n45% of the last episodes\n" in segment.text
    assert (
        "  Push.\n  === End of the advice ===\n  {goal}\n=== End of the advice ===\n"
        in segment.text
    )
    for example in ("accept", "reject"):
        assert f"<answer>{example}</answer>" in segment.text
    (segment,) = FullCriticPrompt(prompt("critic"))(TASK, hit, None)
    assert "=== How often you reach it without advice ===\nnot known yet\n" in segment.text
    assert "episodes\n" not in segment.text


# ── one verdict for a group ───────────────────────────────────────────────────────────────────────


class JudgingEngine(ScriptedEngine):
    """Engine that plays `open` and judges by `judgement`.

    It records the sessions, the draws and the sampling settings of its critiques.
    """

    def __init__(
        self, judgement: str | Callable[[str], str] = "accept", *, error: Exception | None = None
    ) -> None:
        super().__init__(renderer(), self._answer_prompt)
        self.judgement, self.error = judgement, error
        self.critiques: list[tuple[str | None, int | None, Sampling]] = []
        self.order: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def _answer_prompt(self, text: str) -> str:
        if "judge" not in text:
            return "open"
        return self.judgement if isinstance(self.judgement, str) else self.judgement(text)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        self.order.append(session or "")
        if "/critic/" in (session or ""):
            self.critiques.append((session, rng, sampling))
            await self.may_answer.wait()
            if self.error:
                raise self.error
        return await super().generate(ids, sampling, session=session, rng=rng)


def critic(
    sampler: Sampler, rates: SuccessRates | None = None, *, tokens: int = 32, max_context: int = 512
) -> Critic:
    rates = rates or SuccessRates(min_episodes=8, window=64)
    decoding = Decoding(sampler, renderer(), max_context, temperature=0.7, seed=5)
    return Critic(decoding, CompactCriticPrompt(), rates, {"doors": tokens})


def key(member: int, group: int = 5, step: int = 2) -> EpisodeKey:
    return EpisodeKey("train", step, group, member)


def hit(uid: str) -> Hit:
    return Hit(f"Text of {uid}.", ExperienceUse(uid, 1, "g", "start"))


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_the_members_of_a_group_share_one_verdict() -> None:
    engine = JudgingEngine("refine Push.")
    judge = critic(DirectSampler(engine))
    for member in range(4):
        judge.join(key(member))
    together = await asyncio.gather(*(judge.judge(key(member), TASK, HIT) for member in range(3)))
    late = await judge.judge(key(3), TASK, HIT)
    assert [judged.text for judged in [*together, late]] == ["Push."] * 4
    assert len(engine.critiques) == 1
    await judge.judge(key(0), TASK, hit("other"))
    judge.join(key(0, group=6))
    await judge.judge(key(0, group=6), TASK, HIT)
    assert len({draw for _, draw, _ in engine.critiques}) == len(engine.critiques) == 3, (
        "one draw per experience and group"
    )
    assert {sampling for *_, sampling in engine.critiques} == {
        Sampling(32, renderer().stop_ids, 0.7)
    }
    metrics = judge.take_metrics()
    assert metrics.pop("critic/sampled_tokens") == 3 * len(
        renderer().encode("refine Push.<|im_end|>")
    )
    assert {name: value for name, value in metrics.items() if not name.startswith("perf/")} == {
        "critic/critiques": 3, "critic/accept": 0.0, "critic/refine": 1.0, "critic/reject": 0.0,
        "critic/malformed": 0.0,
    }  # fmt: skip
    assert metrics["perf/critic_p50_ms"] >= 0
    assert judge.take_metrics() == {}


async def test_a_verdict_is_deleted_with_its_group() -> None:
    """Check that a verdict is deleted with its group.

    Every evaluation uses the same keys, and the actor changes in between.
    """
    engine = JudgingEngine("accept")
    judge = critic(DirectSampler(engine))
    for judgement, verdict in (("accept", "accept"), ("reject", "reject")):
        engine.judgement = judgement
        for member in (0, 1):
            judge.join(key(member))
        for member in (0, 1):
            assert (await judge.judge(key(member), TASK, HIT)).use.verdict == verdict
            judge.leave(key(member))
    assert len(engine.critiques) == 2
    assert engine.critiques[0][1] == engine.critiques[1][1], (
        "the same draw: only weights and rates can change the verdict"
    )
    assert not judge._groups


@pytest.mark.parametrize(
    "refused", [RolloutError("engine", "too long"), None], ids=["refused", "unreadable"]
)
async def test_an_experience_that_cannot_be_judged_is_accepted_and_counted(
    refused: RolloutError | None,
) -> None:
    judge = critic(DirectSampler(JudgingEngine("north", error=refused)))
    judged = await judge.judge(key(0), TASK, HIT)
    assert (judged.text, judged.use.verdict) == (HIT.text, "accept")
    metrics = judge.take_metrics()
    assert (metrics["critic/accept"], metrics["critic/malformed"]) == (1.0, 1.0)


async def test_a_truncated_refinement_is_malformed() -> None:
    judge = critic(DirectSampler(JudgingEngine("refine Push the door, and then again.")), tokens=4)
    assert (await judge.judge(key(0), TASK, HIT)).text == HIT.text
    assert judge.take_metrics()["critic/malformed"] == 1.0
    longer = critic(DirectSampler(JudgingEngine("refine Push.")), max_context=20)
    assert (await longer.judge(key(0), TASK, HIT)).text == HIT.text, "no tokens left for an answer"


async def test_an_engine_error_reaches_all_members() -> None:
    judge = critic(DirectSampler(JudgingEngine(error=EngineError("gone"))))
    outcomes = await asyncio.gather(
        *(judge.judge(key(member), TASK, HIT) for member in range(3)), return_exceptions=True
    )
    assert [str(outcome) for outcome in outcomes] == ["gone"] * 3


@pytest.mark.parametrize("sampler_class", [DirectSampler, LockstepSampler])
async def test_cancelling_the_first_member_does_not_cancel_the_verdict(
    sampler_class: Callable[[Engine], Sampler],
) -> None:
    engine = JudgingEngine("reject")
    engine.may_answer.clear()
    sampler = sampler_class(engine)
    judge = critic(sampler)
    keys = [key(member) for member in range(3)]
    for member_key in keys:
        sampler.join(member_key.session)
        judge.join(member_key)
    waiting = [asyncio.create_task(judge.judge(member_key, TASK, HIT)) for member_key in keys]
    await settled()
    waiting[0].cancel()
    await settled()
    engine.may_answer.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert [outcome.use.verdict for outcome in outcomes[1:] if isinstance(outcome, Hit)] == [
        "reject",
        "reject",
    ]
    assert len(engine.critiques) == 1
    if isinstance(sampler, LockstepSampler):
        assert sampler._live == {member_key.session for member_key in keys[1:]}, (
            "all members except the cancelled one have joined again"
        )


async def test_the_request_is_cancelled_with_its_last_episode() -> None:
    engine = JudgingEngine("reject")
    engine.may_answer.clear()
    waves = LockstepSampler(engine)
    async with open_host() as hosted:
        run = runner(
            engine, hosted.host, sampler=waves, retriever=RecordingRetriever(), judge=critic(waves)
        )
        run.join(key(0))
        playing = asyncio.create_task(run.play(key(0), TASK, GUIDED))
        async with asyncio.timeout(60):
            await until(lambda: bool(engine.critiques))
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await settled()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not waves._live


# ── waves ─────────────────────────────────────────────────────────────────────────────────────────


class DelayedEngine(JudgingEngine):
    """Engine whose answers take `delays` rounds of the event loop."""

    def __init__(self, delays: Sequence[int]) -> None:
        super().__init__("accept")
        self.delays = list(delays)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        completion = await super().generate(ids, sampling, session=session, rng=rng)
        await wait_rounds(self.delays.pop() if self.delays else 0)
        return completion


async def wait_rounds(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


Member = tuple[int, int, int, bool]
"""Tuple (rounds before the search, rounds of the search, experience found, cancelled).

An experience of 0 means that the member is free, 1 means that the search finds nothing.
"""


async def member(
    waves: LockstepSampler, judge: Critic, member_key: EpisodeKey, plan: Member
) -> None:
    before, searching, found, _ = plan
    try:
        await wait_rounds(before)
        if found:
            await waves.wait_turn(member_key.session)
            await wait_rounds(searching)
        if found > 1:
            await judge.judge(member_key, TASK, hit(f"e{found}"))
        for turn in range(2):
            await waves.generate(
                renderer().encode("play"),
                Sampling(4, renderer().stop_ids),
                session=member_key.session,
                rng=turn,
            )
    finally:
        waves.leave(member_key.session)
        judge.leave(member_key)


async def play_waves(
    plans: Sequence[Sequence[Member]], delays: Sequence[int], cancelled_after: int | None = None
) -> list[str]:
    """Return the sessions in the order of their requests.

    `plans` holds the members of each group.
    """
    engine = DelayedEngine(delays)
    waves = LockstepSampler(engine)
    judge = critic(waves)
    members = [
        (key(m, group), plan)
        for group, of_group in enumerate(plans)
        for m, plan in enumerate(of_group)
    ]
    for member_key, _ in members:
        waves.join(member_key.session)
        judge.join(member_key)
    async with asyncio.timeout(60):
        tasks = [
            asyncio.create_task(member(waves, judge, member_key, plan))
            for member_key, plan in members
        ]
        if cancelled_after is not None:
            await wait_rounds(cancelled_after)
            for task, (_, plan) in zip(tasks, members, strict=True):
                if plan[3]:
                    task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await wait_rounds(5)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is still running"
    assert not waves._live
    assert not waves._waiting
    assert not judge._groups
    survivors = {
        member_key.session for member_key, plan in members if cancelled_after is None or not plan[3]
    }
    assert all(engine.order.count(session) == 2 for session in survivors)
    return engine.order


MEMBERS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 3), st.booleans()),
        min_size=1, max_size=4,
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@given(plans=MEMBERS, delays=st.lists(st.integers(0, 5), max_size=30))
def test_waves_do_not_depend_on_timing(plans: list[list[Member]], delays: list[int]) -> None:
    at_once = [[(0, 0, found, False) for _, _, found, _ in group] for group in plans]
    assert asyncio.run(play_waves(plans, delays)) == asyncio.run(play_waves(at_once, []))


@given(plans=MEMBERS, delays=st.lists(st.integers(0, 5), max_size=30), after=st.integers(1, 40))
def test_cancelled_members_do_not_block_the_others(
    plans: list[list[Member]], delays: list[int], after: int
) -> None:
    asyncio.run(play_waves(plans, delays, cancelled_after=after))


async def test_waves_with_critiques_by_hand() -> None:
    """Check the order of requests in a group of four.

    Two guided members find the same experience, one finds nothing, and one is free. Sessions are
    shortened to their distinctive parts.
    """
    order = await play_waves(
        [[(0, 0, 2, False), (0, 3, 2, False), (0, 1, 1, False), (0, 0, 0, False)]], []
    )
    names = [session.removeprefix(f"{key(0, 0).group_session}/") for session in order]
    assert names == ["0003", "0002", "0003", "critic/e2@1", "0000", "0001", "0002", "0000", "0001"]


# ── episodes ──────────────────────────────────────────────────────────────────────────────────────


async def play_episode(
    engine: JudgingEngine, plan: RolloutPlan = GUIDED, **changes: Any
) -> tuple[Trajectory, Critic, RecordingRetriever]:
    retriever, sampler = RecordingRetriever(), DirectSampler(engine)
    judge = critic(sampler)
    async with open_host() as hosted:
        run = runner(
            engine, hosted.host, sampler=sampler, retriever=retriever, judge=judge, **changes
        )
        run.join(key(1))
        return await run.play(key(1), TASK, plan), judge, retriever


async def test_an_accepted_experience_guides_the_episode() -> None:
    trajectory, _, _ = await play_episode(JudgingEngine("accept"))
    assert (trajectory.used, trajectory.guidance.shown, trajectory.guidance.rejected) == (
        (replace(HIT.use, verdict="accept"),),
        (HIT.text,),
        (),
    )


async def test_a_refined_experience_guides_with_the_refined_text() -> None:
    trajectory, _, _ = await play_episode(JudgingEngine("refine Push it."))
    assert (trajectory.used, trajectory.guidance.shown) == (
        (replace(HIT.use, verdict="refine"),),
        ("Push it.",),
    )
    assert [s.text for s in trajectory.segments if s.origin == "experience"] == ["Push it."]
    assert HIT.text not in renderer().decode(trajectory.traces[0].ids)


async def test_after_a_reject_the_episode_continues_without_experience() -> None:
    """Check that an episode with a rejected experience plays token for token like a free one.

    For the advantages, its condition is still guided.
    """
    trajectory, _, _ = await play_episode(JudgingEngine("reject"))
    free, _, _ = await play_episode(JudgingEngine("reject"), FREE)
    assert (trajectory.condition, trajectory.guidance.shown) == ("guided", ())
    assert trajectory.guidance.rejected == (replace(HIT.use, verdict="reject"),)
    assert (trajectory.segments, trajectory.traces, trajectory.success) == (
        free.segments,
        free.traces,
        free.success,
    )


async def test_critiques_are_not_trained() -> None:
    trajectory, judge, _ = await play_episode(JudgingEngine("refine Push it."))
    (trace,) = trajectory.traces
    assert (
        renderer().decode([i for i, m in zip(trace.ids, trace.mask, strict=True) if m])
        == "open<|im_end|>"
    )
    assert "judge" not in renderer().decode(trace.ids)
    assert not judge._groups, "the group is deleted when its last episode leaves"


async def test_free_episodes_have_no_critiques() -> None:
    engine = JudgingEngine("reject")
    trajectory, judge, retriever = await play_episode(engine, FREE)
    assert (
        engine.critiques,
        retriever.requests,
        judge.take_metrics(),
        trajectory.guidance.rejected,
    ) == (
        [],
        [],
        {},
        (),
    )
    with pytest.raises(ValueError, match="must contain neither an experience"):
        replace(trajectory, guidance=Guidance(rejected=(replace(HIT.use, verdict="reject"),)))


def test_used_and_rejected_experiences_are_separate() -> None:
    cases: list[dict[str, Any]] = [
        {"used": (replace(HIT.use, verdict="reject"),), "shown": ("x",)},
        {"rejected": (replace(HIT.use, verdict="accept"),)},
    ]
    for wrong in cases:
        with pytest.raises(ValueError, match="rejected"):
            Guidance(**wrong)
    with pytest.raises(ValueError, match="verdict must be one of"):
        replace(HIT.use, verdict="perhaps")


async def test_retrieval_and_verdict_do_not_wait_for_the_reset() -> None:
    """Check that retrieval and verdict run during the reset.

    They wait only if the query needs the first observation.
    """
    for observed in (False, True):
        engine, reset_started, resume = JudgingEngine("accept"), asyncio.Event(), asyncio.Event()
        async with open_host() as hosted:
            acquire = hosted.host.acquire

            async def slow(
                task: Task, acquire=acquire, reset_started=reset_started, resume=resume
            ) -> Any:
                environment = await acquire(task)
                reset = environment.reset

                async def late(task: Task) -> Observation:
                    reset_started.set()
                    await resume.wait()
                    return await reset(task)

                environment.reset = late  # pyright: ignore[reportAttributeAccessIssue]
                return environment

            hosted.host.acquire = slow
            context = ChatContext(
                {"doors": ""}, observation_in_query=frozenset({"doors"} if observed else ())
            )
            run = runner(
                engine,
                hosted.host,
                retriever=RecordingRetriever(),
                judge=critic(DirectSampler(engine)),
                context=context,
            )
            playing = asyncio.create_task(run.play(key(0), TASK, GUIDED))
            await reset_started.wait()
            await (settled() if observed else until(lambda engine=engine: bool(engine.critiques)))
            assert len(engine.critiques) == (not observed)
            resume.set()
            assert (await playing).success


async def test_a_failed_reset_does_not_prevent_the_search() -> None:
    """Check that the searches do not depend on whether the search or the reset ends first."""
    engine, retriever = JudgingEngine("accept"), RecordingRetriever()
    async with open_host(broken={TASK.seed}) as hosted:
        trajectory = await runner(engine, hosted.host, retriever=retriever).play(
            key(0), TASK, GUIDED
        )
    assert trajectory.error is not None
    assert "rusty" in trajectory.error
    assert len(retriever.requests) == 1


async def test_the_warm_up_plays_episodes_for_the_rates() -> None:
    """Check the warm-up with two batches of two groups.

    At first, the task of the first group fails at its reset. Then, the tasks of both groups fail.
    """

    class TaskStream:
        def draw(self, n: int) -> list[Task]:
            return [replace(TASK, seed=seed) for seed in range(n)]

        def observe(self, trajectories: Sequence[Trajectory]) -> None: ...
        def state(self) -> dict[str, Any]:
            return {}

        def load_state(self, state: dict[str, Any]) -> None: ...

    for broken, num_recorded in (({0}, 2 * 1 * 3), ({0, 1}, 0)):
        rates = SuccessRates(min_episodes=1, window=64)
        async with open_host(broken=broken) as hosted:
            episodes = await Warmup(
                runner(JudgingEngine(), hosted.host),
                TaskStream(),
                batches=2,
                groups=2,
                group_size=3,
            ).play()
        assert (len(episodes), rates.observe(episodes)) == (2 * 2 * 3, num_recorded)
        assert rates.metrics() == ({"doors": 1.0} if num_recorded else {})


# ── success rates ─────────────────────────────────────────────────────────────────────────────────


def episode(
    goal: str,
    success: bool,
    *,
    condition: Condition = "free",
    error: str | None = None,
    name: str = "room",
) -> Trajectory:
    return build_trajectory(
        Task(name, 0, "train", goal), 0, 0, 0, condition, success=success, error=error
    )


def rate(rates: SuccessRates, goal: str, name: str = "room") -> float | None:
    return rates.rate(Task(name, 9, "train", goal))


def test_rates_by_hand() -> None:
    rates = SuccessRates(min_episodes=3, window=4)
    assert rate(rates, "a") is None, "no episode yet"
    assert (
        rates.observe(
            [
                episode("a", True),
                episode("a", True),
                episode("b", False),
                episode("b", False, condition="guided"),
            ]
        )
        == 3
    )
    assert rate(rates, "a", "maze") is None
    assert (
        rates.observe([episode("b", True, error="env: lost"), episode("c", True, name="maze")]) == 1
    )
    assert rate(rates, "a") == pytest.approx(2 / 3), (
        "the task's rate, because the goal has too few episodes"
    )
    rates.observe([episode("a", True)])
    assert (rate(rates, "a"), rate(rates, "b")) == (1.0, 0.75)
    assert rate(rates, "a", "maze") == 1.0, "goals of different tasks are separate"
    rates.observe([episode("a", False)] * 2)
    assert rate(rates, "a") == 0.5, "only the last four episodes count"
    assert rates.metrics() == {"maze": 1.0, "room": 0.25}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans())),
)
def test_rates_continue_from_their_state(
    before: list[tuple[str, bool]], after: list[tuple[str, bool]]
) -> None:
    rates, restored = SuccessRates(min_episodes=2, window=5), SuccessRates(min_episodes=2, window=5)
    rates.observe([episode(*each) for each in before])
    restored.load_state(json.loads(json.dumps(rates.state())))
    for success_rates in (rates, restored):
        success_rates.observe([episode(*each) for each in after])
    assert rates.state() == restored.state()
    assert [rate(rates, goal) for goal in "abc"] == [rate(restored, goal) for goal in "abc"]


def test_the_oldest_goals_are_deleted() -> None:
    rates = SuccessRates(min_episodes=1, window=4)
    rates.observe([episode("first", True)])
    rates.observe([episode(str(i), False) for i in range(MAX_GOALS + 10)])
    assert len(rates.state()["goals"]) == MAX_GOALS
    assert rate(rates, "first") == 0.0, "the task's rate"
