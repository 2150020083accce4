"""Advice probe and bank built online, in the real room environment.

The actors are scripts that read their prompts. Some follow the advice, others ignore it. No model
is trained.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from crl.config.schema import BankSection, RetrievalSection
from crl.engines.scripted import ScriptedEngine
from crl.envs.actions import COMPASS
from crl.envs.base import StreamSettings
from crl.envs.hosting.threads import ThreadHost
from crl.envs.room import SPEC, probe_tasks
from crl.envs.room.lessons import lesson, true_stairs_direction
from crl.evaluation.evaluate import EvalSet, Evaluation, Evaluator, SuccessRate
from crl.evaluation.online import (
    MEMBERS,
    RUN_NAME,
    VISITS,
    LessonCounter,
    OnlineEvaluator,
    OnlineResult,
    OnlineTask,
    credit_and_distil,
)
from crl.evaluation.probe import AdviceProbe, ProbeTask, advice_texts
from crl.evaluation.scheduling import EpisodeScheduler
from crl.manager import Distilled, EpisodeId, ExperienceManager, ManagerSettings, Prompts
from crl.methods.parts.distilling import CompactDistilPrompt, EveryEpisode
from crl.methods.parts.rollouts import ChatContext
from crl.protocols import SearchRequest
from crl.rollout.episode import EpisodeKey, EpisodeRunner, Limits
from crl.run.experience import ReadOnlyRetriever
from crl.types import Task, Trajectory
from support.doors import renderer, runner
from support.managers import (
    WordEmbedder,
    add,
    answering,
    distilled,
    dump,
    request,
    task,
    write_merge,
)
from support.trajectories import build_trajectory

TURNS = 4
SEEN_STAIRS = re.compile(r"^stairs ([a-z]+)$", re.MULTILINE)
ADVICE = re.compile(r"from the start go ([a-z]+)\.")
PLACES = SPEC.tasks.eval_tasks("unseen", 3, 0, StreamSettings())
assert SPEC.curriculum.advisor
ADVISOR = SPEC.curriculum.advisor


def follow_advice(prompt: str) -> str:
    """Return the direction of the stairs if they were seen, otherwise the advised direction.

    Without advice return northwest.
    """
    advice, seen = ADVICE.search(prompt), SEEN_STAIRS.findall(prompt)
    return seen[-1] if seen else advice[1] if advice else "northwest"


def ignore_advice(prompt: str) -> str:
    return random.Random(ADVICE.sub("", prompt).count("assistant")).choice(list(COMPASS))


@asynccontextmanager
async def room_runner(actor: Callable[[str], str]) -> AsyncIterator[EpisodeRunner]:
    host = ThreadHost({"room": (SPEC, "compact")}, threads=2)
    try:
        yield runner(
            ScriptedEngine(renderer(), actor),
            host,
            context=ChatContext({"room": ""}),
            limits={"room": Limits(TURNS, 8, extra_turns=4)},
        )
    finally:
        await host.aclose()


# ── the advice probe ──────────────────────────────────────────────────────────────────────────────

PROBE_PLACES = probe_tasks(12)


async def probe_metrics(actor: Callable[[str], str]) -> dict[str, float]:
    async with room_runner(actor) as run:
        probe = AdviceProbe(run, {"room": ProbeTask(PROBE_PLACES, ADVISOR)}, EpisodeScheduler(5))
        metrics = await probe.measure()
        assert await probe.measure() == metrics, "the same places and the same draws every time"
        return metrics


async def test_an_actor_that_follows_advice_gains_from_right_advice() -> None:
    metrics = await probe_metrics(follow_advice)
    assert metrics["probe/room/right"] > metrics["probe/room/none"]
    assert metrics["probe/room/right"] > metrics["probe/room/wrong"]
    assert metrics["probe/room/right_minus_none"] == pytest.approx(
        metrics["probe/room/right"] - metrics["probe/room/none"]
    )
    assert 0 < metrics["probe/room/right_minus_none/half_width"] < 0.6


async def test_an_actor_that_ignores_advice_gains_nothing() -> None:
    metrics = await probe_metrics(ignore_advice)
    assert metrics["probe/room/right"] == metrics["probe/room/none"] == metrics["probe/room/wrong"]
    assert (
        metrics["probe/room/right_minus_none"],
        metrics["probe/room/right_minus_none/half_width"],
    ) == (0.0, 0.0)


async def test_all_kinds_of_advice_have_the_same_draws() -> None:
    """Check that concurrent and ordered episodes give the same result.

    The arms have different sessions but the same draws.
    """
    async with room_runner(ignore_advice) as run:
        advice = {"room": ProbeTask(PROBE_PLACES[:3], ADVISOR)}
        schedulers = [EpisodeScheduler(5), EpisodeScheduler(5, in_order=True)]
        first, second = [await AdviceProbe(run, advice, one).measure() for one in schedulers]
    assert first == second
    keys = [EpisodeKey("probe/room", 0, 1, 0, arm) for arm in ("none", "right", "wrong")]
    assert len({key.session for key in keys}) == 3
    assert {key.draw_name for key in keys} == {EpisodeKey("probe/room", 0, 1, 0).session}


async def test_episodes_are_expected_before_their_advice_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two places with three kinds of advice."""
    reports: list[tuple[int, int]] = []
    at_advice: list[tuple[int, int]] = []
    scheduler = EpisodeScheduler(8, report=lambda done, total: reports.append((done, total)))
    async with room_runner(ignore_advice) as run:
        probe = AdviceProbe(run, {"room": ProbeTask(PROBE_PLACES[:2], ADVISOR)}, scheduler)
        texts = probe._texts

        def advised() -> object:
            at_advice.extend(reports)
            return texts()

        monkeypatch.setattr(probe, "_texts", advised)
        await probe.measure()
    assert at_advice == [(0, 6)]


