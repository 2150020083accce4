"""Answers of language models to the prompt `distil`.

They pass through the real manager and the real chat template. The tests check the resulting bank
and the reasons for dropped operations.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from crl.config.schema import ExtractorSection, RetrievalSection
from crl.engines.scripted import ScriptedEngine
from crl.manager import DistilRequest, ExperienceManager, ManagerSettings, OpLimits, Prompts
from crl.methods.parts.distilling import FullDistilPrompt
from crl.modeling.tokens import ChatRenderer
from crl.prompts import prompt
from crl.types import Segment
from support.doors import renderer
from support.managers import (
    GOAL,
    RETURN,
    WordEmbedder,
    add,
    answering,
    open_manager,
    request,
    search,
    task,
    update,
    write_merge,
    write_prompt,
)
from support.trajectories import build_trajectory

SETTINGS = ManagerSettings(retrieval=RetrievalSection(margin=2.0, min_similarity=0.0))
OLD, NEW, OTHER = (
    "Go west.",
    "Go west along the wall, then look for a door.",
    "Open doors before you walk into them.",
)

THOUGHTS = f"""Okay, let me look at this episode. The agent was told "{OLD}" and hit a wall in\
 turn 2, so the advice is incomplete.
Maybe {add("Something half-baked.")}? No, that repeats what is known; an update of 1 such as\
 {update("A draft.")} is better.
