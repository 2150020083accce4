"""Helpers for the tests of `crl bank`.

They call the command and make a small finished run, whose bank is written by the real manager.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from crl.cli.main import app
from crl.config.load import dump, load
from crl.config.schema import BankSection, RetrievalSection
from crl.embedders.hash import HashEmbedder
from crl.engines.scripted import ScriptedEngine
from crl.errors import RolloutError
from crl.manager import EpisodeId, ExperienceManager, GroupSuccess, ManagerSettings, UnitKey
from crl.types import Completion, Sampling
from support.doors import renderer
from support.managers import RETURN, add, hit, open_manager, request, search, task, update

HALL = task("maze", "Leave the long hall.")
SETTINGS = ManagerSettings(
    retrieval=RetrievalSection(margin=0.0, min_similarity=0.0),
    bank=BankSection(max_per_goal=4, key_text_weight=0.1),
)

ANSWERS = {
    "west": add("Go west.", "Mind the trap."),
    "better": update("Go southwest."),
    "late": update("Go southeast."),
    "none": RETURN,
    "bad": "Hm.",
    "hall": add("Follow the left wall."),
}


class Extractor(ScriptedEngine):
    """Extractor that answers by the last word of the episode. It fails for the word `broken`."""

    def __init__(self) -> None:
        super().__init__(renderer(), lambda prompt: ANSWERS[last_word(prompt)])

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        if last_word(renderer().decode(ids)) == "broken":
            raise RolloutError("engine", "the prompt is too long")
        return await super().generate(ids, sampling, **options)


def last_word(prompt: str) -> str:
    return prompt.split("<|im_end|>")[-2].split()[-1]


async def open_bank(path: Path, **parts: Any) -> ExperienceManager:
    return await open_manager(
        path,
        parts.pop("engine", None) or Extractor(),
        parts.pop("settings", SETTINGS),
        embedder=HashEmbedder(),
        **parts,
    )


async def play_run(folder: Path) -> None:
    """Play three steps of a run.

    The steps contain adds, an update, a late update, uses with credit, an eviction, failed requests
    and requests that stay queued.
    """
    manager = await open_bank(folder / "bank.sqlite")
    for member, note in enumerate(("west", "none", "bad", "broken")):
        await manager.submit(request(member=member, note=note))
    await manager.submit(request(group=1, note="hall", of=HALL))
    await manager.drain()
    manager.advance(1)
    first = hit("run/0/0/0#0")
    await manager.credit([first.use], True, episode="run/1/0/0")
    await manager.credit([first.use], False, episode="run/1/0/1")
    await manager.record_lifts(
        {"run/1/0": [GroupSuccess(UnitKey("run/0/0/0#0", 1), guided=0.5, free=0.25)]}
    )
    await manager.submit(request(1, 0, 0, note="better", shown=(first,)))
    await manager.submit(request(1, 0, 1, note="late", shown=(first,)))
    await manager.drain()
    manager.advance(2)
    (found,) = await manager.search([search("Go southwest.")])
    assert found is not None
    assert (found.use.uid, found.use.version) == ("run/0/0/0#0", 2)
    await manager.credit([found.use], True, episode="run/2/0/0")
    await manager.record_lifts(
        {"run/2/0": [GroupSuccess(UnitKey("run/0/0/0#0", 2), guided=1.0, free=0.5)]}
    )
    await manager.submit(
        request(2, 0, 0, note="west")
    )  # the goal then has one entry above the bound
    await manager.drain()
    await manager.submit(
        request(2, 1, 0, note="hall", of=HALL, success=False, shown=(hit("run/0/1/0#0"),))
    )
    await manager.aclose()


async def play_second_run(source: Path, path: Path) -> None:
    """Play one step of a run that starts with the entries of the bank at `source`.

    The step contains an add, and a use in an episode that failed.
    """
    await ExperienceManager.start_from(source, path)
    manager = await open_bank(path)
    manager.advance(1)
    (found,) = await manager.search([search("Go southwest.")])
    assert found is not None
    await manager.credit([found.use], False, episode="again/1/0/0")
    await manager.submit(
        replace(request(1, note="hall", of=HALL), episode=EpisodeId("again", 1, 0, 0))
    )
    await manager.drain()
    await manager.aclose()


def finished_run(folder: Path) -> Path:
    folder.mkdir()
    asyncio.run(play_run(folder))
    dump(load(["room"], sets=["extractor.model=tiny-actor"]), folder / "config.json")
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    """Return the path of a copy of the run's bank, for tests that change the bank."""
    path = folder / "copy.sqlite"
    path.write_bytes((run / "bank.sqlite").read_bytes())
    return path


async def diverge(path: Path) -> None:
    manager = await open_bank(
        path, engine=ScriptedEngine(renderer(), lambda prompt: add("Go back."))
    )
    await manager.drain()
    for member in range(2):
        await manager.credit([hit("run/0/0/0#0", 2).use], False, episode=f"run/9/0/{member}")
    await manager.record_lifts(
        {"run/9/0": [GroupSuccess(UnitKey("run/0/0/0#0", 2), guided=0.0, free=0.25)]}
    )
    await manager.credit([hit("run/0/1/0#0").use], False, episode="run/9/1/0")
    await manager._store.evict(
        [entry.unit for entry in manager._bank.entries.values() if entry.text == "Mind the trap."]
    )
    await manager.aclose()


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def bank(*args: str | Path, **options: Any):
    return CliRunner().invoke(app, ["bank", *map(str, args)], **options)


def lines(*args: str | Path) -> list[str]:
    result = bank(*args)
    assert (result.exit_code, result.exception) == (0, None), result.output
    return result.stdout.splitlines()


def parsed(*args: str | Path) -> Any:
    (line,) = lines(*args, "--json")
    return json.loads(line)


def error_line(*args: str | Path, code: int = 2) -> str:
    result = bank(*args)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    return result.stderr


def uids(*args: str | Path) -> list[str]:
    return [entry["uid"] for entry in parsed("ls", *args)]


def export_and_import(run: Path, folder: Path) -> Path:
    """Import the exported experiences of `run` into a new bank. Return its path."""
    (folder / "lessons.jsonl").write_text(bank("export", run).stdout, "utf-8")
    new = folder / "new.sqlite"
    assert lines("import", new, folder / "lessons.jsonl") == [f"imported 5 experiences into {new}"]
    return new
