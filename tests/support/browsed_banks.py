"""Directories with runs for tests of the bank pages: updates, merges, questions, dead requests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from starlette.testclient import TestClient

from crl.engines.scripted import ScriptedEngine
from crl.protocols import Question
from crl.serve.app import create_app
from crl.serve.site import Site
from crl.types import Segment
from support.bank_commands import diverge, finished_run, open_bank
from support.doors import renderer
from support.managers import PROMPTS, add, hit, request, task

MERGE = (
    '[{"op": "merge", "targets": [1, 2], "text": "Go west or south."}, '
    '{"op": "discard", "target": 3}]'
)


def directory_of_runs(folder: Path) -> Path:
    """Return a directory with four runs.

    `run` is that of `finished_run`, and `other` is a copy of it that went on. `merged` has only a
    bank with a merge, and `asked` one with an answered question.
    """
    folder.mkdir()
    run = finished_run(folder / "run")
    shutil.copytree(run, folder / "other")
    asyncio.run(diverge(folder / "other" / "bank.sqlite"))
    for name, write in {"merged": _merge, "asked": _ask}.items():
        (folder / name).mkdir()
        asyncio.run(write(folder / name / "bank.sqlite"))
    return folder


async def _merge(path: Path) -> None:
    distilled = add("Go west.", "Go south.", "Hope.")
    engine = ScriptedEngine(
        renderer(), lambda prompt: MERGE if "user\nmerge\n" in prompt else distilled
    )
    manager = await open_bank(path, engine=engine)
    await manager.submit(request())
    await manager.drain()
    manager.advance(5)
    await manager.merge()
    await manager.aclose()


async def _ask(path: Path) -> None:
    """Write a bank whose only entry was refined for a question, and guided an episode then."""
    completions = iter([add("Go west."), '[{"op": "refine", "text": "Two rooms west."}]'])
    prompts = replace(PROMPTS, refine=lambda question, entry: [Segment("user", "refine", "task")])
    engine = ScriptedEngine(renderer(), lambda _: next(completions))
    manager = await open_bank(path, engine=engine, prompts=prompts)
    await manager.submit(request())
    await manager.drain()
    manager.advance(1)
    question = Question("run/train/1/4/0/1", task(), "Where to?", ())
    found = await manager.refine(question, hit("run/0/0/0#0"))
    await manager.credit([found.use], True, episode="run/1/4/0")
    await manager.aclose()


@contextmanager
def browser_of(root: Path, *, write: bool = False) -> Iterator[TestClient]:
    """Return a client of the server of a directory."""
    app = create_app(Site(root, write=write))
    with TestClient(app, base_url="http://127.0.0.1", follow_redirects=False) as client:
        yield client
