"""`crl bank` commands that change a bank: retry of dead requests, export, import, pruning."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from banks import (
    SETTINGS,
    another_run,
    bank,
    copy_of,
    finished_run,
    go_another_way,
    lines,
    moved,
    opened,
    parsed,
    refused,
    uids,
)
from doors import renderer
from extractors import GOAL, add, hit, logged, manager, request, search
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.errors import ConfigError
from crl.manager import ExperienceManager
from crl.manager.embed import HashEmbedder
from crl.manager.reading import EntryView
from crl.manager.store import Store
from crl.manager.upkeep import exported, parse_exported
from crl.types import Lift


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run. No test changes it."""
    return finished_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return copy_of(run, tmp_path)


# ── dead --retry ──────────────────────────────────────────────────────────────────────────────────


def test_the_dead_can_be_tried_again(copy: Path):
    assert lines("dead", copy, "--retry") == [
        "1 dead episode is queued again; it waits until the run goes on"
    ]
    assert [one["id"] for one in parsed("queue", copy)] == ["run/0/0/3", "run/2/1/0"]
    assert parsed("dead", copy) == []

    async def go_on() -> dict[str, int]:
        engine = ScriptedEngine(renderer(), lambda prompt: add("Go north."))
        made = await opened(copy, engine=engine)
        await made.drain()
        metrics = await made.stats()
        await made.aclose()
        return metrics

    metrics = asyncio.run(go_on())
    assert (metrics["queue/pending"], metrics["queue/dead"], metrics["queue/done"]) == (0, 0, 9)
    assert lines("dead", copy, "--retry") == ["no episode is dead"]


def test_some_of_the_dead_can_be_tried_again(copy: Path):
    with sqlite3.connect(copy) as db:
        db.execute("UPDATE requests SET state = 'dead', reason = 'busy' WHERE state = 'pending'")
    before = parsed("dead", copy)
    assert [one["id"] for one in before] == ["run/0/0/3", "run/2/1/0"]
    unknown = refused("dead", copy, "--retry", "run/2/1/0", "nobody", "run/0/0/0", code=1)
    assert unknown == (
        f"error: {copy}: no dead episodes: nobody, run/0/0/0. Nothing was changed; "
        "crl bank dead lists them.\n"
    )
    assert "named for --retry alone" in refused("dead", copy, "run/2/1/0")
    assert parsed("dead", copy) == before
    assert lines("dead", copy, "--retry", "run/2/1/0") == [
        "1 dead episode is queued again; it waits until the run goes on"
    ]
    assert [one["id"] for one in parsed("queue", copy)] == ["run/2/1/0"]
    assert lines("dead", copy, "run/0/0/3", "--retry") == [
        "1 dead episode is queued again; it waits until the run goes on"
    ]


def test_what_dies_twice_can_be_tried_twice(copy: Path):
    async def die_again() -> None:
        made = await opened(copy)
        await made.drain()
        await made.aclose()

    for _ in range(2):
        lines("dead", copy, "--retry")
        asyncio.run(die_again())
        assert len(parsed("dead", copy)) == 1
    assert [origin for origin, _ in logged(copy, "revive")] == ["run/0/0/3"] * 2


# ── export, import ────────────────────────────────────────────────────────────────────────────────


def test_votes_are_shown_and_travel(copy: Path, tmp_path: Path):
    """Check that votes are listed and exported.

    The first entry gets two votes up. Another entry is voted out.
    """
    vote = '[{"op": "%s", "target": 1}]'

    async def votes() -> None:
        await (made := await opened(copy)).drain()
        await made.aclose()
        settings = replace(SETTINGS, vote_out=1)
        for step, (uid, version, kind) in enumerate(
            (("run/0/0/0#0", 2, "up"), ("run/0/0/0#0", 2, "up"), ("run/2/0/0#1", 1, "down"))
        ):
            engine = ScriptedEngine(renderer(), lambda _, kind=kind: vote % kind)
            made = await manager(copy, engine, settings, embedder=HashEmbedder())
            await made.submit(request(3 + step, shown=(hit(uid, version),)))
            await made.drain()
            await made.aclose()

    asyncio.run(votes())
    assert lines("ls", copy, "--limit", "1") == [
        "uid               lift  won  uses  step  votes  goal                                text",
        (
            "0/0/0#0  +0.50 ± 12.71  1/1     1     1     +2  Find the exit of the azure "
            "cellar.  Go southwest."
        ),
    ]
    assert "+2 votes of the extractor (of this version)" in lines("show", copy, "0/0/0#0")
    assert lines("show", copy, "2/0/0#1")[0].endswith(
        "evicted at step 0 by the votes up to run/5/0/0"
    )
    assert lines("stats", copy)[2].endswith("1 credited, 1 voted on")
    assert parsed("stats", copy)["ops"].items() >= {"up": 2, "down": 1}.items()
    (tmp_path / "out.jsonl").write_text(bank("export", copy).stdout, "utf-8")
    lines("import", tmp_path / "voted.sqlite", tmp_path / "out.jsonl")
    assert parsed("show", tmp_path / "voted.sqlite", "0/0/0#0")["entry"]["votes"] == 2


