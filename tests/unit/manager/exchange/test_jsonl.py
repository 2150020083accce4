"""`crl bank export` and `crl bank import` of JSON lines."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.config.schema import BankSection
from crl.embedders.hash import HashEmbedder
from crl.engines.scripted import ScriptedEngine
from crl.errors import ConfigError
from crl.manager import ExperienceManager
from crl.manager.exchange.jsonl import export_lines, parse_export
from crl.manager.inspection.reading import EntryView
from crl.manager.records import Entry
from crl.manager.storage.store import Store
from crl.types import Counters, Lift, Place, Provenance
from support.bank_commands import (
    SETTINGS,
    bank,
    error_line,
    export_and_import,
    lines,
    open_bank,
    parsed,
    uids,
)
from support.doors import renderer
from support.managers import GOAL, hit, open_manager, request, search


def test_votes_are_listed_and_exported(bank_copy: Path, tmp_path: Path):
    """Check that votes are listed and exported.

    The first entry gets two votes up. Another entry is voted out.
    """
    vote = '[{"op": "%s", "target": 1}]'

    async def votes() -> None:
        await (manager := await open_bank(bank_copy)).drain()
        await manager.aclose()
        settings = replace(SETTINGS, bank=SETTINGS.bank.model_copy(update={"evict_votes": 1}))
        for step, (uid, version, kind) in enumerate(
            (("run/0/0/0#0", 2, "up"), ("run/0/0/0#0", 2, "up"), ("run/2/0/0#1", 1, "down"))
        ):
            engine = ScriptedEngine(renderer(), lambda _, kind=kind: vote % kind)
            manager = await open_manager(bank_copy, engine, settings, embedder=HashEmbedder())
            await manager.submit(request(3 + step, shown=(hit(uid, version),)))
            await manager.drain()
            await manager.aclose()

    asyncio.run(votes())
    assert lines("ls", bank_copy, "--limit", "1") == [
        (
            "uid                      lift  won  retrieved  step  votes  "
            "goal                                text"
        ),
        (
            "0/0/0#0  +0.50 [-1.00, +1.00]  1/1          1     1     +2  Find the exit of the "
            "azure cellar.  Go southwest."
        ),
    ]
    assert "+2 votes of the extractor (of this version)" in lines("show", bank_copy, "0/0/0#0")
    assert lines("show", bank_copy, "2/0/0#1")[0].endswith(
        "evicted after step 0 by votes, the last from run/5/0/0"
    )
    assert lines("stats", bank_copy)[2].endswith("1 credited, 1 voted on")
    assert parsed("stats", bank_copy)["ops"].items() >= {"up": 2, "down": 1}.items()
    (tmp_path / "out.jsonl").write_text(bank("export", bank_copy).stdout, "utf-8")
    lines("import", tmp_path / "voted.sqlite", tmp_path / "out.jsonl")
    assert parsed("show", tmp_path / "voted.sqlite", "0/0/0#0")["entry"]["votes"] == 2


def test_lines_of_format_1_are_read(tmp_path: Path):
    (tmp_path / "old.jsonl").write_text('{"crl_bank": 1}\n' + GOOD, "utf-8")
    lines("import", tmp_path / "new.sqlite", tmp_path / "old.jsonl")
    assert [(entry["votes"], entry["lift"]) for entry in parsed("ls", tmp_path / "new.sqlite")] == [
        (0, None)
    ]


def test_lines_of_format_2_are_read(tmp_path: Path):
    voted = GOOD.replace("}", ', "credited": 2, "credit": 0.0, "votes": -1}')
    (tmp_path / "old.jsonl").write_text('{"crl_bank": 2, "entries": 1}\n' + voted, "utf-8")
    lines("import", tmp_path / "new.sqlite", tmp_path / "old.jsonl")
    assert [(entry["votes"], entry["lift"]) for entry in parsed("ls", tmp_path / "new.sqlite")] == [
        (-1, None)
    ]


@pytest.mark.parametrize(("field", "value"), [("variation", "3"), ("reward", 0.5)])
def test_fields_of_newer_formats_are_exported_and_imported(
    tmp_path: Path, field: str, value: object
):
    line = json.dumps({**json.loads(GOOD), field: value})
    (tmp_path / "one.jsonl").write_text('{"crl_bank": 5}\n' + line, "utf-8")
    lines("import", tmp_path / "new.sqlite", tmp_path / "one.jsonl")
    (exported,) = bank("export", tmp_path / "new.sqlite").stdout.splitlines()[1:]
    assert json.loads(exported)[field] == value


def test_an_imported_bank_holds_what_was_exported(bank_run: Path, tmp_path: Path):
    new = export_and_import(bank_run, tmp_path)
    assert bank("export", new).stdout == bank("export", bank_run).stdout
    assert bank("export", bank_run).stdout.splitlines()[0] == '{"crl_bank": 5, "entries": 5}'
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
        [row[name] for name in kept] for row in parsed("ls", bank_run)
    ]
    shown = lines("show", new, "0/0/0#0")
    assert shown[11:13] == [
        "  after step  how     uid        by           text",
        "           –  import  0/0/0#0@2  run/0/0/0#0  Go southwest.",
    ]
    assert shown[13] == "  sources that are not in this bank: run/0/0/0#0@1"
    assert "  –  import  1/0/1#0@1  run/1/0/1#0  Go southeast." in shown[17], (
        "the successor of an earlier version"
    )
    assert shown[-1].startswith("The model's answer is not in this bank: it was not imported")


def test_an_imported_bank_starts_a_run(bank_run: Path, tmp_path: Path):
    new = export_and_import(bank_run, tmp_path)

    async def start() -> tuple[str, int]:
        await ExperienceManager.start_from(new, tmp_path / "bank.sqlite")
        manager = await open_bank(tmp_path / "bank.sqlite")
        (found,) = await manager.search([search(GOAL + " Go southwest.")])
        assert found is not None
        await manager.credit([found.use], True, episode="again/0/0/0")
        await manager.submit(request(0, 0, 0, note="better", shown=(found,)))
        await manager.drain()
        await manager.aclose()
        return found.use.uid, found.use.version

    assert asyncio.run(start()) == ("run/0/0/0#0", 2)
    story = parsed("show", tmp_path / "bank.sqlite", "run/0/0/0#0")
    assert [(v["kind"], v["version"]) for v in story["lineage"]] == [("update", 3), ("import", 2)]
    assert [use["episode"] for use in story["uses"]] == ["again/0/0/0"]


@pytest.mark.parametrize("reason", ["bounds", "room"], ids=["this version", "earlier versions"])
def test_show_names_evictions_to_smaller_bounds(bank_run: Path, tmp_path: Path, reason: str):
    new = export_and_import(bank_run, tmp_path)

    async def start() -> None:
        await ExperienceManager.start_from(new, tmp_path / "bank.sqlite")
        await (
            await open_bank(
                tmp_path / "bank.sqlite",
                settings=replace(SETTINGS, bank=BankSection(max_entries=1)),
            )
        ).aclose()

    asyncio.run(start())
    with closing(sqlite3.connect(tmp_path / "bank.sqlite")) as db, db:
        db.execute(
            "UPDATE log SET data = json_set(data, '$.reason', ?) WHERE kind = 'evict'", (reason,)
        )
    assert len(uids(tmp_path / "bank.sqlite")) == 1
    first, *_ = lines("show", tmp_path / "bank.sqlite", "run/0/1/0#0")
    assert first == (
        "run/0/1/0#0, version 1, evicted after step 0 to meet the bounds of the run that "
        "opened the bank"
    )


def test_an_import_file_can_be_written_by_hand(tmp_path: Path):
    file = tmp_path / "mine.jsonl"
    line = {"task": "room", "goal": "Get out.", "text": "Follow the wall."}
    file.write_text('{"crl_bank": 1}\n\n' + json.dumps(line) + "\r\n" + json.dumps(line))
    assert lines("import", tmp_path / "new.sqlite", file)[0].startswith("imported 2 experiences")
    assert uids(tmp_path / "new.sqlite") == ["import/0/0/4#0", "import/0/0/3#0"]


GOOD = '{"task": "room", "goal": "Get out.", "text": "Go west.", "uid": "a"}'
DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1 = '': this is not an exported bank. The first line must be"),
        (GOOD, ":1 = "),
        ('{"crl_bank": "1"}', ":1.crl_bank = '1': is not a version of the format"),
        ('{"crl_bank": 6}', ":1.crl_bank = 6: is newer than this crl's 5. Upgrade crl."),
        (b"\xff\xfe", ":1 = "),
        (DEEP, ":1 = "),
        ('{"crl_bank": true}', ":1.crl_bank = True: is not a version of the format"),
        ('{"crl_bank": 1, "entries": -1}', ":1.entries = -1: is not a number of experiences"),
        ('{"crl_bank": 1, "entries": true}', ":1.entries = True: is not a number of experiences"),
        (
            '{"crl_bank": 1, "entries": 2}\n' + GOOD,
            ":1.entries = 2: the file holds 1, so it may be cut off. Export the bank",
        ),
        ("Go west.", ":2 = 'Go west.': invalid JSON"),
        ("[]", ":2 = '[]': "),
        ('{"task": "room", "goal": "Get out."', ":2 = "),
        ('{"task": "room", "goal": "Get out."}', ":2.text = None: field required"),
        (GOOD.replace("Go west.", " "), ":2.text = ' ': must not be empty"),
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
        (
            GOOD.replace("}", ', "parents": ["b"]}'),
            ":2.parents.0 = 'b': must have the form uid@version",
        ),
        (
            GOOD.replace("}", ', "parents": ["b@12345678901"]}'),
            ":2.parents.0 = 'b@12345678901': must have the form uid@version",
        ),
        (
            GOOD + "\n" + json.dumps({"task": "room", "goal": "", "text": "x" * 2001}),
            ":3.text = 'xxx",
        ),
        (
            GOOD + "\n" + GOOD,
            ":3.uid = 'a': line 2 has the same uid. Give each experience a different uid.",
        ),
        (GOOD.encode() + b"\n\xff", ":3 = "),
    ],
)
def test_an_invalid_line_is_named_and_no_bank_is_created(
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
    assert f"{file}{message}" in error_line("import", new, file)
    assert list(tmp_path.iterdir()) == [file]


def test_a_truncated_export_is_refused(bank_run: Path, tmp_path: Path):
    file, whole = tmp_path / "lessons.jsonl", bank("export", bank_run).stdout.encode()
    # Without its last line break, the export is still complete.
    for end in range(len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match=r"lessons\.jsonl:\d+[^ ]* = "):
            parse_export(file)
    file.write_bytes(whole[: whole[:-1].rindex(b"\n")])
    assert f"{file}:1.entries = 5: the file holds 4" in error_line(
        "import", tmp_path / "new.sqlite", file
    )
    assert list(tmp_path.iterdir()) == [file]


def test_an_imported_bank_is_a_single_file(
    bank_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    new = export_and_import(bank_run, tmp_path)
    for reader in kept:
        reader.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lessons.jsonl", "new.sqlite"]
    assert len(uids(new)) == 5


def test_a_leftover_write_ahead_log_stops_an_import(bank_run: Path, tmp_path: Path):
    (tmp_path / "lessons.jsonl").write_text(bank("export", bank_run).stdout, "utf-8")
    (tmp_path / "new.sqlite-wal").write_bytes(b"left behind")
    assert f"bank = '{tmp_path}/new.sqlite-wal': the file already exists" in error_line(
        "import", tmp_path / "new.sqlite", tmp_path / "lessons.jsonl"
    )


def test_an_import_overwrites_nothing_and_leaves_no_files(
    bank_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    new = export_and_import(bank_run, tmp_path)
    before = new.read_bytes()
    assert "the file already exists and is not overwritten" in error_line(
        "import", new, tmp_path / "lessons.jsonl"
    )
    assert new.read_bytes() == before
    assert "cannot be created (No such file or directory)" in error_line(
        "import", tmp_path / "no" / "new.sqlite", tmp_path / "lessons.jsonl"
    )
    assert "cannot be read (No such file or directory)" in error_line(
        "import", tmp_path / "newer.sqlite", tmp_path / "none.jsonl"
    )
    monkeypatch.setattr("crl.manager.storage.tables.json.dumps", lambda *args, **options: 1 / 0)
    assert isinstance(
        bank("import", tmp_path / "newer.sqlite", tmp_path / "lessons.jsonl").exception,
        ZeroDivisionError,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lessons.jsonl", "new.sqlite"]


def test_a_terminated_import_leaves_no_files(bank_run: Path, tmp_path: Path):
    (file := tmp_path / "lessons.jsonl").write_text(bank("export", bank_run).stdout, "utf-8")
    endless = (
        "import asyncio; from crl.manager.storage.store import Store; "
        "Store.import_entries = lambda *_: asyncio.sleep(99); "
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
def test_any_text_can_be_exported_and_imported(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str, str]]
):
    lift = Lift(3, -1 / 3, 0.7) if texts and len(texts[0][2]) % 2 else None
    entries = [
        EntryView(
            f"run/0/0/{i}#0",
            3,
            text,
            Place(name, goal),
            Provenance("run/0/0/0", (0, 1), (f"a#{i}@2",)),
            Counters(5, 6, 7, -1.0, -2, lift),
            step=4,
        )
        for i, (name, goal, text) in enumerate(texts)
    ]
    file = tmp_path_factory.mktemp("export") / "lessons.jsonl"
    file.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in export_lines(entries)),
        "utf-8",
        newline="\n",
    )

    def kept(entry: Entry) -> tuple[object, ...]:
        counters = replace(entry.counters, last_returned_step=None)
        parents = entry.provenance.parents
        return (*entry.unit, entry.place, entry.text, parents, counters, entry.status)

    assert list(map(kept, parse_export(file))) == list(map(kept, entries))