async def test_each_place_gets_its_own_advice() -> None:
    async with room_runner(follow_advice) as run:
        advice = {"room": ProbeTask(PROBE_PLACES[:4], ADVISOR)}
        await AdviceProbe(run, advice, EpisodeScheduler(8)).measure()
        assert isinstance(
            run.decoding.sampler._engine,  # pyright: ignore[reportAttributeAccessIssue]
            ScriptedEngine,
        )
        prompts = [
            renderer().decode(ids)
            for _, ids in (
                run.decoding.sampler._engine.requests  # pyright: ignore[reportAttributeAccessIssue]
            )
        ]
    task = ProbeTask(PROBE_PLACES[:4], ADVISOR)
    for place in PROBE_PLACES[:4]:
        opening = {
            prompt for prompt in prompts if place.goal in prompt and prompt.count("assistant") == 1
        }
        advice = {match[0] if (match := ADVICE.search(prompt)) else None for prompt in opening}
        right, wrong = (
            advice_texts(task, "right")[place.goal],
            advice_texts(task, "wrong")[place.goal],
        )
        assert advice == {None, right, wrong}
        assert right == lesson("exit", true_stairs_direction(int(place.params["lgen"])) or "")
        assert wrong != right
        assert ADVICE.fullmatch(wrong)


# ── a bank built online ───────────────────────────────────────────────────────────────────────────

SETTINGS = ManagerSettings(retrieval=RetrievalSection(margin=0.0, min_similarity=0.9))
PROMPT = CompactDistilPrompt({"room": SPEC.curriculum.digest or (lambda segments: "")})


def good_extractor(prompt: str) -> str:
    """Add the direction of the stairs from the digest, unless the episode had a hint."""
    seen = re.search(r"stairs ([a-z]+) of the start", prompt)
    return add(lesson("exit", seen[1])) if seen and "hint" not in prompt else '[{"op": "return"}]'


def bad_extractor(prompt: str) -> str:
    return add(lesson("careful"))


async def open_bank(
    path: Path,
    extractor: Callable[[str], str],
    on_distilled: Callable[[Distilled], None] | None = None,
):
    settings = replace(SETTINGS, bank=BankSection(key_text_weight=0.1))
    return await ExperienceManager.open(
        path, answering(extractor), WordEmbedder(), renderer(), Prompts(PROMPT, write_merge),
        settings, seed=0, on_distilled=on_distilled,
    )  # fmt: skip


