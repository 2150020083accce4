"""Shards of episodes: what is written is read again, and damage is found."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crl.errors import ConfigError
from crl.monitor.run_dir import RunDir
from crl.records import position
from crl.records.reader import read_episode_records, read_episodes
from crl.records.shards import COLUMNS, FIELDS, SLICE, episode_record, shards, write_shard
from crl.records.writer import EpisodeWriter
from crl.types import ExperienceUse, Segment, Task, TokenTrace, Trajectory
from support.kept_sets import kept_set
from support.trajectories import build_trajectory

TASK = Task("room", 7, "train", "find the exit", {"lgen": 3, "name": "é"})


def trajectory(*traces: TokenTrace, step: int = 2, **fields) -> Trajectory:
    return build_trajectory(TASK, step=step, group=5, member=1, traces=traces, **fields)


def guided() -> Trajectory:
    trace = TokenTrace((5, 6, 7), (0, 0, 1), (0.0, 0.0, -0.5), (-1, -1, 4))
    return trajectory(
        trace,
        condition="guided",
        segments=(Segment("user", "at 2 3 é", "env"), Segment("user", "Go.", "experience")),
        used=(ExperienceUse("e1", 2, "g9", "start"),),
        shown=("Go west.",),
        rejected=(ExperienceUse("e2", 1, "g8", "start", "reject"),),
        rewards={"outcome": 1.0, "turns": -0.25},
        success=True,
        score=0.5,
        turn_rewards=(0.0, 0.1),
        overtime_turns=2,
        invalid_actions=1,
        sampled_tokens=9,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def test_an_episode_has_exactly_the_documented_fields(run: RunDir):
    write_shard(run.episodes, 3, [guided()])
    with gzip.open(run.episodes / "000003.jsonl.gz", "rt", encoding="utf-8") as file:
        (line,) = map(json.loads, file)
    assert line == {
        "step": 3,
        "group": 5,
        "member": 1,
        "condition": "guided",
        "task": "room",
        "goal": "find the exit",
        "seed": 7,
        "split": "train",
        "params": {"lgen": 3, "name": "é"},
        "success": True,
        "score": 0.5,
        "reward": 0.75,
        "rewards": {"outcome": 1.0, "turns": -0.25},
        "turns": 2,
        "turn_rewards": [0.0, 0.1],
        "overtime_turns": 2,
        "invalid_actions": 1,
        "sampled_tokens": 9,
        "truncated": False,
        "error": None,
        "segments": [
            {"role": "user", "origin": "env", "text": "at 2 3 é"},
            {"role": "user", "origin": "experience", "text": "Go."},
        ],
        "used": [{"uid": "e1", "version": 2, "generation": "g9", "how": "start", "verdict": None}],
        "shown": ["Go west."],
        "rejected": [
            {"uid": "e2", "version": 1, "generation": "g8", "how": "start", "verdict": "reject"}
        ],
        "tokens": [3],
    }
    assert line.keys() == FIELDS.keys()
    with np.load(run.episodes / "000003.npz") as columns:
        assert {name: columns[name].dtype for name in columns} == dict(COLUMNS)
        assert columns["ids"].tolist() == [5, 6, 7]


def test_what_is_written_is_read_again(run: RunDir):
    n = 2 * SLICE + 3
    long = TokenTrace((9,) * n, (1,) * n, (-0.25,) * n, tuple(range(n)))
    second = TokenTrace((3,), (1,), (-2.0,), (0,))
    written = [guided(), trajectory(long, second), trajectory(error="env: it died")]
    write_shard(run.episodes, 3, written)
    write_shard(run.episodes, 12, [trajectory(second, step=11)])
    assert list(read_episodes(run.path)) == [*written, trajectory(second, step=11)]
    assert list(read_episodes(run.path, [12])) == [trajectory(second, step=11)]
    assert list(read_episode_records(run.path, range(1, 4))) == list(map(episode_record, written))


def test_kept_sets_are_read_again(run: RunDir):
    trace = TokenTrace((5, 6, 7), (0, 1, 1), (0.0, -0.5, 0.0), (-1, 4, 4))
    truncated = replace(trace, kept=(b"", kept_set(6, 9), kept_set(7)))
    written = [trajectory(truncated, trace), trajectory(trace, truncated)]
    write_shard(run.episodes, 3, written)
    assert list(read_episodes(run.path)) == written
    with np.load(run.episodes / "000003.npz") as columns:
        assert columns["kept_counts"].tolist() == [0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 2, 1]
        assert columns["kept"].tolist() == [6, 9, 7, 6, 9, 7]


def test_log_probs_have_the_precision_of_float32(run: RunDir):
    value = -1 / 3
    write_shard(run.episodes, 3, [trajectory(TokenTrace((1,), (1,), (value,), (0,)))])
    ((read,),) = ([t.traces[0].logprobs for t in read_episodes(run.path)],)
    assert read == (float(np.float32(value)),) != (value,)


def test_texts_and_rewards_that_json_does_not_have(run: RunDir):
    odd = trajectory(
        segments=(Segment("user", "half \ud83d, \x1b[31m, \0", "env"),),
        turn_rewards=(math.nan,),
    )
    write_shard(run.episodes, 3, [odd])
    (read,) = read_episodes(run.path)
    assert read.segments == odd.segments
    assert math.isnan(read.turn_rewards[0])


def test_equal_episodes_give_equal_files(tmp_path: Path):
    for name in "ab":
        write_shard(tmp_path / name, 3, [guided()])
    files = [sorted((tmp_path / name).iterdir()) for name in "ab"]
    assert [p.name for p in files[0]] == ["000003.jsonl.gz", "000003.npz"]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]


def test_a_shard_that_is_not_complete_does_not_exist(run: RunDir, monkeypatch):
    write_shard(run.episodes, 1, [guided()])
    with monkeypatch.context() as patch:
        patch.setattr("crl.records.shards._write_texts", fail)
        with pytest.raises(OSError, match="No space left"):
            write_shard(run.episodes, 2, [guided()])
    assert list(shards(run.episodes)) == [1]
    assert not list(run.episodes.glob(".*")), "no partial file is left"
    (run.episodes / ".000002.jsonl.gz.part").write_bytes(b"x")  # of a killed process
    assert list(read_episodes(run.path)) == [guided()]


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["000003.jsonl.gz", "000003.npz"])
@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_damaged_files_are_named(run: RunDir, name: str, damage: str):
    write_shard(run.episodes, 3, [guided()] * 50)
    path = run.episodes / name
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + b"\xff\xff\xff\xff" + content[middle + 4 :])
    with pytest.raises(ConfigError, match=name):
        list(read_episodes(run.path))


@pytest.mark.parametrize(
    "change",
    [
        *({name: ...} for name in FIELDS),
        {"success": None},
        {"reward": "high"},
        {"rewards": {"outcome": "high"}},
        {"split": "other"},
        {"segments": [{}]},
        {"segments": [{"role": "user", "origin": "env", "text": 1}]},
        {"used": [{"uid": "e1"}]},
        {"shown": [1]},
        {"tokens": [1.5]},
        {"turn_rewards": ["high"]},
        {"rewards": {"outcome": 10**400}},
    ],
)
def test_wrong_fields_are_damage(run: RunDir, change: dict[str, Any]):
    """... stands for a missing field."""
    write_shard(run.episodes, 3, [guided()])
    record = {k: v for k, v in (episode_record(guided()) | change).items() if v is not ...}
    path = run.episodes / "000003.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    for read in (read_episodes, read_episode_records):
        with pytest.raises(ConfigError, match=rf"episodes = .*{path.name}': cannot be read"):
            list(read(run.path))


def test_deep_nesting_is_damage(run: RunDir):
    write_shard(run.episodes, 3, [guided()])
    (run.episodes / "000003.jsonl.gz").write_bytes(gzip.compress(b"[" * 100_000))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_episode_records(run.path))


def test_a_missing_file_of_tokens_is_named(run: RunDir):
    write_shard(run.episodes, 3, [guided()])
    (run.episodes / "000003.npz").unlink()
    with pytest.raises(ConfigError, match=r"000003\.npz': cannot be read"):
        list(read_episodes(run.path))
    assert list(read_episode_records(run.path)) == [episode_record(guided())]


def test_steps_without_episodes_are_refused(run: RunDir):
    with pytest.raises(ConfigError, match=r"run = .*: has no episodes"):
        list(read_episodes(run.path))
    write_shard(run.episodes, 3, [guided()])
    with pytest.raises(ConfigError, match=r"has no episodes of these steps.*steps 3 to 3"):
        list(read_episodes(run.path, [4]))


# ── the writer ────────────────────────────────────────────────────────────────────────────────────


async def test_the_writer_keeps_the_last_steps(run: RunDir):
    writer = EpisodeWriter(run.episodes, keep=2)
    for step in range(1, 6):
        await writer.write(step, [trajectory(step=step - 1)])
    await writer.aclose()
    assert [path.name for path in sorted(run.episodes.iterdir())] == [
        f"00000{step}{end}" for step in (4, 5) for end in (".jsonl.gz", ".npz")
    ]


async def test_the_event_loop_runs_while_episodes_are_written(run: RunDir, monkeypatch):
    """The write waits for the event loop. On the loop it would wait forever."""
    released = threading.Event()
    monkeypatch.setattr(
        "crl.records.shards._write_texts", lambda file, episodes: released.wait(30) or fail()
    )
    writer = EpisodeWriter(run.episodes)
    await writer.write(1, [guided()])
    flushed = asyncio.create_task(writer.flush())
    await asyncio.sleep(0.01)
    assert not flushed.done(), "a checkpoint waits until its episodes are on the disk"
    released.set()
    await flushed
    await writer.aclose()


async def test_an_error_of_the_writer_reaches_the_run(run: RunDir, monkeypatch):
    monkeypatch.setattr("crl.records.shards._write_texts", fail)
    writer = EpisodeWriter(run.episodes)
    await writer.write(1, [guided()])
    with pytest.raises(OSError, match="No space left"):
        await writer.write(2, [guided()])
    with pytest.raises(OSError, match="No space left"):
        await writer.aclose()


# ── what a resumed run takes back ─────────────────────────────────────────────────────────────────


def test_later_records_are_moved(run: RunDir, tmp_path: Path):
    run.metrics.write_text("1\n2\n")
    for step in (1, 2):
        write_shard(run.episodes, step, [trajectory(step=step - 1)])
    saved = position.position(run)
    with run.metrics.open("a") as file:
        file.write("3\n")
    write_shard(run.episodes, 3, [trajectory(step=2)])
    (run.episodes / ".000004.npz.part").write_bytes(b"x")
    position.discard(run, saved, 2, tmp_path / "discarded")
    assert run.metrics.read_text() == "1\n2\n"
    assert [t.address.step for t in read_episodes(run.path)] == [0, 1]
    assert (tmp_path / "discarded" / "metrics.jsonl").read_text() == "3\n"
    assert [t.address.step for t in read_episodes(tmp_path / "discarded")] == [2]
    assert {path.name for path in run.episodes.iterdir()} == {
        f"00000{step}{end}" for step in (1, 2) for end in (".jsonl.gz", ".npz")
    }