def test_lines_of_the_first_format_are_read(tmp_path: Path):
    (tmp_path / "old.jsonl").write_text('{"crl_bank": 1}\n' + GOOD, "utf-8")
    lines("import", tmp_path / "new.sqlite", tmp_path / "old.jsonl")
    assert [(entry["votes"], entry["lift"]) for entry in parsed("ls", tmp_path / "new.sqlite")] == [
        (0, None)
    ]


def test_lines_of_the_second_format_are_read(tmp_path: Path):
    voted = GOOD.replace("}", ', "credited": 2, "credit": 0.0, "votes": -1}')
    (tmp_path / "old.jsonl").write_text('{"crl_bank": 2, "entries": 1}\n' + voted, "utf-8")
    lines("import", tmp_path / "new.sqlite", tmp_path / "old.jsonl")
    assert [(entry["votes"], entry["lift"]) for entry in parsed("ls", tmp_path / "new.sqlite")] == [
        (-1, None)
    ]


def test_an_imported_bank_holds_what_was_exported(run: Path, tmp_path: Path):
    new = moved(run, tmp_path)
    assert bank("export", new).stdout == bank("export", run).stdout
    assert bank("export", run).stdout.splitlines()[0] == '{"crl_bank": 3, "entries": 5}'
    kept = (
        "uid",
        "version",
        "text",
        "goal",
        "task",
        "parents",
        "retrieved",
        "credited",
        "credit",
        "votes",
        "lift",
        "status",
    )
    lift = parsed("show", new, "0/0/0#0")["entry"]["lift"]
    assert lift == {
        "groups": 1,
        "mean": 0.5,
        "m2": 0.0,
        "half_width": pytest.approx(12.706205, abs=1e-6),
    }
    assert [[row[name] for name in kept] for row in parsed("ls", new)] == [
        [row[name] for name in kept] for row in parsed("ls", run)
    ]
    shown = lines("show", new, "0/0/0#0")
    assert shown[11:13] == [
        "  step  how     uid        by           text",
        "     –  import  0/0/0#0@2  run/0/0/0#0  Go southwest.",
    ]
    assert shown[13] == "  came from what is not in this bank: run/0/0/0#0@1"
    assert "  –  import  1/0/1#0@1  run/1/0/1#0  Go southeast." in shown[17], (
        "what came of an earlier version"
    )
    assert shown[-1].startswith("The answer that wrote it is not here: it came from elsewhere")


def test_an_imported_bank_starts_a_run(run: Path, tmp_path: Path):
    new = moved(run, tmp_path)

    async def start() -> tuple[str, int]:
        await ExperienceManager.start_from(new, tmp_path / "bank.sqlite")
        made = await opened(tmp_path / "bank.sqlite")
        (found,) = await made.search([search(GOAL + " Go southwest.")])
        assert found is not None
        await made.credit([found.use], True, episode="again/0/0/0")
        await made.submit(request(0, 0, 0, note="better", shown=(found,)))
        await made.drain()
        await made.aclose()
        return found.use.uid, found.use.version

    assert asyncio.run(start()) == ("run/0/0/0#0", 2)
    story = parsed("show", tmp_path / "bank.sqlite", "run/0/0/0#0")
    assert [(v["kind"], v["version"]) for v in story["lineage"]] == [("update", 3), ("import", 2)]
    assert [use["episode"] for use in story["uses"]] == ["again/0/0/0"]