class Banks:
    """Bank of the run, and scratch banks like those of an assembled run."""

    def __init__(
        self, folder: Path, bank: ExperienceManager, extractor: Callable[[str], str]
    ) -> None:
        self.folder, self.bank, self.extractor = folder, bank, extractor
        self.opened = 0
        self.sizes: list[int] = []

    @asynccontextmanager
    async def _open(
        self, extractor, on_distilled, *, copy: bool
    ) -> AsyncIterator[ExperienceManager]:
        self.opened += 1
        path = self.folder / f"scratch{self.opened}.sqlite"
        if copy:
            await self.bank.export_copy(path)
        async with AsyncExitStack() as stack:
            made = await open_bank(path, extractor, on_distilled)
            stack.push_async_callback(made.aclose)
            yield made
            self.sizes.append(len(made.latest(999)))

    def open_scratch(self, on_distilled: Callable[[Distilled], None]):
        return self._open(self.extractor, on_distilled, copy=True)

    def open_untrained(self, on_distilled: Callable[[Distilled], None]):
        return self._open(bad_extractor, on_distilled, copy=False)


@asynccontextmanager
async def online(
    folder: Path, actor, extractor
) -> AsyncIterator[tuple[OnlineEvaluator, Banks, EpisodeRunner]]:
    bank = await open_bank(folder / "bank.sqlite", extractor)
    banks = Banks(folder, bank, extractor)
    assert SPEC.tasks.revisit
    tasks = {"room": OnlineTask(PLACES, SPEC.tasks.revisit, ADVISOR)}
    try:
        async with room_runner(actor) as run:
            scheduler = EpisodeScheduler(7)
            yield (
                OnlineEvaluator(
                    run, tasks, banks.open_scratch, banks.open_untrained, scheduler, EveryEpisode()
                ),
                banks,
                run,
            )
    finally:
        await bank.aclose()


async def test_a_bank_built_online_helps_an_actor_that_follows_advice(tmp_path: Path) -> None:
    async with online(tmp_path, follow_advice, good_extractor) as (evaluation, banks, _):
        before = dump(tmp_path / "bank.sqlite")
        result = (await evaluation.evaluate(compare_lessons=False))["room"]
        assert dump(tmp_path / "bank.sqlite") == before, "the bank of the run is not changed"
        assert banks.sizes[0] > 0
    assert [len(visit) for visit in result.visits] == [len(PLACES) * MEMBERS] * VISITS
    assert all(not t.used for t in result.visits[0]), "the bank has no lesson yet"
    assert any(t.used for t in result.visits[1]), "lessons of the first visit guide the second"
    assert all(t.condition == "guided" for visit in result.visits for t in visit)
    assert result.counted_visits == result.visits[2:]
    assert any(t.activity.overtime_turns for visit in result.visits[:-1] for t in visit), (
        "overtime is played for distillation"
    )
    undistilled = [*result.visits[-1], *(t for visit in result.free_visits for t in visit)]
    assert not any(t.activity.overtime_turns for t in undistilled)
    guidance = {(t.task.goal, t.guidance.shown) for t in result.visits[1] if t.used}
    assert len(guidance) == len({goal for goal, _ in guidance}), (
        "the members of a visit share an experience"
    )
    right, answers = result.lessons or (0, 0)
    assert answers == len(PLACES) * MEMBERS
    assert 0 < right <= answers
    assert result.untrained_lessons is None
    assert len(result.lift) == len(PLACES)
    wins = [
        sum(t.success for visit in visits for t in visit)
        for visits in (result.counted_visits, result.free_visits)
    ]
    assert sum(result.lift) * MEMBERS * len(result.free_visits) == pytest.approx(wins[0] - wins[1])
    assert wins[0] > wins[1], "right advice increases the success"


@pytest.mark.parametrize("shared", [False, True], ids=["goals", "variations"])
def test_lift_by_hand(shared: bool) -> None:
    """Use two places, one member and three counted visits.

    With the bank the places have 3 and 1 successes, without the bank 1 and 1: (2/3, 0). Places with
    the same goal differ in their variation.
    """

    def place(number: int) -> Task:
        goal = "the same" if shared else f"place {number}"
        return Task("room", 1, "unseen", goal, {"variation": number} if shared else {})

    def visit(*won: bool) -> list[Trajectory]:
        return [
            build_trajectory(place(i), 0, i, 0, "free", success=one) for i, one in enumerate(won)
        ]

    guided = [
        visit(False, False),
        visit(False, False),
        visit(True, True),
        visit(True, False),
        visit(True, False),
    ]
    result = OnlineResult(guided, [visit(True, False), visit(False, True), visit(False, False)])
    assert result.lift == pytest.approx([2 / 3, 0])


