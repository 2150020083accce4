"""Helpers for tests of credit: banks filled by a scripted extractor, and episodes that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extractors import RETURN, Scribe, add, hit, manager, request, update

from crl.manager import (
    CreditSettings,
    DistilRequest,
    DistilSettings,
    ExperienceManager,
    ExtractorSample,
    ManagerSettings,
    RetrievalSettings,
)
from crl.types import ExperienceUse

KEPT = 2
"""Value of `keep_steps` in these banks."""

GOES_WEST, GOES_EAST, BETTER = (
    '{"op": "add", "text": "Go west."}',
    '{"op": "add", "text": "Go east."}',
    update("Go southwest.")[1:-1],
)

ENDS = "]<|im_end|>"
"""Text that is trained after the last op."""

ANSWERS = {
    "west": f"[{GOES_WEST}]",
    "east": f"[{GOES_EAST}]",
    "north": add("Go north."),
    "two": f"It went west, then east.</think>\n[{GOES_WEST}, {GOES_EAST}]",
    "better": f"[{BETTER}]",
    "both": f"[{BETTER}, {GOES_EAST}]",
    "after": f'[{{"op": "return"}}, {GOES_EAST}]',
    "none": RETURN,
    "bad": "Hm.",
}

W0, E0 = hit("run/0/0/0#0"), hit("run/0/1/0#0")
"""Entries that `west_and_east` adds to a bank."""


async def opened(
    path: Path,
    engine: Scribe | None = None,
    *,
    cap: int | None = None,
    max_tokens: int = 4096,
    **credit: Any,
) -> ExperienceManager:
    settings = ManagerSettings(
        cap=cap, keep_steps=KEPT, retrieval=RetrievalSettings(margin=2.0, min_similarity=0.0),
        credit=CreditSettings(**credit), distil=DistilSettings(max_tokens=max_tokens),
    )  # fmt: skip
    return await manager(path / "bank.sqlite", engine or Scribe(ANSWERS), settings)


async def distil(made: ExperienceManager, *requests: DistilRequest) -> None:
    for one in requests:
        assert await made.submit(one)
    await made.drain()


async def west_and_east(path: Path, **parts: Any) -> ExperienceManager:
    """Return a bank with two generations of one op each, which add `W0` and `E0`."""
    made = await opened(path, **parts)
    await distil(made, request(note="west"), request(group=1, note="east"))
    return made


async def win(made: ExperienceManager, use: ExperienceUse, *episodes: str) -> None:
    for episode in episodes:
        await made.credit([use], True, episode=episode)


async def lose(made: ExperienceManager, use: ExperienceUse, *episodes: str) -> None:
    for episode in episodes:
        await made.credit([use], False, episode=episode)


async def taken(made: ExperienceManager, n: int, step: int) -> dict[str, ExtractorSample]:
    """Return the samples of the next batch by id, or an empty mapping if there is no batch."""
    return {sample.id: sample for sample in await made.take_batch(n, step) or ()}


async def train(made: ExperienceManager, n: int, step: int) -> dict[str, ExtractorSample]:
    batch = await taken(made, n, step)
    await made.mark_trained(list(batch), step)
    return batch