def test_a_run_with_a_closer_bound_says_what_went(run: Path, tmp_path: Path):
    new = moved(run, tmp_path)

    async def start() -> None:
        await ExperienceManager.start_from(new, tmp_path / "bank.sqlite")
        await (await opened(tmp_path / "bank.sqlite", settings=replace(SETTINGS, size=1))).aclose()

    asyncio.run(start())
    assert len(uids(tmp_path / "bank.sqlite")) == 1
    first, *_ = lines("show", tmp_path / "bank.sqlite", "run/0/1/0#0")
    assert first == (
        "run/0/1/0#0, version 1, evicted at step 0 to fit the bounds of the run that "
        "opened the bank"
    )


def test_lessons_can_be_written_by_hand(tmp_path: Path):
    file = tmp_path / "mine.jsonl"
    line = {"task": "room", "goal": "Get out.", "text": "Follow the wall."}
    file.write_text('{"crl_bank": 1}\n\n' + json.dumps(line) + "\r\n" + json.dumps(line))
    assert lines("import", tmp_path / "new.sqlite", file)[0].startswith("2 experiences")
    assert uids(tmp_path / "new.sqlite") == ["import/0/0/4#0", "import/0/0/3#0"]


GOOD = '{"task": "room", "goal": "Get out.", "text": "Go west.", "uid": "a"}'
DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1 = '': this is no exported bank. Its first line must be"),
        (GOOD, ":1 = "),
        ('{"crl_bank": "1"}', ":1.crl_bank = '1': is no version of the format"),
        ('{"crl_bank": 4}', ":1.crl_bank = 4: is newer than this crl's 3. Upgrade crl."),
        (b"\xff\xfe", ":1 = "),
        (DEEP, ":1 = "),
        ('{"crl_bank": true}', ":1.crl_bank = True: is no version of the format"),
        ('{"crl_bank": 1, "entries": -1}', ":1.entries = -1: is no number of experiences"),
        ('{"crl_bank": 1, "entries": true}', ":1.entries = True: is no number of experiences"),
        (
            '{"crl_bank": 1, "entries": 2}\n' + GOOD,
            ":1.entries = 2: 1 follow, so it may be cut off. Export it again",
        ),
        ("Go west.", ":2 = 'Go west.': invalid JSON"),
        ("[]", ":2 = '[]': "),
        ('{"task": "room", "goal": "Get out."', ":2 = "),
        ('{"task": "room", "goal": "Get out."}', ":2.text = None: field required"),
        (GOOD.replace("Go west.", " "), ":2.text = ' ': is empty"),
        (GOOD.replace('"Go west."', "7"), ":2.text = 7: should be a valid string"),
        (GOOD.replace("Go west.", "\\ud800"), ":2 = "),
        (GOOD.replace("}", ', "vector": []}'), ":2.vector = []: extra inputs are not permitted"),
        (
            GOOD.replace("}", ', "version": 0}'),
            ":2.version = 0: should be greater than or equal to 1",
        ),
        (GOOD.replace("}", ', "credited": 1, "credit": -2.0}'), ":2 = "),
        (GOOD.replace("}", ', "credit": NaN}'), ":2"),
        (
            GOOD.replace("}", ', "lift": {"groups": 0, "mean": 0.0, "m2": 0.0}}'),
            ":2.lift.groups = 0: should be greater than or equal to 1",
        ),
        (
            GOOD.replace("}", ', "lift": {"groups": 2, "mean": 1.5, "m2": 0.0}}'),
            ":2.lift.mean = 1.5: should be less than or equal to 1",
        ),
        (GOOD.replace("}", ', "lift": {"groups": 2, "mean": 0.5, "m2": 1.75}}'), ":2.lift = "),
        (
            GOOD.replace("}", ', "lift": {"groups": 2, "mean": 0.5}}'),
            ":2.lift.m2 = None: field required",
        ),
        (GOOD.replace("}", ', "parents": ["b"]}'), ":2.parents.0 = 'b': is no uid@version"),
        (
            GOOD.replace("}", ', "parents": ["b@12345678901"]}'),
            ":2.parents.0 = 'b@12345678901': is no uid@version",
        ),
        (
            GOOD + "\n" + json.dumps({"task": "room", "goal": "", "text": "x" * 2001}),
            ":3.text = 'xxx",
        ),
        (
            GOOD + "\n" + GOOD,
            ":3.uid = 'a': line 2 has it too. Give each experience a uid of its own.",
        ),
        (GOOD.encode() + b"\n\xff", ":3 = "),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_made(
    content: str | bytes, message: str, tmp_path: Path
):
    file, new = tmp_path / "lessons.jsonl", tmp_path / "new.sqlite"
    content = content.encode() if isinstance(content, str) else content
    whole = (
        not content
        or b"crl_bank" in content
        or content in (GOOD.encode(), DEEP.encode(), b"\xff\xfe")
    )
    file.write_bytes(content if whole else b'{"crl_bank": 1}\n' + content)
    assert f"{file}{message}" in refused("import", new, file)
    assert list(tmp_path.iterdir()) == [file]