async def test_visits_have_different_dynamics_and_are_reproducible(
    tmp_path: Path,
) -> None:
    async with online(tmp_path, follow_advice, good_extractor) as (evaluation, _, _run):
        first = (await evaluation.evaluate(compare_lessons=False))["room"]
        assert (await evaluation.evaluate(compare_lessons=False))["room"] == first
    tasks = [t.task for visit in first.visits for t in visit]
    assert (
        len({(task.goal, task.params["core"]) for task in tasks})
        == len(tasks)
        == len(PLACES) * MEMBERS * VISITS
    )
    assert {task.goal for task in tasks} == {place.goal for place in PLACES}
    assert {task.params["lgen"] for task in tasks} == {place.params["lgen"] for place in PLACES}


async def test_concurrent_tasks_give_the_same_results_as_separate_ones(
    tmp_path: Path,
) -> None:
    """Evaluate two tasks with the same places together, and one after the other."""

    def of(result: OnlineResult) -> list[list[tuple]]:
        visits = [*result.visits, *result.free_visits]
        return [[(t.address, t.success, t.turns, t.guidance) for t in some] for some in visits]

    found: list[dict[str, OnlineResult]] = []
    for in_order in (False, True):
        folder = tmp_path / str(in_order)
        folder.mkdir()
        async with online(folder, follow_advice, good_extractor) as (evaluation, banks, run):
            named = {name: evaluation._tasks["room"] for name in ("room", "lounge")}
            named["lounge"] = replace(named["room"], places=[*reversed(PLACES)])
            scheduler = EpisodeScheduler(5, in_order=in_order)
            both = OnlineEvaluator(
                run, named, banks.open_scratch, banks.open_untrained, scheduler, EveryEpisode()
            )
            found.append(await both.evaluate(compare_lessons=True))
            assert banks.opened == 4, "a scratch copy and an untrained bank for each"
    together, apart = found
    assert list(together) == list(apart) == ["room", "lounge"]
    for name, result in together.items():
        assert of(result) == of(apart[name])
        assert (result.lessons, result.lift) == (apart[name].lessons, apart[name].lift)
        assert result.untrained_lessons == (0, len(PLACES) * MEMBERS)
    assert any(t.used for t in together["lounge"].visits[1])


async def test_the_untrained_extractor_distils_the_same_episodes(tmp_path: Path) -> None:
    async with online(tmp_path, follow_advice, good_extractor) as (evaluation, banks, _):
        result = (await evaluation.evaluate(compare_lessons=True))["room"]
        assert banks.opened == 2
    assert result.lessons is not None
    assert result.lessons[0] > 0
    assert result.untrained_lessons == (0, len(PLACES) * MEMBERS), (
        'its lesson "careful" is never right'
    )


def test_the_lesson_counter_counts_only_its_own_requests() -> None:
    room = Task(
        "room",
        1,
        "unseen",
        "Room: the jade attic.",
        {"lgen": PLACES[0].params["lgen"], "core": 1, "place": "jade attic"},
    )
    right = distilled(lesson("exit", true_stairs_direction(int(PLACES[0].params["lgen"])) or ""))
    counter = LessonCounter(ADVISOR)
    for run, answer in (
        (RUN_NAME, right),
        ("run", right),
        (RUN_NAME, distilled("be careful.")),
        ("run12345678", distilled()),
    ):
        episode = EpisodeId(run, 0, 0, 0)
        counter(replace(answer, request=replace(answer.request, episode=episode, task=room)))
    assert counter.count == (1, 2)
    without = LessonCounter(None)
    episode = EpisodeId(RUN_NAME, 0, 0, 0)
    without(replace(right, request=replace(right.request, episode=episode, task=room)))
    assert without.count is None


async def test_episodes_with_errors_are_not_distilled(tmp_path: Path) -> None:
    bank = await open_bank(tmp_path / "bank.sqlite", bad_extractor)
    good = [
        build_trajectory(task(), 0, 0, member, "guided", segments=request().segments)
        for member in range(2)
    ]
    await credit_and_distil(
        bank,
        [*good, build_trajectory(task(), 0, 0, 2, "guided", error="env: lost")],
        EveryEpisode(),
    )
    metrics = await bank.stats()
    assert (metrics["queue/done"], metrics["queue/pending"], metrics["queue/dead"], bank.step) == (
        2,
        0,
        0,
        1,
    )
    await bank.aclose()


