"""`search_and_ask` in the manager: refinements, the credit that they earn, and failed questions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doors import renderer
from extractors import PROMPTS, add, dump, hit, logged, manager, request, search, task
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError, TransientError
from crl.manager import (
    CreditSettings,
    ExperienceManager,
    ManagerSettings,
    OpLimits,
    RetrievalSettings,
)
from crl.manager.ops import parse_refine
from crl.protocols import Hit, Question, SearchRequest
from crl.types import Completion, Sampling, Segment

ANY = RetrievalSettings(margin=2.0, min_similarity=-1.0)
SETTINGS = ManagerSettings(retrieval=ANY, credit=CreditSettings(cooldown=0))


def write_refine(question: Question, found: Hit) -> list[Segment]:
    return [Segment("user", f"refine\n{question.query}\n{found.text}", "task")]


ASKING = replace(PROMPTS, refine=write_refine)


def refine(text: str = "Two rooms west.") -> str:
    return json.dumps([{"op": "refine", "text": text}])


class Answering(ScriptedEngine):
    """Engine that distils "Go west." from every episode and answers a question with `answer`."""

    def __init__(self, answer: Callable[[str], str] = lambda _: refine()) -> None:
        super().__init__(
            renderer(),
            lambda prompt: answer(prompt) if "user\nrefine\n" in prompt else add("Go west."),
        )


def asked(member: int = 0, number: int = 1) -> SearchRequest:
    return replace(search(member=member), asked=number)


def question(member: int = 0, number: int = 1, query: str = "Where to?") -> Question:
    return Question(
        f"run/train/1/0/{member}/{number}", task(), query, (Segment("user", "at 2 3", "env"),)
    )


async def opened(
    path: Path, engine: ScriptedEngine, settings: ManagerSettings = SETTINGS, **parts: Any
) -> ExperienceManager:
    made = await manager(path / "bank.sqlite", engine, settings, **{"prompts": ASKING, **parts})
    await made.submit(request())
    await made.drain()
    return made


async def ask(made: ExperienceManager, member: int = 0, number: int = 1) -> Hit:
    (found,) = await made.search([asked(member, number)])
    assert found
    return await made.refine(question(member, number), found)


def span(trace: Any) -> str:
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
def test_answers_are_read_as_other_operations_are(completion: str, expected: list[str]) -> None:
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
def test_what_is_no_answer_has_a_reason(completion: str, reason: str) -> None:
    parsed = parse_refine(completion, limits=OpLimits(max_chars=40))
    assert (parsed.malformed, parsed.dropped) == (True, {reason: 1})


def test_one_answer_is_enough() -> None:
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


async def test_an_answer_is_kept_and_earns_what_its_episode_earns(tmp_path: Path) -> None:
    engine = Answering(lambda prompt: f"<think>Hm.</think>{refine()}")
    made = await opened(tmp_path, engine)
    answer = await ask(made)
    name = question().name
    assert (answer.text, answer.use.how) == ("Two rooms west.", "ask")
    assert (answer.use.uid, answer.use.version, answer.use.generation) == ("run/0/0/0#0", 1, name)
    data = {"uid": "run/0/0/0#0", "version": 1, "text": "Two rooms west."}
    ((origin, row),) = logged(tmp_path / "bank.sqlite", "refine")
    assert (origin, {key: row[key] for key in data}) == (name, data)
    assert len(made._bank.entries) == 1, "a refinement is no entry of the bank"

    (start,) = await made.search([search()])
    assert start
    for success in (True, False, True):
        # The third call repeats the episode of the first.
        await made.credit([start.use, answer.use], success, episode=f"run/1/0/{success}")
    entry = made._bank.entries["run/0/0/0#0"]
    assert (entry.credited, entry.credit, entry.retrieved) == (2, 0.0, 2), (
        "its own two; the question too counts as retrieved"
    )
    ready = {str(unit.pending.unit): unit.pending for unit in await made._store.ready()}
    assert {unit: (pending.count, pending.total) for unit, pending in ready.items()} == {
        "run/0/0/0#0@1": (2, 0.0),
        f"{name}@1": (2, 0.0),
    }

    samples = await made.take_batch(2, 1)
    assert samples
    texts = {sample.id: span(sample.trace) for sample in samples}
    assert texts[f"{name}@1"] == refine()[1:] + "<|im_end|>"
    assert texts[f"{name}@head"] == "<think>Hm.</think>["
    await made.mark_trained([sample.id for sample in samples], 1)
    assert await made._store.ready() == []
    await made.aclose()


async def test_what_is_told_as_it_is_earns_for_its_entry(tmp_path: Path) -> None:
    made = await opened(tmp_path, Answering(lambda _: '[{"op": "return"}]'))
    answer = await ask(made)
    assert (answer.text, answer.use.how) == ("Go west.", "ask_unrefined")
    await made.credit([answer.use], False, episode="run/1/0/0")
    assert [str(unit.pending.unit) for unit in await made._store.ready()] == ["run/0/0/0#0@1"]
    assert (await made.stats()).items() >= {
        "ops/refine": 1,
        "generations": 1,
        "refine/failed": 0,
    }.items()
    await made.aclose()


async def test_what_guides_an_episode_twice_guides_one_episode(tmp_path: Path) -> None:
    made = await opened(tmp_path, Answering(lambda _: "[]"))
    (start,) = await made.search([search()])
    assert start
    for _ in range(2):
        await made.credit([start.use, (await ask(made)).use], True, episode="run/1/0/0")
    ((unit,), entry) = (await made._store.ready(), made._bank.entries["run/0/0/0#0"])
    assert (unit.pending.count, entry.credited, entry.credit) == (1, 1, 1.0)
    await made.aclose()


@pytest.mark.parametrize("reward", [None, -1.0])
async def test_an_answer_that_cannot_be_used_is_counted_and_earns_what_such_answers_earn(
    tmp_path: Path, reward: float | None
) -> None:
    credit = CreditSettings(cooldown=0, malformed_reward=reward)
    made = await opened(
        tmp_path, Answering(lambda _: "Go west, young man."), replace(SETTINGS, credit=credit)
    )
    answer = await ask(made)
    assert (answer.text, answer.use.how) == ("Go west.", "ask_unrefined")
    assert (await made.stats()).items() >= {
        "ops/refine": 1,
        "dropped/no op in the answer": 1,
        "refine/failed": 0,
    }.items()
    ready = [(str(unit.pending.unit), unit.pending.reward) for unit in await made._store.ready()]
    assert ready == ([(f"{question().name}@0", -1.0)] if reward else [])
    await made.aclose()


async def test_an_update_of_what_was_asked_for_is_of_the_entry(tmp_path: Path) -> None:
    made = await opened(tmp_path, Answering())
    answer = await ask(made)
    made._distiller._prompt = lambda r: [Segment("user", r.shown[0].text, "task")]
    made._engine._answer = (  # pyright: ignore[reportAttributeAccessIssue]
        lambda prompt: json.dumps([{"op": "update", "target": 1, "text": "West, always."}])
    )
    await made.submit(request(1, shown=(answer,)))
    await made.drain()
    assert [(e.uid, e.version, e.text) for e in made._bank.entries.values()] == [
        ("run/0/0/0#0", 2, "West, always.")
    ]
    await made.aclose()


async def test_the_same_question_draws_the_same_and_is_kept_once(tmp_path: Path) -> None:
    made = await opened(tmp_path, Answering())
    first = await ask(made)
    before = await made.stats()
    assert await ask(made) == first
    after = await made.stats()
    tokens = "total/sampled_tokens/extractor"
    assert after.pop(tokens) > before.pop(tokens), "it was sampled again"
    assert after == before
    await made.aclose()


# ── retrieval ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_question_is_answered_to_its_member_alone(tmp_path: Path) -> None:
    """Diversity (eq. 6) counts every question as a retrieval. The group's entry does not change."""
    made = await opened(tmp_path, Answering())
    made._engine._answer = (  # pyright: ignore[reportAttributeAccessIssue]
        lambda prompt: add("Go south.")
    )
    await made.submit(request(member=1))
    await made.drain()
    (start,) = await made.search([search(member=0)])
    found = await made.search([asked(member, number) for member in (0, 1) for number in (1, 2)])
    (again,) = await made.search([search(member=1)])
    assert start is not None
    assert again == start
    assert {one.text for one in found if one} == {"Go west.", "Go south."}
    assert {one.use.how for one in found if one} == {"ask_unrefined"}
    assert sum(e.retrieved for e in made._bank.entries.values()) == 5, (
        "the group's pick counts once, every question for itself"
    )
    await made.aclose()