Hmm, but wait."""


def thinking_renderer() -> ChatRenderer:
    """Return the real renderer with a template that opens the thinking itself."""
    tokenizer = copy.deepcopy(renderer().tokenizer)
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    manager = ChatRenderer(tokenizer, renderer().stop_ids)
    assert manager.text([Segment("user", "x", "task")]).endswith("<|im_start|>assistant\n<think>\n")
    return manager


def episode(step: int, group: int, *, guided_by=(), success: bool = False) -> DistilRequest:
    hits = [hit for hit in guided_by if hit]
    segments = (
        Segment("user", GOAL, "task"),
        *(Segment("user", hit.text, "experience") for hit in hits),
        Segment("user", 'A wall. {"op": "add", "text": "From the game."}', "env"),
        Segment("assistant", "<think>Hm.</think>\nwest", "policy"),
        Segment("user", "Nothing happens.", "env"),
    )
    used, shown = tuple(hit.use for hit in hits), tuple(hit.text for hit in hits)
    condition = "guided" if hits else "free"
    return DistilRequest.from_trajectory(
        "run",
        build_trajectory(
            task(),
            step,
            group,
            0,
            condition,
            segments=segments,
            success=success,
            used=used,
            shown=shown,
        ),
    )


async def distil_answer(
    path: Path,
    answer: str,
    *,
    chat: ChatRenderer | None = None,
    settings: ManagerSettings = SETTINGS,
) -> tuple[dict[str, str], dict[str, int]]:
    """Distil a guided episode whose answer is `answer`. Return the bank and the counted drops.

    The bank is {uid@version: text}. "old" is the entry that guided the episode.
    """
    chat, answers = chat or renderer(), iter([f"<think>Well.</think>{add(OLD)}", answer])
    engine = ScriptedEngine(chat, lambda _: next(answers))
    writer = FullDistilPrompt(prompt("distil"), chat, max_tokens=8000)
    manager = await ExperienceManager.open(
        path / "bank.sqlite",
        engine,
        WordEmbedder(),
        chat,
        Prompts(writer, write_merge),
        settings,
        seed=0,
    )
    await manager.submit(episode(0, 0))
    await manager.drain()
    await manager.submit(episode(1, 0, guided_by=await manager.search([search()])))
    await manager.drain()
    names = {"run/0/0/0#0": "old"}
    bank = {
        f"{names.get(entry.uid, entry.uid)}@{entry.version}": entry.text
        for entry in manager.latest(99)
    }
    metrics = await manager.stats()
    assert metrics["queue/done"] == 2
    await manager.aclose()
    return bank, {
        name.removeprefix("dropped/"): count
        for name, count in metrics.items()
        if name.startswith("dropped/")
    }


UNCHANGED = {"old@1": OLD}
UPDATED = {"old@2": NEW}
ADDED = {**UNCHANGED, "run/1/0/0#0@1": OTHER}

ANSWERS = {
    "thinking, prose and a code fence": (
        f"{THOUGHTS}\n</think>\n\nThe agent needed more detail:\n\n```json\n{update(NEW)}\n```\n\n"
        "This should help.",
        UPDATED, {}),
    "several operations": (
        f"</think>\n{update(NEW)[:-1]}, {add(OTHER)[1:]}", {**UPDATED, "run/1/0/0#1@1": OTHER}, {}),
    "objects without a list": (
        f"</think>{update(NEW)[1:-1]}\n{add(OTHER)[1:-1]}",
        {**UPDATED, "run/1/0/0#1@1": OTHER}, {}),
    "a list within an object": (f'</think>{{"operations": {add(OTHER)}}}', ADDED, {}),
    "pretty-printed": (f"</think>{json.dumps(json.loads(add(OTHER)), indent=4)}", ADDED, {}),
    "a comma after the last operation": (f"</think>{add(OTHER)[:-1]},]", ADDED, {}),
    "a comma after the last field": (
        f"</think>[{add(OTHER)[1:-2]},}}, {update(NEW)[1:]}", {"old@2": NEW}, {"not JSON": 1}),
    "single quotes": (f"</think>[{{'op': 'add', 'text': '{OTHER}'}}]", UNCHANGED, {"not JSON": 1}),
    "a line break within a text": (f'</think>[{{"op": "add", "text": "{OTHER}\n\t- Go."}}]',
                                  {**UNCHANGED, "run/1/0/0#0@1": f"{OTHER}\n\t- Go."}, {}),
    "the number as a string": ("</think>" + update(NEW).replace(": 1,", ': "1",'), UPDATED, {}),
    "a target that was not shown": (
        f"</think>{update(NEW, target=2)[:-1]}, {add(OTHER)[1:]}",
        {**UNCHANGED, "run/1/0/0#0@1": OTHER}, {"target out of range": 1}),
    "an id as the target": (
        "</think>" + update(NEW).replace(": 1,", ': "run/0/0/0#0",'), UNCHANGED, {"no target": 1}),
    "an unknown operation": (
        '</think>[{"op": "delete", "target": 1}]', UNCHANGED, {"unknown op": 1}),
    "a text that is a list": (
        '</think>[{"op": "add", "text": ["Go", "west"]}]', UNCHANGED, {"no text": 1}),
    "nothing, as a list": ("</think>\n\n[]", UNCHANGED, {}),
    "nothing, as an operation": (f"</think>\n```json\n{RETURN}\n```", UNCHANGED, {}),
    "nothing, in prose": (
        "</think>There is nothing new to learn from this episode.", UNCHANGED,
        {"no op in the answer": 1}),
    "no answer at all": (f"{THOUGHTS}</think>", UNCHANGED, {"no op in the answer": 1}),
    "a thought that does not end": (
        f"<think>{THOUGHTS}", UNCHANGED, {"the thinking did not end": 1}),
    "a thought that does not end, after an answer": (
        f"{add(OTHER)}<think>But", UNCHANGED, {"the thinking did not end": 1}),
    "a truncated answer": (
        f"</think>{add(OTHER)[:-1]}, {update(NEW)[1:30]}", ADDED, {"not JSON": 1}),
    "one thought after another": (
        f"<think>a</think>{add('A draft.')}<think>b</think>{add(OTHER)}", ADDED, {}),
    "too many operations": (
        f"</think>{add(*[OTHER] * 500)}",
        {**UNCHANGED, **{f"run/1/0/0#{i}@1": OTHER for i in range(3)}}, {"too many ops": 497}),
    "a text without end": (f"</think>{add('west ' * 5000)}", UNCHANGED, {"text too long": 1}),
}  # fmt: skip
"""Sampled answer, expected bank, and expected drops of each case."""

LONG_ANSWERS = ManagerSettings(
    retrieval=SETTINGS.retrieval, extractor=ExtractorSection(max_response_tokens=100_000)
)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_answers_of_thinking_models(tmp_path, answer):
    sampled, bank, dropped = ANSWERS[answer]
    assert await distil_answer(tmp_path, sampled, settings=LONG_ANSWERS) == (bank, dropped)


@pytest.mark.parametrize(
    ("answer", "bank", "dropped"),
    [
        (f"{THOUGHTS}\n</think>\n\n{update(NEW)}", UPDATED, {}),
        (f"{THOUGHTS}\n\n{update(NEW)}", UNCHANGED, {"the thinking did not end": 1}),
        (add(OTHER), UNCHANGED, {"the thinking did not end": 1}),
    ],
)
async def test_an_answer_needs_the_end_of_a_thinking_opened_by_the_template(
    tmp_path, answer, bank, dropped
):
    assert await distil_answer(tmp_path, answer, chat=thinking_renderer()) == (bank, dropped)


async def test_complete_ops_of_a_truncated_answer_are_used(tmp_path):
    answer = f"<think>Well.</think>[{add(OTHER)[1:-1]}, {add('west ' * 999)[1:]}"
    settings = ManagerSettings(
        retrieval=SETTINGS.retrieval, extractor=ExtractorSection(max_response_tokens=200)
    )
    assert await distil_answer(tmp_path, answer, settings=settings) == (ADDED, {"not JSON": 1})


async def test_the_limits_of_an_answer_apply(tmp_path):
    limits = OpLimits()
    too_many = add(OTHER, *(f"{OTHER} {i}" for i in range(limits.max_ops)))
    entries, dropped = await distil_answer(tmp_path, f"</think>{too_many}")
    assert (len(entries), dropped) == (len(ADDED) - 1 + limits.max_ops, {"too many ops": 1})
    (tmp_path / "again").mkdir()
    too_long = "x" * (limits.max_chars + 1)
    assert await distil_answer(tmp_path / "again", f"</think>{add(too_long)}") == (
        UNCHANGED,
        {"text too long": 1},
    )


async def test_an_episode_without_a_possible_prompt_is_dead(tmp_path):
    writer = FullDistilPrompt(prompt("distil"), renderer(), max_tokens=100)
    engine = answering(lambda _: add(OTHER))
    manager = await open_manager(
        tmp_path / "bank.sqlite", engine, SETTINGS, prompts=Prompts(writer, write_merge)
    )
    await manager.submit(episode(0, 0))
    await manager.drain()
    assert (await manager.stats()).items() >= {"queue/dead": 1, "bank/size": 0}.items()
    assert engine.requests == []
    await manager.aclose()


@pytest.mark.parametrize("deterministic", [True, False])
async def test_prompts_are_written_one_at_a_time_and_on_a_thread(tmp_path, deterministic):
    seen: list[tuple[bool, int]] = []
    writing = 0

    def writer(request: DistilRequest) -> Sequence[Segment]:
        nonlocal writing
        writing += 1
        time.sleep(0.002)
        seen.append((threading.current_thread() is threading.main_thread(), writing))
        writing -= 1
        return write_prompt(request)

    engine = answering(lambda _: f"<think>{THOUGHTS}</think>{add(OTHER)}")
    manager = await open_manager(
        tmp_path / "bank.sqlite",
        engine,
        replace(SETTINGS, deterministic=deterministic),
        prompts=Prompts(writer, write_merge),
    )
    for member in range(8):
        await manager.submit(request(member=member))
    await manager.drain()
    assert seen == [(deterministic, 1)] * 8
    assert sorted(manager._bank.entries) == [f"run/0/0/{member}#0" for member in range(8)]
    await manager.aclose()
