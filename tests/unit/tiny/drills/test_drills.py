"""Further drills of the tiny models: questions of an agent, verdicts and merges.

The tests also check that the shipped models have learnt them.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from crl.config.schema import BankSection, ExtractorSection
from crl.embedders.hash import HashEmbedder
from crl.engines.torch import TorchEngine
from crl.envs.actions import COMPASS
from crl.envs.room import NAME, demonstration_tasks, probe_tasks
from crl.envs.room.lessons import (
    digest,
    from_here,
    lesson,
    read,
    true_stairs_direction,
    visited_cells,
)
from crl.envs.webshop.lessons import read as read_shop
from crl.manager import ExperienceManager, ManagerSettings, Prompts
from crl.manager.distillation.ops import parse_merge
from crl.manager.inspection.upkeep import create_bank
from crl.manager.records import Entry
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_NO_RESULT, COMPACT_OFFER
from crl.methods.parts.distilling import CompactDistilPrompt
from crl.methods.parts.merging import CompactMergePrompt
from crl.modeling.demonstrations import Demonstration, demonstrated_traces
from crl.modeling.loading import load_model, load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.rollout.critic import parse_critique
from crl.tiny.drills import alfworld, grids, room, webshop
from crl.tiny.drills.drill import OFFER, Episode, merge_answer, random_chunk
from crl.tiny.drills.room import (
    RoomRefinements,
    makes_claim,
    merges,
    random_lesson,
    refine_prompt,
    refinement,
)
from crl.tiny.drills.room_walks import ASKING_WALKS, EXTRACTOR_WALKS
from crl.types import Counters, Place, Provenance, Sampling, Segment


@dataclass(frozen=True)
class ChatModel:
    engine: TorchEngine
    chat: ChatRenderer

    async def answer(self, prompt: Sequence[Segment], tokens: int, seed: int) -> str | None:
        """Return the model's answer, or None if it did not end."""
        completion = await self.engine.generate(
            self.chat.encode(self.chat.text(prompt)), Sampling(tokens, self.chat.stop_ids), rng=seed
        )
        return self.chat.decode(completion.ids[:-1]) if completion.finish == "stop" else None


def renderer(path: Path) -> ChatRenderer:
    tokenizer = load_tokenizer(path)
    return ChatRenderer(tokenizer, stop_ids(path, tokenizer))


@asynccontextmanager
async def open_model(path: Path) -> AsyncIterator[ChatModel]:
    engine = TorchEngine(load_model(path, torch.device("cpu")), max_batch=128, max_context=1024)
    try:
        yield ChatModel(engine, renderer(path))
    finally:
        await engine.aclose()


async def accuracy(model: ChatModel, demonstrations: Sequence[Demonstration], tokens: int) -> float:
    """Return the fraction of demonstrations whose last message the model reproduces."""
    answers = await asyncio.gather(
        *(model.answer(prompt, tokens, i) for i, (*prompt, _) in enumerate(demonstrations))
    )
    return sum(
        answer == expected.text
        for answer, (*_, expected) in zip(answers, demonstrations, strict=True)
    ) / len(demonstrations)


# ── questions of an agent ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def walks() -> list[Episode]:
    return list(ASKING_WALKS.episodes(random.Random(1), demonstration_tasks(600)))


def question_index(episode: Episode) -> int | None:
    """Return the index of the segment in which the agent asks, or None."""
    return next(
        (i for i, segment in enumerate(episode.segments) if segment.origin == "tool_call"), None
    )


def test_the_tool_is_offered_before_the_first_observation(walks: list[Episode]) -> None:
    for walk in walks:
        opening = [segment.origin for segment in walk.segments[: 4 if walk.hint else 3]]
        assert opening == ["task", *(["experience"] if walk.hint else []), "tool_spec", "env"]
        assert [segment.text for segment in walk.segments if segment.origin == "tool_spec"] == [
            COMPACT_OFFER
        ]


def test_agents_ask_at_most_once_early_and_not_in_sight_of_the_stairs(walks: list[Episode]) -> None:
    for walk in walks:
        index = question_index(walk)
        if index is None:
            continue
        before, call, reply, after = (
            walk.segments[:index],
            walk.segments[index],
            walk.segments[index + 1],
            walk.segments[index + 2],
        )
        assert (call.text, reply.origin, after.origin) == (COMPACT_CALL, "tool_result", "policy")
        assert sum(segment.origin == "policy" for segment in before) <= 2
        assert "stairs " not in before[-1].text
        assert not any(segment.origin == "tool_call" for segment in walk.segments[index + 1 :])
    asked = {
        free: [question_index(walk) is not None for walk in walks if (walk.hint is None) == free]
        for free in (True, False)
    }
    assert sum(asked[True]) / len(asked[True]) > 1.5 * sum(asked[False]) / len(asked[False]) > 0.1


