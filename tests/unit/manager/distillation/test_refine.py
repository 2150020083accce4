"""`search_and_ask` in the manager: refinements, the credit that they earn, and failed questions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.config.schema import AskSection, ExtractorSection, RetrievalSection
from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError, TransientError
from crl.manager import ExperienceManager, ManagerSettings, OpLimits
from crl.manager.distillation.ops import parse_refine
from crl.protocols import Hit, Question, SearchRequest
from crl.types import Completion, Sampling, Segment
from support.doors import renderer
from support.managers import PROMPTS, add, dump, hit, logged, open_manager, request, search, task

ANY = RetrievalSection(margin=2.0, min_similarity=-1.0)
SETTINGS = ManagerSettings(retrieval=ANY, extractor=ExtractorSection(cooldown=0))


def write_refine(question: Question, found: Hit) -> list[Segment]:
    return [Segment("user", f"refine\n{question.query}\n{found.text}", "task")]


ASKING = replace(PROMPTS, refine=write_refine)


def refine(text: str = "Two rooms west.") -> str:
    return json.dumps([{"op": "refine", "text": text}])


class AnsweringEngine(ScriptedEngine):
    """Engine that distils "Go west." from every episode and answers a question with `answer`."""

    def __init__(self, answer: Callable[[str], str] = lambda _: refine()) -> None:
        super().__init__(
            renderer(),
            lambda prompt: answer(prompt) if "user\nrefine\n" in prompt else add("Go west."),
        )


def question_search(member: int = 0, number: int = 1) -> SearchRequest:
    return replace(search(member=member), question=number)


def question(member: int = 0, number: int = 1, query: str = "Where to?") -> Question:
    return Question(
        f"run/train/1/0/{member}/{number}", task(), query, (Segment("user", "at 2 3", "env"),)
    )


async def open_with_entry(
    path: Path, engine: ScriptedEngine, settings: ManagerSettings = SETTINGS, **parts: Any
) -> ExperienceManager:
    manager = await open_manager(
        path / "bank.sqlite", engine, settings, **{"prompts": ASKING, **parts}
    )
    await manager.submit(request())
    await manager.drain()
    return manager


async def ask(manager: ExperienceManager, member: int = 0, number: int = 1) -> Hit:
    (found,) = await manager.search([question_search(member, number)])
    assert found
    return await manager.refine(question(member, number), found)


def masked_text(trace: Any) -> str:
    return renderer().decode(
        [token for token, mask in zip(trace.ids, trace.mask, strict=True) if mask]
    )


# ── parsing of answers ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (refine(), ["refine"]),
        (f"<think>Perhaps {refine('x')}?</think>\n```json\n{refine()}\n```", ["refine"]),
        (refine()[1:-1], ["refine"]),
        ('[{"op": "return"}]', ["return"]),
        ("[]", ["return"]),
    ],
)
def test_refinements_are_parsed(completion: str, expected: list[str]) -> None:
    assert [op.kind for op in parse_refine(completion).ops] == expected


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("Go two rooms west.", "no op in the answer"),
        (add("Go west."), "unknown op"),
        (refine("x" * 41), "text too long"),
        (refine(" "), "empty text"),
        ('[{"op": "refine"}]', "no text"),
        (f"<think>{refine()}", "the thinking did not end"),
        ('[{"op": "refine", "text": "Two', "not JSON"),
    ],
)
def test_unusable_answers_have_a_reason(completion: str, reason: str) -> None:
    parsed = parse_refine(completion, limits=OpLimits(max_chars=40))
    assert (parsed.malformed, parsed.dropped) == (True, {reason: 1})


def test_only_the_first_refinement_counts() -> None:
    parsed = parse_refine(f'[{refine("a")[1:-1]}, {refine("b")[1:-1]}, {{"op": "return"}}]')
    assert [op.text for op in parsed.ops] == ["a"]
    assert parsed.dropped == {"too many ops": 2}


PIECES = st.sampled_from(
    [
        refine(),
        '{"op":',
        '"refine"',
        '"return"',
        "[",
        "]",
        "{",
        "}",
        "</think>",
        "<think>",
        ',"text":',
        '"x"',
        "\\ud800",
        "é",
    ]
)


@settings(max_examples=300)
@given(st.lists(PIECES, max_size=20).map("".join) | st.text(), st.booleans())
def test_any_text_is_parsed(completion: str, thinking: bool) -> None:
    parsed = parse_refine(completion, thinking=thinking)
    assert len(parsed.ops) <= 1
    assert parsed.malformed == (not parsed.ops)
    assert bool(parsed.dropped) or not parsed.malformed


# ── outcome of a question ─────────────────────────────────────────────────────────────────────────


async def test_a_refinement_is_stored_and_earns_its_episodes_reward(tmp_path: Path) -> None:
    engine = AnsweringEngine(lambda prompt: f"<think>Hm.</think>{refine()}")
    manager = await open_with_entry(tmp_path, engine)
    answer = await ask(manager)
    name = question().name
    assert (answer.text, answer.use.how) == ("Two rooms west.", "ask")
    assert (answer.use.uid, answer.use.version, answer.use.generation) == ("run/0/0/0#0", 1, name)
    data = {"uid": "run/0/0/0#0", "version": 1, "text": "Two rooms west."}
    ((origin, row),) = logged(tmp_path / "bank.sqlite", "refine")
    assert (origin, {key: row[key] for key in data}) == (name, data)
    assert len(manager._bank.entries) == 1, "a refinement is not an entry"

    (start,) = await manager.search([search()])
    assert start
    for success in (True, False, True):
        # The third call repeats the episode of the first.
        await manager.credit([start.use, answer.use], success, episode=f"run/1/0/{success}")
    entry = manager._bank.entries["run/0/0/0#0"]
    assert (entry.counters.credited, entry.counters.credit, entry.counters.retrieved) == (
        2,
        0.0,
        2,
    ), "two credits; the question counts as a retrieval"
    ready = {str(unit.pending.unit): unit.pending for unit in await manager._store.ready_units()}
    assert {unit: (pending.count, pending.total) for unit, pending in ready.items()} == {
        "run/0/0/0#0@1": (2, 0.0),
        f"{name}@1": (2, 0.0),
    }

    samples = await manager.take_batch(2, 1)
    assert samples
    texts = {sample.id: masked_text(sample.trace) for sample in samples}
    assert texts[f"{name}@1"] == refine()[1:] + "<|im_end|>"
    assert texts[f"{name}@head"] == "<think>Hm.</think>["
    await manager.mark_trained([sample.id for sample in samples], 1)
    assert await manager._store.ready_units() == []
    await manager.aclose()


async def test_an_unchanged_experience_earns_for_its_entry(tmp_path: Path) -> None:
    manager = await open_with_entry(tmp_path, AnsweringEngine(lambda _: '[{"op": "return"}]'))
    answer = await ask(manager)
    assert (answer.text, answer.use.how) == ("Go west.", "ask_unrefined")
    await manager.credit([answer.use], False, episode="run/1/0/0")
    assert [str(unit.pending.unit) for unit in await manager._store.ready_units()] == [
        "run/0/0/0#0@1"
    ]
    assert (await manager.stats()).items() >= {
        "ops/refine": 1,
        "generations": 1,
        "refine/failed": 0,
    }.items()
    await manager.aclose()


async def test_an_experience_retrieved_twice_is_credited_once(tmp_path: Path) -> None:
    manager = await open_with_entry(tmp_path, AnsweringEngine(lambda _: "[]"))
    (start,) = await manager.search([search()])
    assert start
    for _ in range(2):
        await manager.credit([start.use, (await ask(manager)).use], True, episode="run/1/0/0")
    ((unit,), entry) = (await manager._store.ready_units(), manager._bank.entries["run/0/0/0#0"])
    assert (unit.pending.count, entry.counters.credited, entry.counters.credit) == (1, 1, 1.0)
    await manager.aclose()


@pytest.mark.parametrize("reward", [None, -1.0])
async def test_an_unusable_answer_is_counted_and_gets_the_malformed_reward(
    tmp_path: Path, reward: float | None
) -> None:
    extractor = ExtractorSection(cooldown=0, malformed_reward=reward)
    manager = await open_with_entry(
        tmp_path,
        AnsweringEngine(lambda _: "Go west, young man."),
        replace(SETTINGS, extractor=extractor),
    )
    answer = await ask(manager)
    assert (answer.text, answer.use.how) == ("Go west.", "ask_unrefined")
    assert (await manager.stats()).items() >= {
        "ops/refine": 1,
        "dropped/no op in the answer": 1,
        "refine/failed": 0,
    }.items()
    ready = [
        (str(unit.pending.unit), unit.pending.reward) for unit in await manager._store.ready_units()
    ]
    assert ready == ([(f"{question().name}@0", -1.0)] if reward else [])
    await manager.aclose()


async def test_an_update_of_a_refined_hit_updates_the_entry(tmp_path: Path) -> None:
    manager = await open_with_entry(tmp_path, AnsweringEngine())
    answer = await ask(manager)
    manager._distiller._prompt = lambda r: [Segment("user", r.shown[0].text, "task")]
    manager._engine._answer = (  # pyright: ignore[reportAttributeAccessIssue]
        lambda prompt: json.dumps([{"op": "update", "target": 1, "text": "West, always."}])
    )
    await manager.submit(request(1, shown=(answer,)))
    await manager.drain()
    assert [(e.uid, e.version, e.text) for e in manager._bank.entries.values()] == [
        ("run/0/0/0#0", 2, "West, always.")
    ]
    await manager.aclose()


async def test_a_repeated_question_gets_the_same_answer_and_is_stored_once(tmp_path: Path) -> None:
    manager = await open_with_entry(tmp_path, AnsweringEngine())
    first = await ask(manager)
    before = await manager.stats()
    assert await ask(manager) == first
    after = await manager.stats()
    tokens = "total/sampled_tokens/extractor"
    assert after.pop(tokens) > before.pop(tokens), "it was sampled again"
    assert after == before
    await manager.aclose()


# ── retrieval ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_question_is_answered_for_its_member_only(tmp_path: Path) -> None:
    """Check that diversity (eq. 6) counts every question as a retrieval.

    The group's entry does not change.
    """
    manager = await open_with_entry(tmp_path, AnsweringEngine())
    manager._engine._answer = (  # pyright: ignore[reportAttributeAccessIssue]
        lambda prompt: add("Go south.")
    )
    await manager.submit(request(member=1))
    await manager.drain()
    (start,) = await manager.search([search(member=0)])
    found = await manager.search(
        [question_search(member, number) for member in (0, 1) for number in (1, 2)]
    )
    (again,) = await manager.search([search(member=1)])
    assert start is not None
    assert again == start
    assert {one.text for one in found if one} == {"Go west.", "Go south."}
    assert {one.use.how for one in found if one} == {"ask_unrefined"}
    assert sum(e.counters.retrieved for e in manager._bank.entries.values()) == 5, (
        "the group's pick counts once, and so does each question"
    )
    await manager.aclose()


# ── evaluations ───────────────────────────────────────────────────────────────────────────────────


async def test_an_uncounted_question_changes_nothing(tmp_path: Path) -> None:
    manager = await open_with_entry(tmp_path, AnsweringEngine())
    before = dump(tmp_path / "bank.sqlite"), await manager.stats()
    (found,) = await manager.search([question_search()], counted=False)
    assert found
    answer = await manager.refine(question(), found, counted=False)
    assert (answer.text, answer.use.how) == ("Two rooms west.", "ask")
    await manager.flush()
    assert (dump(tmp_path / "bank.sqlite"), await manager.stats()) == before
    assert manager.take_refine_times() == []
    await manager.aclose()


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


class FailingEngine(AnsweringEngine):
    """Engine that raises `error` for a question, or never answers the question without an error."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.asked, self.cancelled = error, asyncio.Event(), False

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        if "user\nrefine\n" in renderer().decode(ids):
            self.asked.set()
            if self.error:
                raise self.error
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return await super().generate(ids, sampling, **options)


