"""Tests of the `crl bank` commands that only read: text output, JSON, errors, and banks in use."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from crl.cli.bank import _report_on
from crl.cli.bank_text import history, stats_lines
from crl.cli.output import table
from crl.config.load import dump, load
from crl.embedders.hash import HashEmbedder
from crl.engines.scripted import ScriptedEngine
from crl.manager import ExperienceManager, GroupSuccess
from crl.manager.inspection.reading import LiftView, UseView, open_reader, short_uids
from crl.manager.records import UnitKey
from crl.manager.storage.schema import SCHEMA_VERSION
from crl.protocols import Hit, Question
from crl.types import Segment
from support.bank_commands import (
    HALL,
    bank,
    diverge,
    error_line,
    export_and_import,
    lines,
    open_bank,
    parsed,
    play_second_run,
    uids,
)
from support.doors import renderer
from support.managers import (
    GOAL,
    PROMPTS,
    add,
    bank_of_version_1,
    hit,
    request,
    search,
    task,
    update,
)

LS = """\
uid                      lift  won  retrieved  step  task  goal                                text
0/0/0#0  +0.50 [-1.00, +1.00]  1/1          1     1  room  Find the exit of the azure cellar.  \
Go southwest.
2/0/0#1                     –    –          0     2  room  Find the exit of the azure cellar.  \
Mind the trap.
2/0/0#0                     –    –          0     2  room  Find the exit of the azure cellar.  \
Go west.
1/0/1#0                     –    –          0     1  room  Find the exit of the azure cellar.  \
Go southeast.
0/1/0#0                     –    –          0     0  maze  Leave the long hall.                \
Follow the left wall."""

SHOW = """\
run/0/0/0#0, version 2, active
task  room
goal  Find the exit of the azure cellar.
text
  Go southwest.

retrieved once, last after step 2
won 1 of 1 credited episode (of this version)
lift +0.50 [-1.00, +1.00] over one group: success rate of guided minus free members \
(of this version)

lineage, newest first
  after step  how     uid        by         text
           1  update  0/0/0#0@2  run/1/0/0  Go southwest.
           0  add     0/0/0#0@1  run/0/0/0  Go west.

derived versions
  after step  how  uid        by         text
           1  add  1/0/1#0@1  run/1/0/1  Go southeast.

lift and credit over time (of all versions)
  when                    lift  won
  step 2  +0.25 [-1.00, +1.00]  1/2
  step 3  +0.50 [-1.00, +1.00]  1/1

guided episodes
  step  episode    version  reward
     2  run/1/0/0        1      +1
     2  run/1/0/1        1      -1
     3  run/2/0/0        2      +1

written by run/1/0/0: model version 0, 39 tokens, finish reason stop
never trained on
prompt
  <|im_start|>user
  run/1/0/0
  Find the exit of the azure cellar.
  success
  1. Go west.
  at 2 3
  east better<|im_end|>
  <|im_start|>assistant

answer
  [{"op": "update", "target": 1, "text": "Go southwest."}]<|im_end|>"""

STATS = """\
vectors     search key: goal, plus 0.1 × text (embedder hash-char_wb-2-4-384)
used        1 of 5 active experiences retrieved, 1 credited
operations  add 6  credit 3  dead 1  drop 1  evict 1  lift 2  retrieve 1  return 1  \
submit 9  update 1
refused     no op in the answer 1
queue       pending 1  leased 0  done 7  dead 1
training    stored answers 5  credit units ready 2

task  active  evicted  merged  goals
maze       1        0       0      1
room       4        1       0      1

active experiences by the 95 % interval of their lift
  above 0   0
  around 0  1
  below 0   0
  unknown   4

active experiences by the share of their credited episodes that were won
    0– 20 %  0
   20– 40 %  0
   40– 60 %  0
   60– 80 %  0
   80–100 %  1  ████████████████████████████████████████"""

DIFF = """\
A {a}
B {b}
only in A 1, only in B 1, in both 4
credited in both 1, episodes won: A 1/1, B 1/3

only in A
  lift  won  goal                                text
     –    –  Find the exit of the azure cellar.  Mind the trap.

only in B
  lift  won  goal                  text
     –    –  Leave the long hall.  Go back.

in both, largest difference in lift first
                lift A  won A                lift B  won B  goal                                text
  +0.50 [-1.00, +1.00]    1/1  +0.12 [-1.00, +1.00]    1/3  Find the exit of the azure cellar.  \
Go southwest.
                     –      –                     –    0/1  Leave the long hall.                \
Follow the left wall.
                     –      –                     –      –  Find the exit of the azure cellar.  \
Go southeast.
                     –      –                     –      –  Find the exit of the azure cellar.  \
Go west."""


# ── ls ────────────────────────────────────────────────────────────────────────────────────────────


def test_ls_prints_whole_rows_where_there_is_no_terminal(bank_run: Path):
    assert lines("ls", bank_run) == LS.splitlines()


def test_ls_filters_sorts_and_limits(bank_run: Path):
    newest = ["run/2/0/0#1", "run/2/0/0#0", "run/1/0/1#0", "run/0/0/0#0", "run/0/1/0#0"]
    assert uids(bank_run, "--sort", "age") == newest
    assert uids(bank_run, "--sort", "age", "--reverse") == newest[::-1]
    assert uids(bank_run, "--sort", "retrieved", "--limit", "1") == ["run/0/0/0#0"]
    assert (
        uids(bank_run, "--task", "maze") == uids(bank_run, "--goal", "LONG hall") == ["run/0/1/0#0"]
    )
    assert uids(bank_run, "--status", "evicted") == ["run/0/0/0#1"]
    assert len(uids(bank_run, "--status", "all", "--limit", "0")) == 6
    assert uids(bank_run, "--task", "none") == []


GROUPS = {
    "run/0/0/0#0": [(1.0, 0.5)],
    "run/1/0/1#0": 4 * [(1.0, 0.5), (0.5, 0.25), (1.0, 0.5)],
    "run/2/0/0#0": 4 * [(1.0, 1.0), (1.0, 1.0), (0.0, 0.0)],
    "run/2/0/0#1": 4 * [(0.25, 1.0), (0.0, 0.5), (0.5, 1.0)],
}
"""Success rates (guided, free) of groups, by uid.