def test_agents_follow_the_reply_to_their_question(walks: list[Episode]) -> None:
    """Check that the next action usually follows a correct answer.

    The exceptions are slips, walls, and stairs that come into sight.
    """
    replies, followed = Counter[str](), list[bool]()
    for walk in walks:
        index = question_index(walk)
        if index is None:
            continue
        text, action = walk.segments[index + 1].text, walk.segments[index + 2].text
        refined = text in map(from_here, COMPASS)
        replies[
            "nothing" if text == COMPACT_NO_RESULT else "refined" if refined else read(text)[0]
        ] += 1
        *_, here = visited_cells(walk.segments[:index])
        if text == from_here(true_stairs_direction(int(walk.task.params["lgen"]), here) or ""):
            followed.append(text == from_here(action))
    assert sum(followed) >= 0.9 * len(followed) >= 40
    assert replies["refined"] > replies["nothing"] > 0 < replies["exit"]
    assert replies["other"] == 0


def test_a_question_is_trained_together_with_the_moves(
    walks: list[Episode], tiny_actor: Path
) -> None:
    chat = renderer(tiny_actor)
    walk = next(walk for walk in walks if question_index(walk) is not None)
    (trace,) = demonstrated_traces(walk.segments, chat)
    trained_text = chat.decode([i for i, mask in zip(trace.ids, trace.mask, strict=True) if mask])
    assert trained_text == "".join(
        f"{s.text}<|im_end|>" for s in walk.segments if s.origin in ("policy", "tool_call")
    )
    assert f"{COMPACT_CALL}<|im_end|>" in trained_text


# ── answers to a question ─────────────────────────────────────────────────────────────────────────


def conversation(*texts: str) -> list[Segment]:
    return [
        Segment("assistant", text, "policy") if i % 2 else Segment("user", text, "env")
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("texts", "direction", "refined"),
    [
        (("at 2 1\ndark east",), "north", "north"),
        # from (1, 2) to (0, -2): 14° off north
        (("at 2 1\ndark east", "southeast", "at 3 2\ndark east"), "north", "north"),
        # 18° off north
        (("at 3 3\ndark east", "east", "at 3 4\ndark north"), "north", "north"),
        # 34° off north
        (("at 3 2\ndark east", "east", "at 3 3\n", "east", "at 3 4\ndark north"),
         "north", "northwest"),
        # a step against a wall is no move
        (("at 3 2\ndark east", "west", "at 3 1\ndark east", "west", "at 3 1\ndark east"),
         "south", "south"),
        # 18° off east
        (("at 5 1\ndark east", "north", "at 4 1\ndark east", "north", "at 3 1\ndark east"),
         "northeast", "east"),
    ],
)  # fmt: skip
def test_a_lesson_is_adapted_to_the_agents_position(
    texts: tuple[str, ...], direction: str, refined: str
) -> None:
    assert (
        refinement(conversation(*texts), lesson("exit", direction))
        == f'[{{"op":"refine","text":"from here go {refined}."}}]'
    )
    assert refinement(conversation(*texts), lesson("walk", direction)) == '[{"op":"return"}]'


def test_the_refine_prompt_in_the_middle_of_an_episode() -> None:
    (task,) = demonstration_tasks(1)
    segments = [
        *conversation("at 2 1\ndark east", "southeast", "at 3 2\ndark east"),
        Segment("assistant", COMPACT_CALL, "tool_call"),
    ]
    (prompt,) = refine_prompt(task, segments, "be careful.")
    assert prompt.text.splitlines() == [
        task.goal,
        "hint 1 be careful.",
        "moves southeast",
        "stairs not seen",
        "ask",
    ]


def test_an_adapted_lesson_is_not_read_as_a_lesson_of_an_episode() -> None:
    assert read(from_here("north")) == ("other", None)


async def test_the_shipped_extractor_adapts_lessons(tiny_extractor: Path) -> None:
    demonstrations = list(RoomRefinements(EXTRACTOR_WALKS).make(random.Random(3), 250))
    async with open_model(tiny_extractor) as extractor:
        assert await accuracy(extractor, demonstrations, 40) >= 0.85


# ── merging the entries of a place ────────────────────────────────────────────────────────────────