ERRORS = [
    RolloutError("engine", "too long"),
    TransientError("engine", "busy"),
    EngineError("restarted, and serves again"),
]


@pytest.mark.parametrize("error", ERRORS, ids=["cannot", "busy", "restarted"])
async def test_after_an_extractor_error_the_hit_is_unchanged(
    tmp_path: Path, error: Exception
) -> None:
    manager = await open_with_entry(tmp_path, FailingEngine(error))
    answer = await ask(manager)
    assert (answer.text, answer.use.how) == ("Go west.", "ask_unrefined")
    stats = await manager.stats()
    assert stats["refine/failed"] == 1
    assert "ops/refine" not in stats
    await manager.aclose()


async def test_after_the_deadline_the_hit_is_unchanged(tmp_path: Path) -> None:
    engine = FailingEngine()
    manager = await open_with_entry(
        tmp_path, engine, replace(SETTINGS, ask=AskSection(timeout=0.05))
    )
    assert (await ask(manager)).use.how == "ask_unrefined"
    assert engine.cancelled, "the call was cancelled"
    assert (await manager.stats())["refine/failed"] == 1
    (seconds,) = manager.take_refine_times()
    assert seconds >= 0.05
    assert manager.take_refine_times() == []
    await manager.aclose()


async def test_the_deadline_includes_the_health_check(tmp_path: Path) -> None:
    class Stuck(AnsweringEngine):
        async def generate(
            self, ids: Sequence[int], sampling: Sampling, **options: Any
        ) -> Completion:
            if "user\nrefine\n" in renderer().decode(ids):
                raise EngineError("it failed")
            return await super().generate(ids, sampling, **options)

        async def health(self) -> None:
            await asyncio.Event().wait()

    manager = await open_with_entry(
        tmp_path, Stuck(), replace(SETTINGS, ask=AskSection(timeout=0.05))
    )
    async with asyncio.timeout(10):
        assert (await ask(manager)).use.how == "ask_unrefined"
    await manager.aclose()