# ── evaluations leave no trace ────────────────────────────────────────────────────────────────────


async def test_an_evaluation_changes_neither_the_bank_nor_later_searches(
    tmp_path: Path,
) -> None:
    """Search the bank twice, with and without an evaluation in between.

    Use a bank with several experiences of each place.
    """
    picks_by_run: list[list[str | None]] = []
    seen = SPEC.tasks.eval_tasks("seen", 6, 0, StreamSettings())
    for evaluated in (False, True):
        folder = tmp_path / str(evaluated)
        folder.mkdir()
        async with online(
            folder, follow_advice,
            lambda prompt: add(lesson("exit", "south"), lesson("exit", "north"), "be careful."),
        ) as (online_evaluator, banks, run):  # fmt: skip
            bank = banks.bank
            for i, place in enumerate(seen):
                await bank.submit(replace(request(0, i), task=place))
            await bank.drain()
            bank.advance(1)
            picked_lists = [await picked_uids(bank, seen)]
            await bank.flush()
            before = dump(folder / "bank.sqlite")
            counters = bank.latest(999)
            if evaluated:
                result = await evaluator(run, bank, seen, online_evaluator).evaluate(
                    compare_lessons=True
                )
                assert result.rates["room", "seen", "guided"].episodes == 6
                assert {split for _, split, _ in result.rates} == {"seen", "unseen"}
                assert result.rates["room", "unseen", "online"].episodes == len(
                    PLACES
                ) * MEMBERS * (VISITS - 2)
                assert bank.latest(999) == counters
                await bank.flush()
                assert dump(folder / "bank.sqlite") == before
            picked_lists.append(await picked_uids(bank, seen))
            picks_by_run.append([uid for some in picked_lists for uid in some])
    assert picks_by_run[0] == picks_by_run[1]
    assert None not in picks_by_run[0]


async def picked_uids(bank: ExperienceManager, places: Sequence[Task]) -> list[str | None]:
    hits = await bank.search(
        [SearchRequest(place.goal, place, i, 0) for i, place in enumerate(places)]
    )
    return [hit and hit.use.uid for hit in hits]


def evaluator(
    run: EpisodeRunner,
    bank: ExperienceManager,
    seen: Sequence[Task],
    online_evaluator: OnlineEvaluator | None,
) -> Evaluator:
    sets: dict[EvalSet, Sequence[Task]] = {("room", "seen"): seen, ("room", "unseen"): PLACES}
    return Evaluator(
        run, sets, EpisodeScheduler(4), bank=ReadOnlyRetriever(bank), online=online_evaluator
    )


async def test_guided_and_free_evaluations_are_paired(tmp_path: Path) -> None:
    """Check that both play the same episodes with an empty bank.

    Only an experience makes a difference.
    """
    seen = SPEC.tasks.eval_tasks("seen", 6, 0, StreamSettings())
    async with online(tmp_path, follow_advice, good_extractor) as (_, banks, run):
        empty: Evaluation = await evaluator(run, banks.bank, seen, None).evaluate()
        assert empty.rates["room", "seen", "guided"] == empty.rates["room", "seen", "free"]
        assert empty.turns["room", "seen", "guided"] == empty.turns["room", "seen", "free"]
        assert ("room", "unseen", "guided") not in empty.rates, (
            "the bank has no lesson about a new place"
        )
        for i, place in enumerate(seen):
            advice = ADVISOR.right(place)
            answer = json.dumps([{"op": "add", "text": advice}])
            banks.bank._engine._answer = (  # pyright: ignore[reportAttributeAccessIssue]
                lambda prompt, answer=answer: answer
            )
            await banks.bank.submit(replace(request(0, i), task=place))
            await banks.bank.drain()
        full = await evaluator(run, banks.bank, seen, None).evaluate()
        assert full.rates["room", "seen", "free"] == empty.rates["room", "seen", "free"]
        assert full.rates["room", "seen", "guided"].value > full.rates["room", "seen", "free"].value
        assert isinstance(full.rates["room", "seen", "guided"], SuccessRate)