def entry(text: str, won: int = 0, episodes: int = 0) -> Entry:
    return Entry(
        f"{text}/{won}/{episodes}",
        1,
        text,
        Place("room", "Room: the jade attic."),
        Provenance("g", (0, 1)),
        Counters(credited=episodes, credit=2.0 * won - episodes),
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (
            [entry("from the start go east.", 3, 4), entry("be careful."),
             entry("from the start go east.")],
            '[{"op":"merge","text":"from the start go east.","targets":[1,3]}]',
        ),
        ([entry("be careful."), entry("be careful."), entry("be careful.")],
         '[{"op":"merge","text":"be careful.","targets":[1,2,3]}]'),
        ([entry("from the start go east.", 3, 4), entry("from the start go west.", 0, 2)],
         '[{"op":"discard","target":2}]'),
        ([entry("from the start go east.", 0, 3), entry("be careful.", 0, 9),
          entry("from the start go west.", 1, 10)],
         '[{"op":"discard","target":1}]'),
        ([entry("from the start go east.", 0, 3), entry("from the start go west.", 0, 3)], "[]"),
        ([entry("from the start go east.", 0, 3), entry("from the start go west.")], "[]"),
        ([entry("from the start go east.", 1, 9), entry("from the start go west.", 9, 9)], "[]"),
        ([entry("walk east until the wall.", 9, 9), entry("walk west until the wall.", 0, 9)],
         "[]"),
    ],
)  # fmt: skip
def test_the_merge_answer_to_a_chunk(entries: list[Entry], expected: str) -> None:
    assert merge_answer(entries, makes_claim) == expected
    parsed = parse_merge(expected, len(entries))
    assert (len(parsed.ops), parsed.dropped) == (1, {})


def test_random_chunks_need_different_ops(tiny_extractor: Path) -> None:
    """Check which ops random chunks need, and the length of the answers.

    Some chunks need a merge, some a discard, and some neither. Every answer fits into 40 tokens.
    """
    rng, chat = random.Random(0), renderer(tiny_extractor)
    chunks = [random_chunk(rng, NAME, random_lesson) for _ in range(500)]
    assert {len(entries) for entries in chunks} == {2, 3, 4, 5, 6}
    answers = [merge_answer(entries, makes_claim) for entries in chunks]
    ops = Counter(parse_merge(answer, 6).ops[0].kind for answer in answers)
    assert min(ops["merge"], ops["keep"]) >= 150
    assert ops["discard"] >= 15
    assert max(len(chat.encode(answer)) for answer in answers) + 1 <= 40


async def test_the_shipped_extractor_merges_chunks(tiny_extractor: Path) -> None:
    """Check the shipped extractor at temperature 1. It overlooks some duplicates."""
    async with open_model(tiny_extractor) as extractor:
        assert await accuracy(extractor, list(merges(random.Random(11), 300)), 40) >= 0.7


async def test_the_shipped_extractor_merges_a_bank(tiny_extractor: Path, tmp_path: Path) -> None:
    """Merge a bank with the real manager.

    In most places that hold a lesson twice, one copy must remain.
    """
    entries = [
        replace(entry(text), uid=f"{place}/{i}", place=Place("room", f"Room: the {place}."))
        for place, direction in zip(
            ("jade attic", "red cell", "cold mill", "iron gate"), COMPASS, strict=False
        )
        for i, text in enumerate(
            (lesson("exit", direction), "be careful.", lesson("exit", direction))
        )
    ]  # fmt: skip
    await asyncio.to_thread(create_bank, tmp_path / "bank.sqlite", entries)
    prompts = Prompts(CompactDistilPrompt({NAME: digest}), CompactMergePrompt())
    settings = ManagerSettings(
        bank=BankSection(max_per_goal=4, key_text_weight=0.1),
        extractor=ExtractorSection(max_response_tokens=40),
    )
    async with open_model(tiny_extractor) as extractor:
        manager = await ExperienceManager.open(
            tmp_path / "bank.sqlite", extractor.engine, HashEmbedder(), extractor.chat, prompts,
            settings, seed=0,
        )  # fmt: skip
        before = set(manager._bank.entries)
        await manager.merge()
        after, chunks = set(manager._bank.entries), await manager._store.chunk_count()
        await manager.aclose()
    assert chunks == 4
    assert len(after - before) >= 3
    assert len(before - after) >= 2 * len(after - before)


# ── verdicts ──────────────────────────────────────────────────────────────────────────────────────


