"""Helpers for tests of credit: banks filled by a scripted extractor, and episodes that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crl.config.schema import BankSection, ExtractorSection, RetrievalSection
from crl.manager import DistilRequest, ExperienceManager, ExtractorSample, ManagerSettings
from crl.types import ExperienceUse
from support.managers import RETURN, NoteEngine, add, hit, open_manager, request, update

WINDOW_STEPS = 2
"""Value of `credit_window_steps` in these banks."""

ADD_WEST, ADD_EAST, UPDATE_WEST = (
    '{"op": "add", "text": "Go west."}',
    '{"op": "add", "text": "Go east."}',
    update("Go southwest.")[1:-1],
)

ANSWER_END = "]<|im_end|>"
"""Text that is trained after the last op."""

ANSWERS = {
    "west": f"[{ADD_WEST}]",
    "east": f"[{ADD_EAST}]",
    "north": add("Go north."),
    "two": f"It went west, then east.</think>\n[{ADD_WEST}, {ADD_EAST}]",
    "better": f"[{UPDATE_WEST}]",
    "both": f"[{UPDATE_WEST}, {ADD_EAST}]",
    "after": f'[{{"op": "return"}}, {ADD_EAST}]',
    "none": RETURN,
    "bad": "Hm.",
}

WEST, EAST = hit("run/0/0/0#0"), hit("run/0/1/0#0")
"""Entries that `open_bank_with_two_adds` adds to a bank."""


async def open_bank(
    path: Path,
    engine: NoteEngine | None = None,
    *,
    max_per_goal: int | None = None,
    max_tokens: int = 4096,
    **credit: Any,
) -> ExperienceManager:
    settings = ManagerSettings(
        bank=BankSection(max_per_goal=max_per_goal),
        extractor=ExtractorSection(max_response_tokens=max_tokens, **credit),
        retrieval=RetrievalSection(margin=2.0, min_similarity=0.0),
        credit_window_steps=WINDOW_STEPS,
    )
    return await open_manager(path / "bank.sqlite", engine or NoteEngine(ANSWERS), settings)


async def distil(manager: ExperienceManager, *requests: DistilRequest) -> None:
    for distil_request in requests:
        await manager.submit(distil_request)
    await manager.drain()


async def open_bank_with_two_adds(path: Path, **parts: Any) -> ExperienceManager:
    """Return a bank with two generations of one op each, which add `WEST` and `EAST`."""
    manager = await open_bank(path, **parts)
    await distil(manager, request(note="west"), request(group=1, note="east"))
    return manager


async def win(manager: ExperienceManager, use: ExperienceUse, *episodes: str) -> None:
    for episode in episodes:
        await manager.credit([use], True, episode=episode)


async def lose(manager: ExperienceManager, use: ExperienceUse, *episodes: str) -> None:
    for episode in episodes:
        await manager.credit([use], False, episode=episode)


async def samples_by_id(
    manager: ExperienceManager, n: int, step: int
) -> dict[str, ExtractorSample]:
    """Return the samples of the next batch by id, or an empty mapping if there is no batch."""
    return {sample.id: sample for sample in await manager.take_batch(n, step) or ()}


async def train(manager: ExperienceManager, n: int, step: int) -> dict[str, ExtractorSample]:
    batch = await samples_by_id(manager, n, step)
    await manager.mark_trained(list(batch), step)
    return batch