def test_an_export_that_was_cut_off_anywhere_is_refused(run: Path, tmp_path: Path):
    file, whole = tmp_path / "lessons.jsonl", bank("export", run).stdout.encode()
    # Without its last line break, the export is still complete.
    for end in range(len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match=r"lessons\.jsonl:\d+[^ ]* = "):
            parse_exported(file)
    file.write_bytes(whole[: whole[:-1].rindex(b"\n")])
    assert f"{file}:1.entries = 5: 4 follow" in refused("import", tmp_path / "new.sqlite", file)
    assert list(tmp_path.iterdir()) == [file]


def test_an_imported_bank_is_one_file_whose_log_is_empty(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that one file remains, even if closing the bank leaves other files behind.

    These files would not be renamed with the bank.
    """
    kept, close = [], Store.aclose

    async def leaving(store: Store) -> None:
        # This reader prevents SQLite's cleanup when the bank is closed.
        kept.append(reader := sqlite3.connect(store._database.path))
        reader.execute("SELECT * FROM log").fetchall()
        await close(store)

    monkeypatch.setattr(Store, "aclose", leaving)
    new = moved(run, tmp_path)
    for reader in kept:
        reader.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lessons.jsonl", "new.sqlite"]
    assert len(uids(new)) == 5


def test_an_import_does_not_inherit_the_log_of_a_bank_that_is_gone(run: Path, tmp_path: Path):
    (tmp_path / "lessons.jsonl").write_text(bank("export", run).stdout, "utf-8")
    (tmp_path / "new.sqlite-wal").write_bytes(b"left behind")
    assert f"bank = '{tmp_path}/new.sqlite-wal': it exists" in refused(
        "import", tmp_path / "new.sqlite", tmp_path / "lessons.jsonl"
    )


def test_an_import_writes_over_nothing_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    new = moved(run, tmp_path)
    before = new.read_bytes()
    assert "it exists, and is not written over" in refused(
        "import", new, tmp_path / "lessons.jsonl"
    )
    assert new.read_bytes() == before
    assert "cannot be made (No such file or directory)" in refused(
        "import", tmp_path / "no" / "new.sqlite", tmp_path / "lessons.jsonl"
    )
    assert "cannot be read (No such file or directory)" in refused(
        "import", tmp_path / "newer.sqlite", tmp_path / "none.jsonl"
    )
    monkeypatch.setattr("crl.manager.tables.json.dumps", lambda *args, **options: 1 / 0)
    assert isinstance(
        bank("import", tmp_path / "newer.sqlite", tmp_path / "lessons.jsonl").exception,
        ZeroDivisionError,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lessons.jsonl", "new.sqlite"]


def test_an_import_that_is_terminated_leaves_nothing(run: Path, tmp_path: Path):
    (file := tmp_path / "lessons.jsonl").write_text(bank("export", run).stdout, "utf-8")
    endless = (
        "import asyncio; from crl.manager.store import Store; "
        "Store.take_in = lambda *_: asyncio.sleep(99); "
    )
    command = [
        sys.executable,
        "-c",
        f"{endless}from crl.cli.main import main; main()",
        "bank",
        "import",
        tmp_path / "new.sqlite",
        file,
    ]
    with subprocess.Popen(command) as process:
        while not list(tmp_path.glob(".crl-import-*/new.sqlite-wal")):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
    assert (process.returncode, list(tmp_path.iterdir())) == (130, [file])


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(st.tuples(words, words, words), max_size=4))
@settings(max_examples=50)
def test_any_text_survives_its_export(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str, str]]
):
    lift = Lift(3, -1 / 3, 0.7) if texts and len(texts[0][2]) % 2 else None
    entries = [
        EntryView(
            f"run/0/0/{i}#0",
            3,
            "active",
            name,
            goal,
            text,
            (f"a#{i}@2",),
            4,
            "run/0/0/0",
            5,
            6,
            7,
            -1.0,
            -2,
            lift,
        )
        for i, (name, goal, text) in enumerate(texts)
    ]
    file = tmp_path_factory.mktemp("export") / "lessons.jsonl"
    file.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in exported(entries)),
        "utf-8",
        newline="\n",
    )
    kept = (
        "uid",
        "version",
        "task",
        "goal",
        "text",
        "parents",
        "retrieved",
        "credited",
        "credit",
        "votes",
        "lift",
        "status",
    )
    assert [[getattr(e, name) for name in kept] for e in parse_exported(file)] == [
        [getattr(e, name) for name in kept] for e in entries
    ]


# ── prune ─────────────────────────────────────────────────────────────────────────────────────────


def test_prune_evicts_the_lowest_credit_and_keeps_the_history(copy: Path):
    asyncio.run(go_another_way(copy))  # credit: 0/0/0#0 −1, 0/1/0#0 −1
    assert lines("prune", copy, "--max-entries", "4", "--yes") == ["evicted 1; active now 4"]
    assert uids(copy, "--status", "evicted", "--sort", "age")[-1] == "run/0/0/0#1"
    assert lines("show", copy, "0/1/0#0")[0].startswith("run/0/1/0#0, version 1, evicted at step ")
    assert lines("show", copy, "0/1/0#0")[0].endswith("by crl bank prune")
    assert lines("prune", copy, "--max-entries", "4", "--yes") == [
        "nothing to evict among 4 active experiences"
    ]

    async def guiding() -> set[str]:
        made = await opened(copy)
        guides = set(made._bank.entries)
        await made.aclose()
        return guides

    assert "run/0/1/0#0" not in asyncio.run(guiding())


def test_prune_evicts_what_was_not_used_since_a_step(copy: Path):
    assert lines("prune", copy, "--unused-since", "2", "--yes") == ["evicted 2; active now 3"]
    # The first entry was retrieved at step 2. The others were written then.
    assert set(uids(copy)) == {
        "run/0/0/0#0",
        "run/2/0/0#0",
        "run/2/0/0#1",
    }


def test_what_was_used_in_an_earlier_run_alone_was_not_used_since(run: Path, tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    asyncio.run(another_run(run / "bank.sqlite", path))
    assert lines("prune", path, "--unused-since", "1", "--yes") == ["evicted 4; active now 2"]
    # The first entry was retrieved at step 1 of this run. The other was written then.
    assert set(uids(path)) == {
        "run/0/0/0#0",
        "again/1/0/0#0",
    }


def test_what_is_pruned_before_the_first_operation_of_a_run_is_pruned_by_its_clock(
    run: Path, tmp_path: Path
):
    path = tmp_path / "bank.sqlite"
    asyncio.run(ExperienceManager.start_from(run / "bank.sqlite", path))
    assert lines("prune", path, "--max-entries", "4", "--yes") == ["evicted 1; active now 4"]
    assert (
        lines("show", path, "0/1/0#0")[0]
        == "run/0/1/0#0, version 1, evicted at step 0 by crl bank prune"
    )


def test_prune_asks_first(copy: Path):
    result = bank("prune", copy, "--max-entries", "1", input="n\n")
    assert result.exit_code == 1
    assert "Evict 4 of 5 active experiences? [y/N]" in result.output
    assert "0/1/0#0" in result.output
    assert len(uids(copy)) == 5
    assert bank("prune", copy, "--max-entries", "1", input="").exit_code == 1, "nobody there to ask"
    assert len(uids(copy)) == 5
    assert bank("prune", copy, "--max-entries", "1", input="y\n").exit_code == 0
    assert uids(copy) == ["run/0/0/0#0"]


def test_what_was_changed_is_told_as_json_too(copy: Path, tmp_path: Path):
    assert "prune = '--json': it does not ask" in refused(
        "prune", copy, "--max-entries", "2", "--json"
    )
    assert parsed("prune", copy, "--max-entries", "2", "--yes") == {"evicted": 3, "active": 2}
    assert parsed("prune", copy, "--max-entries", "2", "--yes") == {"evicted": 0, "active": 2}
    (tmp_path / "lessons.jsonl").write_text(bank("export", copy).stdout, "utf-8")
    new = tmp_path / "new.sqlite"
    assert parsed("import", new, tmp_path / "lessons.jsonl") == {"imported": 2, "bank": str(new)}


def test_prune_needs_one_criterion(copy: Path):
    assert "one criterion" in refused("prune", copy)
    assert "one criterion" in refused("prune", copy, "--max-entries", "1", "--unused-since", "1")