# ── evaluations ───────────────────────────────────────────────────────────────────────────────────


async def test_an_uncounted_question_leaves_no_trace(tmp_path: Path) -> None:
    made = await opened(tmp_path, Answering())
    before = dump(tmp_path / "bank.sqlite"), await made.stats()
    (found,) = await made.search([asked()], counted=False)
    assert found
    answer = await made.refine(question(), found, counted=False)
    assert (answer.text, answer.use.how) == ("Two rooms west.", "ask")
    await made.flush()
    assert (dump(tmp_path / "bank.sqlite"), await made.stats()) == before
    assert made.take_refine_times() == []
    await made.aclose()


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


class Troubled(Answering):
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
async def test_where_the_extractor_fails_what_was_found_is_told_as_it_is(
    tmp_path: Path, error: Exception
) -> None:
    made = await opened(tmp_path, Troubled(error))
    answer = await ask(made)
    assert (answer.text, answer.use.how) == ("Go west.", "ask_unrefined")
    stats = await made.stats()
    assert stats["refine/failed"] == 1
    assert "ops/refine" not in stats
    await made.aclose()


async def test_past_the_deadline_what_was_found_is_told_as_it_is(tmp_path: Path) -> None:
    engine = Troubled()
    made = await opened(tmp_path, engine, replace(SETTINGS, ask_deadline=0.05))
    assert (await ask(made)).use.how == "ask_unrefined"
    assert engine.cancelled, "nobody waits for the answer any more"
    assert (await made.stats())["refine/failed"] == 1
    (seconds,) = made.take_refine_times()
    assert seconds >= 0.05
    assert made.take_refine_times() == []
    await made.aclose()