VERDICTS = {
    "room": (room.verdicts, lambda text: read(text)[0]),
    "webshop": (webshop.verdicts, lambda text: read_shop(text)[0]),
    "alfworld": (
        alfworld.verdicts,
        lambda text: " ".join(
            word for word in text.split() if word in ("is", "first.", "careful.")
        ),
    ),
    "maze": (grids.LessonDrills(grids.MAZE).verdicts, grids.makes_claim),
    "keyroom": (grids.LessonDrills(grids.KEYROOM).verdicts, grids.makes_claim),
}
"""Drill and function that returns the claim of a lesson, by task."""


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts_teach_the_format_and_not_which_lessons_help(name: str) -> None:
    """Check that each verdict is equally likely for every kind of lesson.

    Only the success rate shows whether a lesson is useful.
    """
    verdicts, kind_of = VERDICTS[name]
    counts_by_kind: defaultdict[object, Counter[str]] = defaultdict(Counter)
    for prompt, answer in verdicts(random.Random(0), 3000):
        text, won = re.search(
            "^hint 1 (.*)\nwon (.*) of 10$",
            prompt.text,
            re.MULTILINE,
        ).groups()  # pyright: ignore
        critique = parse_critique(answer.text)
        assert not critique.malformed
        assert (critique.verdict == "reject") == (int(won) >= 9), "mastered"
        assert critique.text == (text if critique.verdict == "refine" else ""), (
            "what to write instead is left to RL"
        )
        counts_by_kind[kind_of(text)][critique.verdict] += 1
    assert len(counts_by_kind) > 1
    for counts in counts_by_kind.values():
        for verdict in ("accept", "refine", "reject"):
            assert counts[verdict] / counts.total() == pytest.approx(
                1 / 3, abs=4 * (2 / 9 / counts.total()) ** 0.5
            )


def test_a_verdict_is_short(tiny_actor: Path) -> None:
    """Check the lengths of verdicts and questions.

    A verdict has at most 24 tokens including the stop token, as in tasks/presets/cpu.toml. A
    question fits into the 4 tokens of a turn.
    """
    chat = renderer(tiny_actor)
    answers = [
        answer.text
        for verdicts, _ in VERDICTS.values()
        for _, answer in verdicts(random.Random(1), 200)
    ]
    assert max(len(chat.encode(text)) for text in answers) + 1 <= 24
    assert len(chat.encode(COMPACT_CALL)) + 1 <= 4


async def test_the_shipped_actor_rejects_only_in_mastered_places(
    tiny_actor: Path,
) -> None:
    async with open_model(tiny_actor) as actor:
        prompts = [
            (prompt, answer.text == "reject")
            for *prompt, answer in room.verdicts(random.Random(11), 300)
        ]
        answers = await asyncio.gather(
            *(actor.answer(prompt, 24, i) for i, (prompt, _) in enumerate(prompts))
        )
    verdicts = [parse_critique(text or "") for text in answers]
    assert sum(verdict.malformed for verdict in verdicts) <= 0.05 * len(answers)
    correct = sum(
        (verdict.verdict == "reject") == mastered
        for verdict, (_, mastered) in zip(verdicts, prompts, strict=True)
    )
    assert correct >= 0.95 * len(answers)


async def test_the_shipped_actor_asks_only_if_offered_and_follows_the_reply(
    tiny_actor: Path,
) -> None:
    tasks = probe_tasks(200)

    def openings(offer: bool) -> Iterator[list[Segment]]:
        for task in tasks:
            tool = [OFFER] if offer else []
            yield [
                Segment("user", task.goal, "task"),
                *tool,
                Segment("user", "at 3 3\ndark north east south west", "env"),
            ]

    async with open_model(tiny_actor) as actor:

        async def answers(prompts: Iterator[list[Segment]]) -> list[str | None]:
            return await asyncio.gather(
                *(actor.answer(prompt, 4, i) for i, prompt in enumerate(prompts))
            )

        assert (await answers(openings(offer=False))).count(COMPACT_CALL) <= 0.05 * len(tasks)
        assert (await answers(openings(offer=True))).count(COMPACT_CALL) >= 20
        directions = random.Random(0).choices(list(COMPASS), k=len(tasks))
        call = Segment("assistant", COMPACT_CALL, "tool_call")
        prompts = (
            [*opening, call, Segment("user", from_here(direction), "tool_result")]
            for opening, direction in zip(openings(True), directions, strict=True)
        )
        moves = await answers(prompts)
    assert sum(
        direction == move for direction, move in zip(directions, moves, strict=True)
    ) >= 0.85 * len(directions)