The fixture has recorded one more group for the first uid.
"""


def with_lifts(path: Path) -> Path:
    """Record lifts for the four experiences of the room. Return `path`."""

    async def record() -> None:
        manager = await open_bank(path)
        for uid, groups in GROUPS.items():
            unit = manager._bank.entries[uid].unit
            await manager.record_lifts(
                {f"run/9/{uid}{i}": [GroupSuccess(unit, *one)] for i, one in enumerate(groups)}
            )
        await manager.aclose()

    asyncio.run(record())
    return path


def test_ls_sorts_by_the_lower_end_of_lift(bank_copy: Path):
    """Check the order of `--sort lift`.

    Half widths are t_975(n) · √(1 + m2) / n. The ends of intervals are clipped to [−1, 1].

    12 groups, mean 5/12, m2 = 4 / 24: 2.178813 · √(7/6) / 12 = 0.196116, from 0.22 to 0.61.
    12 groups of 0: 2.178813 / 12 = 0.181568, from −0.18 to 0.18.
    12 groups, mean −7/12, m2 = 4 / 24: from −0.78 to −0.39.
    2 groups of 1/2, one of them from the fixture: 4.302653 / 2 = 2.151326, from −1 to 1.

    An experience without a group comes last in both orders.
    """
    best = ["run/1/0/1#0", "run/2/0/0#0", "run/2/0/0#1", "run/0/0/0#0"]
    assert [row[:35] for row in lines("ls", with_lifts(bank_copy), "--task", "room")] == [
        "uid                      lift  won ",
        "1/0/1#0  +0.42 [+0.22, +0.61]    – ",
        "2/0/0#0  +0.00 [-0.18, +0.18]    – ",
        "2/0/0#1  -0.58 [-0.78, -0.39]    – ",
        "0/0/0#0  +0.50 [-1.00, +1.00]  1/1 ",
    ]
    assert (
        uids(bank_copy, "--task", "room")
        == uids(bank_copy, "--task", "room", "--sort", "lift")
        == best
    )
    worst = ["run/2/0/0#1", "run/2/0/0#0", "run/1/0/1#0", "run/0/0/0#0"]
    assert uids(bank_copy, "--task", "room", "--reverse") == worst
    assert (
        uids(bank_copy, "--sort", "lift")[-1] == uids(bank_copy, "--reverse")[-1] == "run/0/1/0#0"
    )
    assert uids(bank_copy, "--sort", "credit")[0] == "run/0/0/0#0"
    found = parsed("stats", bank_copy)["lift"]
    assert found == {"above": 1, "below": 1, "around": 2, "unknown": 1}


def test_a_lift_as_json_has_its_half_width(bank_copy: Path):
    lifts = {entry["uid"]: entry["lift"] for entry in parsed("ls", with_lifts(bank_copy))}
    assert lifts["run/0/0/0#0"] == {
        "groups": 2,
        "mean": 0.5,
        "m2": 0.0,
        "half_width": pytest.approx(2.151326, abs=1e-6),
    }
    assert lifts["run/1/0/1#0"] == {
        "groups": 12,
        "mean": pytest.approx(5 / 12),
        "m2": pytest.approx(1 / 6),
        "half_width": pytest.approx(0.196116, abs=1e-6),
    }
    assert lifts["run/0/1/0#0"] is None
    groups = parsed("show", bank_copy, "0/0/0#0")["lifts"]
    assert [(one["version"], one["guided"], one["free"]) for one in groups] == [
        (1, 0.5, 0.25),
        (2, 1.0, 0.5),
        (2, 1.0, 0.5),
    ]
    assert lines("show", bank_copy, "2/0/0#1")[7:9] == [
        "never credited",
        (
            "lift -0.58 [-0.78, -0.39] over 12 groups: success rate of guided minus free members "
            "(of this version)"
        ),
    ]


def test_credit_without_a_free_member_is_no_lift(bank_copy: Path):
    asyncio.run(diverge(bank_copy))
    shown = lines("show", bank_copy, "0/1/0#0")
    assert "won 0 of 1 credited episode (of this version)" in shown
    assert (
        "lift unknown: no group that it guided has free members to compare with (of this version)"
        in shown
    )


def test_rows_that_are_left_out_are_reported_on_stderr(bank_run: Path):
    result = bank("ls", bank_run, "--limit", "2", "--task", "room")
    heading = result.stdout.splitlines()[0]
    assert heading.split() == ["uid", "lift", "won", "retrieved", "step", "goal", "text"]
    assert len(result.stdout.splitlines()) == 3
    assert result.stderr == "showing 2 of 4; use --limit 0 for all\n"
    assert (
        bank("ls", bank_run, "--limit", "2", "--task", "room", "--json").stderr
        == "showing 2 of 4; use --limit 0 for all\n"
    )
    for command in (["ls", bank_run], ["search", bank_run, "west"]):
        nothing = bank(*command, "--task", "none")
        assert nothing.stdout == ""
        assert nothing.stderr == "no results\n--task none: the bank has experiences of maze, room\n"
    assert error_line("search", bank_run, "") == (
        "error: text = '': is empty. Give a text, such as the goal of a task.\n"
    )


def test_a_bank_file_can_be_given_instead_of_its_run(bank_run: Path):
    assert lines("ls", bank_run / "bank.sqlite") == lines("ls", bank_run)


def test_on_a_terminal_texts_are_cut_to_the_width():
    columns = {
        "uid": ["run1a2b3c4d/100/15/7#2", "0/0/0#0"],
        "won": ["86/88", "–"],
        "goal": ["Room: the broken cellar. Reach the stairs down (>).", "短い"],
        "text": [
            "Walk southwest until the wall, and then along it.",
            "左の壁に沿って歩き、それから右に曲がって出口を探しなさい。",
        ],
    }
    for width in (60, 80, 100):
        rows = table(columns, width)
        assert {cell_len(row) for row in rows[1:]} <= {
            width,
            width - 1,
        }  # a wide character may not fit into the last cell
        assert all("…" in row for row in rows[1:])
    assert table(columns, 80)[0] == "uid                       won  goal                text"
    assert table(columns, 300) == table(columns, None)


def test_a_huge_cell_does_not_pad_the_other_rows():
    text = "x" * 1_000_000
    columns = {"uid": ["a", text, "b"], "text": ["short", text, "short"]}
    rows = table(columns, None)
    assert rows[2] == f"{text}  {text}", "nothing is lost"
    assert sum(map(len, rows)) < 2_010_000
    assert sum(map(len, table(columns, 80))) < 1_010_000


def test_long_lists_are_broken_to_the_width_of_the_terminal(bank_run: Path):
    with open_reader(bank_run / "bank.sqlite") as reader:
        stats = reader.stats()
        whole, narrow = (list(stats_lines(stats, width)) for width in (None, 78))
    assert max(map(cell_len, whole[1:])) > 78
    assert max(map(cell_len, narrow[1:])) <= 78  # the first one has a path
    assert " ".join("\n".join(narrow).split()) == " ".join("\n".join(whole).split())


# ── show ──────────────────────────────────────────────────────────────────────────────────────────


def test_show_prints_the_commands_that_show_its_episodes(bank_copy: Path):
    assert not any("crl replay" in line for line in lines("show", bank_copy, "0/0/0#0"))
    (bank_copy.parent / "episodes").mkdir()
    shown = lines("show", bank_copy, "0/0/0#0")
    start = f"  show the episode: crl replay {bank_copy.parent} run"
    guided = shown.index("guided episodes")
    assert shown[guided + 5 : guided + 7] == [f"{start}/2/0/0", ""]
    written = next(i for i, line in enumerate(shown) if line.startswith("written by run/1/0/0: "))
    assert shown[written + 1] == f"{start}/1/0/0"


def test_show_fits_the_terminal(bank_run: Path):
    with open_reader(bank_run / "bank.sqlite") as reader:
        report = _report_on(reader, "run/0/0/0#0")
        shown = list(report.lines(short_uids(reader.uids()), 60))
    assert max(map(cell_len, shown)) <= 60


def test_show_prints_everything_about_an_experience(bank_run: Path):
    assert lines("show", bank_run, "0/0/0#0") == SHOW.splitlines()


def test_show_as_json(bank_run: Path):
    report = parsed("show", bank_run, "run/1/0/1#0@1")
    assert report["entry"] == parsed("ls", bank_run)[3]
    assert [(v["uid"], v["version"], v["text"]) for v in report["lineage"]] == [
        ("run/1/0/1#0", 1, "Go southeast."), ("run/0/0/0#0", 1, "Go west."),
    ]  # fmt: skip
    assert report["answer"] == update("Go southeast.") + "<|im_end|>"
    assert renderer().decode(report["generation"]["prompt"]) == report["prompt"]
    assert (report["uses"], report["eviction"], report["unreadable"]) == ([], None, None)


def test_show_prints_the_reason_of_an_eviction(bank_run: Path):
    assert (
        lines("show", bank_run, "run/0/0/0#1")[0]
        == "run/0/0/0#1, version 1, evicted after step 2 to free space for run/2/0/0"
    )


def test_a_uid_may_be_shortened_at_both_ends(bank_run: Path):
    whole = lines("show", bank_run, "run/0/1/0#0")
    for name in ("0/1/0#0", "0/1", "run/0/1", "run/0/1/0#0@1"):
        assert lines("show", bank_run, name) == whole
    assert "the uids of 2 experiences start with it: '2/0/0#0, 2/0/0#1'." in error_line(
        "show", bank_run, "2/0"
    )
    assert "uid = 'nope': no experience of this bank has this uid" in error_line(
        "show", bank_run, "nope"
    )
    assert "no experience of this bank" in error_line("show", bank_run, "")


def test_uids_are_not_shortened_if_two_differ_only_in_their_run():
    uids = ["run/0/0/0#0", "run1a/0/0/0#0", "run1a/0/0/1#0", "odd"]
    assert short_uids(uids) == {uid: uid for uid in uids}
    assert short_uids(uids[1:]) == {
        "run1a/0/0/0#0": "0/0/0#0",
        "run1a/0/0/1#0": "0/0/1#0",
        "odd": "odd",
    }


def test_uids_that_look_like_versions_and_differ_in_case(tmp_path: Path):
    """Check uids that lessons written by hand may have."""
    parents = {"a": [], "a@1": ["a@1"], "A": [], "a@1@2": ["a@1@1"], "ab": ["A@1"]}
    exported_lines = [
        {"task": "room", "goal": "Get out.", "text": f"Of {uid}.", "uid": uid, "parents": of}
        for uid, of in parents.items()
    ]
    (tmp_path / "mine.jsonl").write_text(
        "\n".join(map(json.dumps, [{"crl_bank": 2}, *exported_lines]))
    )
    lines("import", new := tmp_path / "new.sqlite", tmp_path / "mine.jsonl")
    found = {uid: parsed("show", new, uid) for uid in parents}
    assert {uid: report["entry"]["uid"] for uid, report in found.items()} == {
        uid: uid for uid in parents
    }
    offspring = {
        uid: [version["uid"] for version in report["offspring"]] for uid, report in found.items()
    }
    assert offspring == {"a": ["a@1"], "a@1": ["a@1@2"], "A": ["ab"], "a@1@2": [], "ab": []}
    assert [parsed("show", new, name)["entry"]["uid"] for name in ("A@1", "a@1@1", "a@1@2@1")] == [
        "A",
        "a@1",
        "a@1@2",
    ]


def test_a_long_lineage_shows_the_newest_and_reads_the_log_once(tmp_path: Path):
    """Check a lineage in which each experience derives from the previous and from the first one."""
    parents = {
        f"e{i:02}": [f"e{before:02}@1" for before in {0, i - 1} if 0 <= before < i]
        for i in range(12)
    }
    exported_lines = [
        {"task": "room", "goal": "Get out.", "text": f"Of {uid}.", "uid": uid, "parents": of}
        for uid, of in parents.items()
    ]
    (tmp_path / "mine.jsonl").write_text(
        "\n".join(map(json.dumps, [{"crl_bank": 2}, *exported_lines]))
    )
    lines("import", new := tmp_path / "new.sqlite", tmp_path / "mine.jsonl")

    def uids_under(title: str, shown: list[str]) -> list[str]:
        first = shown.index(title) + 2
        return [line.split()[2] for line in shown[first : shown.index("", first)]]

    last = lines("show", new, "e11")
    assert uids_under("lineage, newest first (the first 10 of 12)", last) == [
        f"e{i:02}@1" for i in range(11, 1, -1)
    ]
    assert "derived versions" not in last
    first = lines("show", new, "e00")
    assert uids_under("lineage, newest first", first) == ["e00@1"]
    assert uids_under("derived versions (the last 10 of 11)", first) == [
        f"e{i:02}@1" for i in range(2, 12)
    ]
    assert len(parsed("show", new, "e11")["lineage"]) == 12
    with open_reader(new) as view:
        view._db.set_trace_callback((statements := []).append)
        assert len(view.lineage(UnitKey("e11", 1))) == 12
    assert len(statements) == 1


def write_refine(question: Question, found: Hit) -> list[Segment]:
    return [Segment("user", f"refine\n{question.query}\n{found.text}", "task")]


async def play_with_questions(folder: Path, *answers: str, text: str = "Go west.") -> None:
    """Distil an episode. Then win an episode that asks one question per answer."""
    completions = iter([add(text), *answers])
    prompts = replace(PROMPTS, refine=write_refine)
    manager = await open_bank(
        folder / "bank.sqlite",
        engine=ScriptedEngine(renderer(), lambda _: next(completions)),
        prompts=prompts,
    )
    await manager.submit(request())
    await manager.drain()
    manager.advance(1)
    found = hit("run/0/0/0#0", text=text)
    names = [f"run/train/1/4/0/{number}" for number, _ in enumerate(answers, start=1)]
    hits = [await manager.refine(Question(name, task(), "Where to?", ()), found) for name in names]
    await manager.credit([found.use for found in hits], True, episode="run/1/4/0")
    await manager.aclose()
    dump(load(["room"], sets=["extractor.model=tiny-actor"]), folder / "config.json")


REFINED, KEPT = '[{"op": "refine", "text": "Two rooms west."}]', '[{"op": "return"}]'

SHOW_ANSWER = """\
run/train/1/4/0/1, answer to a question after step 1
source  0/0/0#0@1
text
  Two rooms west.