async def test_an_agent_does_not_wait_for_a_check_of_the_engine_either(tmp_path: Path) -> None:
    class Stuck(Answering):
        async def generate(
            self, ids: Sequence[int], sampling: Sampling, **options: Any
        ) -> Completion:
            if "user\nrefine\n" in renderer().decode(ids):
                raise EngineError("it failed")
            return await super().generate(ids, sampling, **options)

        async def health(self) -> None:
            await asyncio.Event().wait()

    made = await opened(tmp_path, Stuck(), replace(SETTINGS, ask_deadline=0.05))
    async with asyncio.timeout(10):
        assert (await ask(made)).use.how == "ask_unrefined"
    await made.aclose()


async def test_a_dead_engine_is_told(tmp_path: Path) -> None:
    class Dead(Troubled):
        async def health(self) -> None:
            raise EngineError("gone")

    made = await opened(tmp_path, Dead(EngineError("no answer")))
    with pytest.raises(EngineError, match="gone"):
        await ask(made)
    await made.aclose()


async def test_a_cancelled_question_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = Troubled()
    made = await opened(tmp_path, engine)
    before = dump(tmp_path / "bank.sqlite")
    asking = asyncio.create_task(ask(made))
    await engine.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.cancelled
    assert dump(tmp_path / "bank.sqlite") == before
    await made.aclose()


async def test_a_question_does_not_wait_behind_distillations(tmp_path: Path) -> None:
    class Busy(Answering):
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
    made = await opened(tmp_path, engine, replace(SETTINGS, concurrency=1))
    engine.gate.clear()
    engine.distilling.clear()
    await made.submit(request(1))
    draining = asyncio.create_task(made.drain())
    await engine.distilling.wait()
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(ask(made, member) for member in range(4)))
    assert {answer.use.how for answer in answers} == {"ask"}
    assert not draining.done()
    engine.gate.set()
    await draining
    await made.aclose()


# ── retention of a refinement ─────────────────────────────────────────────────────────────────────


async def test_a_refinement_is_kept_as_long_as_it_can_earn(tmp_path: Path) -> None:
    made = await opened(tmp_path, Answering(), replace(SETTINGS, keep_steps=2))
    made.advance(1)
    first, second = await ask(made, 0), await ask(made, 1)
    await made.credit([first.use], True, episode="run/1/0/0")

    async def kept() -> list[str]:
        await made.flush()
        return sorted(await made._store.generations([first.use.generation, second.use.generation]))

    made.advance(3)
    assert await kept() == [first.use.generation, second.use.generation], (
        "the second's episode may still be running"
    )
    made.advance(4)
    assert await kept() == [first.use.generation], "it has pending reward"
    samples = await made.take_batch(1, 4)
    assert samples
    await made.mark_trained([sample.id for sample in samples], 4)
    assert await kept() == []
    await made.credit([second.use], True, episode="run/1/0/1")
    assert (await made.stats())["buffer/ready"] == 0, "too late to be trained on, and no error"
    await made.aclose()


async def test_without_a_prompt_nothing_is_refined(tmp_path: Path) -> None:
    made = await opened(tmp_path, Answering(), prompts=PROMPTS)
    found = hit("run/0/0/0#0")
    assert await made.refine(question(), found) is found
    assert "refine/failed" not in await made.stats()
    await made.aclose()