async def test_a_dead_engine_raises(tmp_path: Path) -> None:
    class Dead(FailingEngine):
        async def health(self) -> None:
            raise EngineError("gone")

    manager = await open_with_entry(tmp_path, Dead(EngineError("no answer")))
    with pytest.raises(EngineError, match="gone"):
        await ask(manager)
    await manager.aclose()


async def test_a_cancelled_question_changes_nothing(tmp_path: Path) -> None:
    engine = FailingEngine()
    manager = await open_with_entry(tmp_path, engine)
    before = dump(tmp_path / "bank.sqlite")
    asking = asyncio.create_task(ask(manager))
    await engine.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.cancelled
    assert dump(tmp_path / "bank.sqlite") == before
    await manager.aclose()


async def test_a_question_does_not_wait_for_distillations(tmp_path: Path) -> None:
    class Busy(AnsweringEngine):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.distilling = asyncio.Event(), asyncio.Event()
            self.gate.set()

        async def generate(
            self, ids: Sequence[int], sampling: Sampling, **options: Any
        ) -> Completion:
            if "user\nrefine\n" not in renderer().decode(ids):
                self.distilling.set()
                await self.gate.wait()
            return await super().generate(ids, sampling, **options)

    engine = Busy()
    manager = await open_with_entry(
        tmp_path, engine, replace(SETTINGS, extractor=ExtractorSection(concurrency=1))
    )
    engine.gate.clear()
    engine.distilling.clear()
    await manager.submit(request(1))
    draining = asyncio.create_task(manager.drain())
    await engine.distilling.wait()
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(ask(manager, member) for member in range(4)))
    assert {answer.use.how for answer in answers} == {"ask"}
    assert not draining.done()
    engine.gate.set()
    await draining
    await manager.aclose()