guided episode
  step  episode    version  reward
     2  run/1/4/0        1      +1

written by run/train/1/4/0/1: model version 0, 30 tokens, finish reason stop
never trained on
prompt
  <|im_start|>user
  refine
  Where to?
  Go west.<|im_end|>
  <|im_start|>assistant

answer
  [{"op": "refine", "text": "Two rooms west."}]<|im_end|>"""


def test_answers_are_decoded_with_the_tokenizer_of_the_model_that_wrote_them(tmp_path: Path):
    asyncio.run(play_with_questions(tmp_path, REFINED, KEPT))
    dump(load(["room"], options={"method": "empo2"}), tmp_path / "config.json")
    output = bank("show", tmp_path, "run/train/1/4/0/1").stdout
    assert "  Go west.<|im_end|>" in output


def test_an_answer_to_a_question_is_shown_by_its_generation(tmp_path: Path):
    asyncio.run(play_with_questions(tmp_path, REFINED, KEPT))
    assert lines("show", tmp_path, "run/train/1/4/0/1") == SHOW_ANSWER.splitlines()
    shown = lines("show", tmp_path, "0/0/0#0")
    first = shown.index("answered questions")
    assert shown[first + 1 : first + 4] == [
        "  after step  answer             version  text",
        "           1  run/train/1/4/0/1        1  Two rooms west.",
        "           1  run/train/1/4/0/2        1  (unchanged)",
    ]
    assert lines("show", tmp_path, "run/train/1/4/0/2")[:4] == [
        "run/train/1/4/0/2, answer to a question after step 1",
        "source  0/0/0#0@1",
        "The agent received the retrieved experience unchanged.",
        "",
    ]
    report = parsed("show", tmp_path, "run/train/1/4/0/1")
    refined = {
        "id": "run/train/1/4/0/1",
        "step": 1,
        "uid": "run/0/0/0#0",
        "version": 1,
        "text": "Two rooms west.",
    }
    assert (report["refinement"], report["answer"]) == (refined, f"{REFINED}<|im_end|>")
    assert [use["reward"] for use in report["uses"]] == [1.0]
    report = parsed("show", tmp_path, "0/0/0#0")
    assert report["refinements"] == [refined, {**refined, "id": "run/train/1/4/0/2", "text": None}]
    assert "no experience of this bank" in error_line("show", tmp_path, "run/train/1/4/0/3")


def test_only_the_last_questions_are_listed(tmp_path: Path):
    asyncio.run(play_with_questions(tmp_path, *[REFINED] * 11))
    shown = lines("show", tmp_path, "0/0/0#0")
    first = shown.index("answered questions (the last 10 of 11)")
    assert shown[first + 2].split()[1] == "run/train/1/4/0/2"
    assert len(parsed("show", tmp_path, "0/0/0#0")["refinements"]) == 11


def test_show_works_without_the_extractors_tokenizer(bank_run: Path, bank_copy: Path):
    shown = lines("show", bank_copy, "0/0/0#0")
    assert shown[:-1] == lines("show", bank_run, "0/0/0#0")[: len(shown) - 1]
    assert shown[-1].startswith("The answer cannot be decoded: run = ")
    assert "contains no config.json" in shown[-1]


def test_a_long_history_is_divided_into_few_periods():
    """Check the periods of a history of 20 steps with two episodes each.

    The episodes of steps 10 to 19 are won. A period has ⌈20 / 8⌉ = 3 steps. The lifts of steps 9 to
    11 are 0, 1/2 and 1: half = 3.182446 · √(1 + 1/2) / 3 = 1.299228. Step 19 has one lift: half =
    12.706205.
    """
    uses = [
        UseView(step, f"run/{step}/0/{member}", 1, 1.0 if step >= 10 else -1.0)
        for step in range(20)
        for member in range(2)
    ]
    lifts = [LiftView(step, f"run/{step}/0", 1, (step - 9) / 2, 0.0) for step in (9, 10, 11)] + [
        LiftView(19, "run/19/0", 1, 0.25, 1.0)
    ]
    assert history(uses, lifts) == [
        "when                         lift  won",
        "steps 1–3                       –  0/6",
        "steps 4–6                       –  0/6",
        "steps 7–9                       –  0/6",
        "steps 10–12  +0.50 [-0.80, +1.00]  4/6",
        "steps 13–15                     –  6/6",
        "steps 16–18                     –  6/6",
        "steps 19–20  -0.75 [-1.00, +1.00]  4/4",
    ]
    assert history(uses[:2]) == ["when    lift  won", "step 1     –  0/2"]
    assert history([]) == []


# ── search ────────────────────────────────────────────────────────────────────────────────────────


def test_search_finds_what_retrieval_finds(bank_run: Path, bank_copy: Path):
    async def nearest(query: str, name: str) -> str:
        manager = await open_bank(bank_copy)
        (found,) = await manager.search([search(query, name=name)], counted=False)
        await manager.aclose()
        assert found is not None
        return found.use.uid

    for query, name in ((GOAL + " Go southwest.", "room"), ("left wall", "maze")):
        rows = parsed("search", bank_run, query, "--task", name)
        assert rows[0]["uid"] == asyncio.run(nearest(query, name))
        assert [row["similarity"] for row in rows] == sorted(
            (row["similarity"] for row in rows), reverse=True
        )
    goal, text = asyncio.run(HashEmbedder().embed([HALL.goal, "Follow the left wall."]))
    s = goal @ text
    cosine = (1 + 0.1 * s) / math.sqrt(
        1 + 0.2 * s + 0.01
    )  # cosine of g and g + w·t, with w = 0.1 and s = g·t
    assert lines("search", bank_run, HALL.goal, "--limit", "1") == [
        "cosine  uid      lift  won  retrieved  step  goal                  text",
        (
            f" {cosine:.3f}  0/1/0#0     –    –          0     0  "
            "Leave the long hall.  Follow the left wall."
        ),
    ]


def test_search_compares_texts_if_the_bank_has_no_vectors(bank_run: Path, tmp_path: Path):
    new = export_and_import(bank_run, tmp_path)
    (row,) = parsed("search", new, "Follow the left wall.", "--limit", "1")
    assert row["uid"] == "run/0/1/0#0"
    assert row["similarity"] == pytest.approx(1.0)


def test_search_refuses_vectors_of_another_embedder(bank_copy: Path):
    with closing(sqlite3.connect(bank_copy)) as db, db:
        db.execute("UPDATE facts SET value = 'qwen: goal + 0.1 text'")
    assert "embedder = 'qwen: goal + 0.1 text'" in error_line("search", bank_copy, "west")


# ── stats, queue, dead ────────────────────────────────────────────────────────────────────────────


def test_stats(bank_run: Path):
    assert lines("stats", bank_run)[1:] == STATS.splitlines()
    metrics = parsed("stats", bank_run)
    assert metrics["entries"] == {
        "maze": {"active": 1, "evicted": 0, "merged": 0, "goals": 1},
        "room": {"active": 4, "evicted": 1, "merged": 0, "goals": 1},
    }
    assert metrics["lift"] == {"above": 0, "below": 0, "around": 1, "unknown": 4}
    assert (metrics["won"], metrics["used"]) == (
        [0, 0, 0, 0, 1],
        {"active": 5, "retrieved": 1, "credited": 1, "voted": 0},
    )
    assert metrics["bytes"] == (bank_run / "bank.sqlite").stat().st_size


async def test_the_size_of_an_open_bank_includes_its_log(tmp_path: Path):
    manager = await open_bank(path := tmp_path / "bank.sqlite")
    await manager.submit(request())
    sizes = [file.stat().st_size for file in (path, tmp_path / "bank.sqlite-wal")]
    assert parsed("stats", path)["bytes"] == sum(sizes) > sizes[0]
    await manager.aclose()


@pytest.mark.parametrize("version", ["0", "3", "9" * 5000])
def test_a_version_that_was_never_written_is_an_error(bank_run: Path, version: str):
    assert lines("show", bank_run, "0/0/0#0@1") == lines("show", bank_run, "0/0/0#0@2")
    assert "the newest version of this experience is 2. Omit the version." in error_line(
        "show", bank_run, f"0/0/0#0@{version}"
    )


def test_entries_created_and_discarded_by_a_merge(tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    merge_answer = (
        '[{"op": "merge", "targets": [1, 2], "text": "Go west or south."}, '
        '{"op": "discard", "target": 3}]'
    )
    distil_answer = add("Go west.", "Go south.", "Be careful.")

    async def write() -> None:
        manager = await open_bank(
            path,
            engine=ScriptedEngine(
                renderer(),
                lambda prompt: merge_answer if "user\nmerge\n" in prompt else distil_answer,
            ),
        )
        await manager.submit(request())
        await manager.drain()
        manager.advance(5)
        await manager.merge()
        await manager.aclose()

    asyncio.run(write())
    (uid,) = uids(path)
    assert uid.startswith("merge/0-")
    assert [(v["kind"], v["step"]) for v in parsed("show", path, uid)["lineage"]] == [
        ("merge", 5),
        ("add", 0),
        ("add", 0),
    ]
    source = parsed("show", path, "run/0/0/0#0")
    assert (
        source["entry"]["status"],
        [v["uid"] for v in source["offspring"]],
        source["eviction"],
    ) == ("merged", [uid], None)
    name = uid.removesuffix("#0")
    assert (
        lines("show", path, "run/0/0/0#2")[0]
        == f"run/0/0/0#2, version 1, evicted after step 5 by {name}"
    )
    assert parsed("stats", path)["ops"].items() >= {"chunk": 1, "merge": 1, "discard": 1}.items()
    new = tmp_path / "new.sqlite"
    (tmp_path / "lessons.jsonl").write_text(bank("export", path).stdout, "utf-8")
    lines("import", new, tmp_path / "lessons.jsonl")
    assert uids(new) == [uid]


def test_queue_and_dead(bank_run: Path):
    assert lines("queue", bank_run) == [
        "episode    state    outcome  guided by  task  goal",
        "run/2/1/0  pending  lost     0/1/0#0    maze  Leave the long hall.",
    ]
    assert lines("dead", bank_run) == [
        "episode    outcome  task  goal                                reason",
        (
            "run/0/0/3  won      room  Find the exit of the azure cellar.  "
            "engine: the prompt is too long"
        ),
    ]
    (waiting,) = parsed("queue", bank_run)
    assert (waiting["id"], waiting["guided"], waiting["reason"]) == (
        "run/2/1/0",
        ["run/0/1/0#0"],
        None,
    )
    assert parsed("dead", bank_run)[0]["reason"] == "engine: the prompt is too long"


# ── diff ──────────────────────────────────────────────────────────────────────────────────────────


def test_diff(bank_run: Path, bank_copy: Path):
    asyncio.run(diverge(bank_copy))
    assert lines("diff", bank_run, bank_copy) == DIFF.format(a=bank_run, b=bank_copy).splitlines()
    found = parsed("diff", bank_copy, bank_run)
    assert [lesson["text"] for lesson in found["only_a"]] == ["Go back."]
    assert [lesson["won"] for lesson in found["both"][0]] == [1, 1]
    same = lines("diff", bank_run, bank_run)
    assert same[2] == "only in A 0, only in B 0, in both 5"


# ── a bank that started with entries of another run ───────────────────────────────────────────────


def test_a_diff_names_the_damaged_bank(bank_run: Path, bank_copy: Path):
    with closing(sqlite3.connect(bank_copy)) as db, db:
        db.execute("UPDATE entries SET text = CAST(x'ff' AS TEXT)")
    for command in (["diff", bank_run, bank_copy], ["diff", bank_copy, bank_run]):
        assert error_line(*command, code=1).startswith(f"error: {bank_copy}: ")


def test_a_diff_as_json_has_the_same_limit(bank_run: Path, bank_copy: Path):
    asyncio.run(diverge(bank_copy))
    result = bank("diff", bank_run, bank_copy, "--limit", "1", "--json")
    assert {name: len(part) for name, part in json.loads(result.stdout).items()} == {
        "only_a": 1,
        "only_b": 1,
        "both": 1,
    }
    assert result.stderr == "showing 3 of 6; use --limit 0 for all\n"
    assert len(parsed("diff", bank_run, bank_copy, "--limit", "0")["both"]) == 4


def test_steps_of_earlier_runs_are_not_shown_as_steps_of_this_run(bank_run: Path, tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    asyncio.run(play_second_run(bank_run / "bank.sqlite", path))
    assert {entry["uid"]: entry["step"] for entry in parsed("ls", path)} == dict.fromkeys(
        uids(bank_run)
    ) | {"again/1/0/0#0": 1}
    assert lines("ls", path, "--task", "maze") == [
        "uid      lift  won  retrieved  step  goal                  text",
        "1/0/0#0     –    –          0     1  Leave the long hall.  Follow the left wall.",
        "0/1/0#0     –    –          0     –  Leave the long hall.  Follow the left wall.",
    ]
    shown = lines("show", path, "0/0/0#0")
    assert shown[6] == "retrieved twice, last after step 1"
    assert shown[12:14] == [
        "           –  update  0/0/0#0@2  run/1/0/0  Go southwest.",
        "           –  add     0/0/0#0@1  run/0/0/0  Go west.",
    ]
    first = shown.index("lift and credit over time (of all versions)")
    assert shown[first + 2 : first + 4] == [
        "  earlier runs  +0.38 [-1.00, +1.00]  2/3",
        "  step 2                           –  0/1",
    ]
    assert "     –  run/1/0/1          1      -1" in shown
    assert (
        lines("show", path, "0/0/0#1")[0]
        == "run/0/0/0#1, version 1, evicted in an earlier run to free space for run/2/0/0"
    )


def test_an_entry_that_was_only_retrieved_in_an_earlier_run(bank_run: Path, tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    asyncio.run(ExperienceManager.start_from(bank_run / "bank.sqlite", path))
    assert "retrieved once, last in an earlier run" in lines("show", path, "0/0/0#0")


def test_operations_of_earlier_runs_are_counted_separately(bank_run: Path, tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    asyncio.run(play_second_run(bank_run / "bank.sqlite", path))
    earlier, now = parsed("stats", bank_run), parsed("stats", path)
    assert (now["ops"], now["dropped"]) == ({"add": 1, "credit": 1, "retrieve": 1, "submit": 1}, {})
    assert (now["log"], now["step"], now["earlier"]) == (4, 1, earlier["log"])
    assert (earlier["step"], earlier["earlier"]) == (2, 0)
    assert lines("stats", path)[0].endswith(
        f"MiB, 4 operations, last after step 1, and {earlier['log']} in earlier runs"
    )
    asyncio.run(ExperienceManager.start_from(path, tmp_path / "third.sqlite"))
    assert lines("stats", tmp_path / "third.sqlite")[0].endswith(
        f"MiB, 0 operations, and {earlier['log'] + 4} in earlier runs"
    )


# ── while a run writes ────────────────────────────────────────────────────────────────────────────


async def test_a_bank_in_use_can_be_read_without_disturbing_the_run(tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    manager = await open_bank(path)
    writing = asyncio.create_task(keep_writing(manager))
    seen = []
    for _ in range(3):
        seen.append(
            len(await asyncio.to_thread(parsed, "ls", path, "--status", "all", "--limit", "0"))
        )
        for command in (
            ["stats", path],
            ["queue", path],
            ["dead", path],
            ["search", path, "west"],
            ["diff", path, path],
        ):
            await asyncio.to_thread(parsed, *command)
        assert not writing.done()
    assert seen == sorted(seen)
    for command in (["prune", path, "--max-entries", "1", "--yes"], ["dead", path, "--retry"]):
        assert (
            "is writing to the bank. End that process first, or use a copy of the bank."
            in await asyncio.to_thread(error_line, *command, code=1)
        )
    assert not writing.done()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    written = (await manager.stats())["queue/done"]
    await manager.aclose()
    assert written > 0
    assert (await asyncio.to_thread(parsed, "stats", path))["queue"]["done"] == written
    await asyncio.to_thread(lines, "prune", path, "--max-entries", "1", "--yes")


async def keep_writing(manager: ExperienceManager) -> None:
    step = 0
    while True:
        await manager.submit(request(step, note="west"))
        await manager.drain()
        step += 1


async def test_a_reader_sees_one_state(tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    manager = await open_bank(path)
    with open_reader(path) as view:
        assert view.entries() == []
        await manager.submit(request(note="west"))
        await manager.drain()
        assert view.entries() == []
        assert view.queue()["done"] == 0
    with open_reader(path) as view:
        assert len(view.entries()) == 2
    await manager.aclose()


async def test_a_reader_keeps_its_state_while_writers_open_and_close_the_bank(
    bank_copy: Path, tmp_path: Path
):
    with open_reader(bank_copy) as view:
        entries, requests = view.entries(None), view.queue()
    with open_reader(bank_copy) as view:
        assert view.queue() == requests
        manager = await open_bank(bank_copy)
        for step in range(40):
            await manager.submit(request(9, step, note="west"))
        await manager.drain()
        await manager.aclose()
        assert (view.entries(None), view.queue()) == (entries, requests)
        assert [view.lineage(entry.unit)[0].text for entry in entries] == [
            entry.text for entry in entries
        ]
    with open_reader(bank_copy) as view:
        assert view.queue()["done"] == requests["done"] + requests["pending"] + 40
    assert not list(await asyncio.to_thread(tmp_path.glob, "*-*")), "no log"


def test_reading_changes_no_files(bank_run: Path):
    before = {path.name: path.stat().st_mtime_ns for path in bank_run.iterdir()}
    for command in (
        ["ls", bank_run],
        ["show", bank_run, "0/0/0#0"],
        ["stats", bank_run],
        ["export", bank_run],
        ["search", bank_run, "west"],
    ):
        lines(*command)
    assert {path.name: path.stat().st_mtime_ns for path in bank_run.iterdir()} == before


def test_a_bank_of_version_1_can_be_read_and_is_upgraded_by_a_change(tmp_path: Path):
    path = bank_of_version_1(tmp_path / "bank.sqlite")
    before = path.read_bytes()
    written = ["run/0/0/2#0", "run/0/0/0#0", "run/0/0/0#2", "run/0/0/0#1"]
    assert uids(path, "--status", "all", "--sort", "age") == written
    assert parsed("stats", path)["queue"] == {"pending": 1, "leased": 1, "done": 4, "dead": 1}
    assert [v["version"] for v in parsed("show", path, "run/0/0/0#0")["lineage"]] == [2, 1]
    for command in (["queue", path], ["dead", path], ["diff", path, path]):
        parsed(*command)
    assert len(lines("export", path)) == 1 + 3
    assert path.read_bytes() == before
    assert lines("dead", path, "--retry") == [
        "queued 1 dead episode again; it waits until the run continues"
    ]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    assert uids(path, "--status", "all", "--sort", "age") == written
    assert parsed("stats", path)["queue"] == {"pending": 3, "leased": 0, "done": 4, "dead": 0}


# ── hostile texts ─────────────────────────────────────────────────────────────────────────────────

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J \x9b31m \u202eevil\u2066 \x7f\x08\r[bold red]markup[/] :skull: "
    "a\tb\nsecond line"
)


def test_control_characters_of_an_answer_are_escaped(tmp_path: Path):
    asyncio.run(play_with_questions(tmp_path, json.dumps([{"op": "refine", "text": HOSTILE}])))
    for name in ("run/train/1/4/0/1", "0/0/0#0"):
        for options in ([], ["--json"]):
            output = bank("show", tmp_path, name, *options).output
            assert "evil" in output
            assert [c for c in output if not c.isprintable() and c != "\n"] == [], name
    assert parsed("show", tmp_path, "run/train/1/4/0/1")["refinement"]["text"] == HOSTILE.strip()


def test_control_characters_of_texts_are_escaped(tmp_path: Path):
    async def write() -> None:
        manager = await open_bank(
            tmp_path / "bank.sqlite", engine=ScriptedEngine(renderer(), lambda prompt: add(HOSTILE))
        )
        await manager.submit(request(of=task(f"ro{HOSTILE}om", f"Go{HOSTILE}.")))
        await manager.drain()
        await manager.submit(request(1, of=task("room", HOSTILE), shown=(hit("run/0/0/0#0"),)))
        await manager.aclose()

    asyncio.run(write())
    dump(load(["room"], sets=["extractor.model=tiny-actor"]), tmp_path / "config.json")
    (entry,) = parsed("ls", tmp_path)
    assert entry["text"] == HOSTILE.strip()
    uid = entry["uid"]
    new = tmp_path / "b.sqlite"
    (tmp_path / "lessons.jsonl").write_text(bank("export", tmp_path).stdout, "utf-8")
    lines("import", new, tmp_path / "lessons.jsonl")
    assert parsed("ls", new)[0]["text"] == HOSTILE.strip()
    commands = [[name, tmp_path] for name in ("ls", "stats", "queue", "dead", "export")]
    commands += [
        ["show", tmp_path, uid],
        ["search", tmp_path, "evil"],
        ["diff", tmp_path, new],
        ["show", tmp_path, HOSTILE],
        ["ls", HOSTILE],
    ]
    for command in commands:
        for options in ([], ["--json"]) if command[0] != "export" else ([],):
            output = bank(*command, *options).output
            assert [c for c in output if not c.isprintable() and c != "\n"] == [], command
    row = lines("ls", tmp_path)[1]
    assert (
        r"\x1b]0;owned\x07\x1b[2J \x9b31m \u202eevil\u2066 \x7f\x08 [bold red]markup[/] "
        r":skull: a b second line"
    ) in row
    shown = lines("show", tmp_path, uid)
    assert "  second line" in shown, "a text of several lines is shown as one"


# ── files that are not banks ──────────────────────────────────────────────────────────────────────


def test_each_error_is_one_line(bank_copy: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("Once upon a time. " * 99)
    for name, reason in (
        ("none", "no such file"),
        ("empty", "no such file"),
        ("text", "not a bank of crl"),
    ):
        for command in (
            ["ls"],
            ["stats"],
            ["export"],
            ["prune", "--max-entries", "1"],
            ["dead", "--retry"],
        ):
            assert reason in error_line(command[0], tmp_path / name, *command[1:])
    assert not (tmp_path / "none").exists()
    with closing(sqlite3.connect(bank_copy)) as db:
        db.execute("PRAGMA user_version = 99")
    assert "its schema version 99 is newer than this crl's" in error_line("ls", bank_copy)


def test_arguments_that_are_not_unicode(bank_run: Path, tmp_path: Path):
    assert r"uid = 'a\udcff': is not valid Unicode. Give it in UTF-8." in error_line(
        "show", bank_run, "a\udcff"
    )
    assert r"text = '\udcff': is not valid Unicode. Give it in UTF-8." in error_line(
        "search", bank_run, "\udcff"
    )
    path = tmp_path / "x\udcff.sqlite"
    path.write_bytes((bank_run / "bank.sqlite").read_bytes())
    assert parsed("stats", path)["bank"] == str(path)


def test_a_damaged_page_is_reported_on_one_line(bank_copy: Path):
    whole = bank_copy.read_bytes()
    bank_copy.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    assert "The file is damaged: restore a copy" in error_line("ls", bank_copy, code=1)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_a_truncated_bank_is_damaged(bank_copy: Path, share: float):
    whole = bank_copy.read_bytes()
    bank_copy.write_bytes(whole[: int(share * len(whole))])
    whole_copy = (
        "Restore a copy (first delete the -wal and -shm files next to it; they are not part "
        "of the copy)"
    )
    assert (
        f"the file is damaged (database disk image is malformed). {whole_copy}, "
        "or give a run directory"
    ) in error_line("ls", bank_copy)


def test_without_torch(bank_run: Path):
    code = (
        "import sys\nfrom crl.cli.main import main\ntry: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'nle'} & set(sys.modules)), "
        "file=sys.stderr)"
    )
    for command in (["show", bank_run, "0/0/0#0"], ["search", bank_run, "west"], ["ls", bank_run]):
        result = subprocess.run(
            [sys.executable, "-c", code, "bank", *map(str, command)], capture_output=True, text=True
        )
        assert (result.returncode, result.stderr) == (0, "[]\n")