# ── retention of a refinement ─────────────────────────────────────────────────────────────────────


async def test_a_refinement_is_stored_while_it_can_earn_credit(tmp_path: Path) -> None:
    manager = await open_with_entry(
        tmp_path, AnsweringEngine(), replace(SETTINGS, credit_window_steps=2)
    )
    manager.advance(1)
    first, second = await ask(manager, 0), await ask(manager, 1)
    await manager.credit([first.use], True, episode="run/1/0/0")

    async def kept() -> list[str]:
        await manager.flush()
        return sorted(
            await manager._store.generations([first.use.generation, second.use.generation])
        )

    manager.advance(3)
    assert await kept() == [first.use.generation, second.use.generation], (
        "the episode of the second may still be running"
    )
    manager.advance(4)
    assert await kept() == [first.use.generation], "it has pending reward"
    samples = await manager.take_batch(1, 4)
    assert samples
    await manager.mark_trained([sample.id for sample in samples], 4)
    assert await kept() == []
    await manager.credit([second.use], True, episode="run/1/0/1")
    assert (await manager.stats())["buffer/ready"] == 0, "too late for training, but not an error"
    await manager.aclose()


async def test_without_a_prompt_nothing_is_refined(tmp_path: Path) -> None:
    manager = await open_with_entry(tmp_path, AnsweringEngine(), prompts=PROMPTS)
    found = hit("run/0/0/0#0")
    assert await manager.refine(question(), found) is found
    assert "refine/failed" not in await manager.stats()
    await manager.aclose()
