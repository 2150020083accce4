"""Whole runs of Complementary RL in the room, in seconds: actor, extractor and bank together."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import pytest
import torch

from crl.cli.dashboard.follow import DashboardFollower
from crl.cli.dashboard.frame import PAGES
from crl.cli.dashboard.parts import TIME_PARTS
from crl.config import load
from crl.config.models import resolve_model
from crl.engines.torch import TorchEngine
from crl.manager.storage.database import SCHEMA_VERSION, Database
from crl.methods.parts.records import compact_record
from crl.modeling.loading import checksum, load_model, load_tokenizer, named_weights, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.monitor.plain import DURATION_METRICS, PlainMonitor
from crl.monitor.run_dir import RunDir
from crl.monitor.snapshot import Series, Snapshot
from crl.protocols import SearchRequest
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.run.assemble import open_training_loop
from crl.run.checkpoint import complete_steps
from crl.types import RolloutPlan, Segment, Task, TrackRecord, Trajectory
from support.complementary_runs import (
    SIZES,
    STEPS,
    address,
    dump,
    log,
    manifest,
    rows,
    train,
)
from support.whole_runs import (
    DETERMINISTIC,
    arguments,
    contents,
    crl,
    episode_files,
    episodes,
    equal_weights,
    lines,
    metrics,
    one_line,
    untimed,
)

NO_EVAL = ("tasks.room.eval.seen=0", "tasks.room.eval.unseen=0", "tasks.room.eval.online_places=0")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("deterministic") / "run"
    train(run, *DETERMINISTIC)
    return run


@pytest.fixture(scope="module")
def concurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with distillation and extractor training in the background.

    Rollouts are one step ahead.
    """
    run = tmp_path_factory.mktemp("background") / "run"
    # Step 4 begins when step 1 is distilled.
    train(run, "rollout.max_staleness=1", "bank.queue_size=16", steps=5)
    return run


@contextmanager
def fixed_outcomes(*, all_members: bool = False) -> Iterator[None]:
    """Decide the success of training episodes, so that the lessons have a value to learn from.

    Guided episodes succeed in every second group, regardless of their actions. All other episodes
    fail. With `all_members`, the unguided members of these groups succeed too, so the lessons have
    no value.
    """
    play = EpisodeRunner.play

    async def judged(
        runner: EpisodeRunner, key: EpisodeKey, task: Task, plan: RolloutPlan
    ) -> Trajectory:
        played = await play(runner, key, task, plan)
        succeeds = key.group % 2 == 0 and (all_members or plan.condition == "guided")
        if key.purpose != "train":
            return played
        return replace(played, outcome=replace(played.outcome, success=succeeds))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(EpisodeRunner, "play", judged)
        yield


def steps_of(run: Path) -> int:
    return len(metrics(run, "train"))


@pytest.fixture(params=["done", "concurrent"])
def either(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


# ── files of a run ────────────────────────────────────────────────────────────────────────────────


def test_files_and_metrics_of_a_run(either: Path) -> None:
    assert {path.name for path in either.iterdir()} == {
        "config.json", "metrics.jsonl", "episodes", "log.txt", "checkpoints",
        "bank.sqlite", "summary.json", ".lock",
    }  # fmt: skip
    kinds = Counter(line["kind"] for line in lines(either / "metrics.jsonl"))
    steps = kinds["train"]
    assert (steps, kinds["bank"], kinds["eval"], kinds["probe"]) == (
        steps,
        steps + 1,
        2,
        2 + steps // 2,
    ), "one more at the end of the run"
    saved = manifest(either, steps)
    assert (saved["step"], sorted(saved["models"])) == (steps, ["actor", "extractor"])
    ((seq,),) = rows(either / "bank.sqlite", "SELECT MAX(seq) FROM log")
    # After the checkpoint, only a search may have been counted.
    if saved["state"]["bank"] != seq:
        later_kinds = rows(
            either / "bank.sqlite",
            f"SELECT DISTINCT kind FROM log WHERE seq > {saved['state']['bank']}",
        )
        assert later_kinds == [("retrieve",)]
    assert "guided − free " in (either / "log.txt").read_text()
    (last,) = metrics(either, "bank")[-1:]
    experience = json.loads((either / "summary.json").read_text("utf-8"))["experience"]
    assert experience["gap"]["n"] > 0
    assert experience["probe_gains"].keys() == experience["online_gains"].keys() == {"room"}
    lessons = experience["lessons"]["room"]
    assert (lessons["answers"], lessons["untrained_answers"]) == (8, 8)
    assert experience["bank"] == {name: last[name] for name in experience["bank"]}


def test_the_bundled_models_work_together(either: Path) -> None:
    """Check that lessons are written and used. Otherwise a run would prove nothing."""
    last = metrics(either, "bank")[-1]
    assert last["ops/add"] > 20
    assert sum(bool(t["used"]) for t in episodes(either)) > 5


@pytest.mark.parametrize(
    "mode",
    [DETERMINISTIC, ("rollout.max_staleness=1", "bank.queue_size=16")],
    ids=["deterministic", "concurrent"],
)
def test_the_extractor_learns_from_the_value_of_its_lessons(
    mode: tuple[str, ...], tmp_path: Path
) -> None:
    run, steps = tmp_path / "run", 7
    with fixed_outcomes():
        train(run, *mode, "extractor.cooldown=0", "eval.probe_every=0", *NO_EVAL, steps=steps)
    trained = metrics(run, "extractor")
    assert trained[-1]["extractor/updates"] > 1
    assert trained[0]["extractor/reference_kl"] == pytest.approx(0, abs=1e-4), (
        "the KL to the initial model starts at 0"
    )
    assert trained[-1]["extractor/reference_kl"] > trained[0]["extractor/reference_kl"], "and grows"
    assert not any("actor/reference_kl" in line for line in metrics(run, "train")), "off by default"
    mismatch_kls = [
        line["extractor/mismatch_kl"] for line in trained[1:] if "extractor/mismatch_kl" in line
    ]
    assert mismatch_kls or mode is not DETERMINISTIC, (
        "measured on answers since the last sync, if there are any"
    )
    assert max(mismatch_kls, default=0.0) < 1e-5
    assert not equal_weights(
        run / f"checkpoints/{steps}/extractor", resolve_model("tiny-extractor")
    )


def test_lessons_without_value_do_not_train_the_extractor(
    tmp_path: Path,
) -> None:
    run, steps = tmp_path / "run", 5
    with fixed_outcomes(all_members=True):
        train(
            run,
            *DETERMINISTIC,
            "extractor.cooldown=0",
            "extractor.malformed_reward=0",
            "eval.probe_every=0",
            *NO_EVAL,
            steps=steps,
        )
    trained = metrics(run, "extractor")
    assert trained
    assert {line["extractor/reward"] for line in trained} == {0.0}
    assert equal_weights(run / f"checkpoints/{steps}/extractor", resolve_model("tiny-extractor"))


async def test_lessons_are_compared_with_those_of_the_untrained_extractor(
    tmp_path: Path, tiny_extractor: Path
) -> None:
    config = load(["room"], options={"run.steps": 2}, sets=[*SIZES, *DETERMINISTIC])
    start = checksum(named_weights(load_model(tiny_extractor, torch.device("cpu"))))
    async with open_training_loop(config, RunDir.create(tmp_path / "run"), PlainMonitor()) as loop:
        with fixed_outcomes():
            await loop.run()
        assert loop.experience is not None
        assert loop.measurements.evaluator.online is not None
        trained = loop.experience._engine
        open_untrained = loop.measurements.evaluator.online._open_untrained
        assert open_untrained is not None
        async with open_untrained(lambda _: None) as bank:
            asked = bank._engine
            assert isinstance(asked, TorchEngine)
            assert isinstance(trained, TorchEngine)
            assert checksum(named_weights(asked._decoder.model)) == start
            assert checksum(named_weights(trained._decoder.model)) != start


async def test_online_banks_have_no_trials(tmp_path: Path) -> None:
    config = load(
        ["room"],
        options={"run.steps": 2},
        sets=[*SIZES, *DETERMINISTIC, "retrieval.trial_share=0.5"],
    )
    async with open_training_loop(config, RunDir.create(tmp_path / "run"), PlainMonitor()) as loop:
        with fixed_outcomes():
            await loop.run()
        assert loop.experience is not None
        assert loop.measurements.evaluator.online is not None
        bank, online = loop.experience.manager, loop.measurements.evaluator.online
        goals = Counter(entry.goal for entry in bank._bank.entries.values())
        ((goal, count),) = goals.most_common(1)
        assert count > 1, "there is something to choose from"
        place = replace(online._tasks["room"].places[0], goal=goal)
        requests = [SearchRequest(goal, place, 99, member) for member in range(8)]
        async with online._open_scratch(lambda _: None) as scratch:
            (best, *_) = await scratch.search(requests[:1])
            assert best is not None
            await scratch.credit([best.use] * 9, True, episode="made/up/0/0")
            assert {hit.use.uid for hit in await scratch.search(requests) if hit} == {best.use.uid}
        await bank.credit([best.use] * 9, True, episode="made/up/0/0")
        assert len({hit.use.uid for hit in await bank.search(requests) if hit}) > 1, (
            "training has trials"
        )


def test_metrics_of_the_dashboard_are_logged(done: Path) -> None:
    """Check that a run logs the metrics that the dashboard and the log lines look up by name."""
    logged = {kind: set().union(*metrics(done, kind)) for kind in ("train", "extractor", "bank")}
    looked_up: set[tuple[str, str]] = set()

    class Recorder(Snapshot):
        def series(self, kind: str, name: str) -> Series:
            looked_up.add((kind, name))
            return super().series(kind, name)

    follower = DashboardFollower(done)
    follower.update()
    snapshot = follower.snapshot()
    for page in PAGES:
        page.draw(Recorder(**vars(snapshot)), 160, 50)
    missing = {(kind, name) for kind, name in looked_up if name not in logged.get(kind, ())}
    assert {(kind, name) for kind, name in missing if kind != "eval"} == {
        ("train", "rollout/room/success"),  # only with several tasks
        ("train", "rollout/score"),  # only in tasks with a score
    }
    assert all(name.endswith("/score/free") for kind, name in missing if kind == "eval")
    assert len(snapshot.experiences) > 0
    assert len(snapshot.episodes.members) > 1
    parts = {name for name in logged["train"] if name.startswith("time/")}
    assert parts == set(DURATION_METRICS["train"]), "the parts cover the whole step"
    assert {name.removeprefix("time/") for name in parts} == TIME_PARTS.keys() - {"eval", "probe"}


# ── free and guided ───────────────────────────────────────────────────────────────────────────────


def test_groups_with_signal(either: Path) -> None:
    for line in metrics(either, "train"):
        halves: dict[tuple[int, str], set[float]] = {}
        won: dict[tuple[int, str], list[bool]] = {}
        for t in episodes(either):
            if t["step"] == line["step"]:
                halves.setdefault((t["group"], t["condition"]), set()).add(t["reward"])
                if t["used"] or t["condition"] == "free":
                    won.setdefault(
                        (t["group"], t["used"][0]["uid"] if t["used"] else ""), []
                    ).append(t["success"])
        expected = {group for (group, _), rewards in halves.items() if len(rewards) > 1}
        expected |= {
            group for (group, _), guided in won.items() if fmean(guided) != fmean(won[group, ""])
        }
        assert line["rollout/groups_with_signal"] == len(expected)


def test_logged_gaps_match_the_episodes(either: Path) -> None:
    for line in metrics(either, "train"):
        gaps = []
        batch = [t for t in episodes(either) if t["step"] == line["step"]]
        for group in {t["group"] for t in batch}:
            guided = [t["success"] for t in batch if t["group"] == group and t["used"]]
            free = [t["success"] for t in batch if t["group"] == group and t["condition"] == "free"]
            gaps += [sum(guided) / len(guided) - sum(free) / len(free)] if guided else []
        assert line.get("rollout/gap") == (pytest.approx(sum(gaps) / len(gaps)) if gaps else None)


def test_half_of_every_group_is_guided(either: Path) -> None:
    played = episodes(either)
    assert len(played) == 16 * steps_of(either)
    assert [t["condition"] for t in played] == ["guided", "guided", "free", "free"] * 4 * steps_of(
        either
    )
    for group in {t["group"] for t in played}:
        guided = [t["used"] for t in played if t["group"] == group and t["condition"] == "guided"]
        assert bool(guided[0]) == bool(guided[1]), "both members have an experience or none has"


def test_prompts_contain_exactly_the_experiences_used(either: Path, tiny_actor: Path) -> None:
    """Check the actor's prompts token by token.

    A prompt holds the goal, the experience if one is used, and the first observation.
    """
    tokenizer = load_tokenizer(tiny_actor)
    renderer = ChatRenderer(tokenizer, stop_ids(tiny_actor, tokenizer))
    texts = {text for (text,) in rows(either / "bank.sqlite", "SELECT text FROM entries")}
    for t in episodes(either):
        opening = [Segment(**s) for s in t["segments"]][: 2 + len(t["used"])]
        assert [s.origin for s in opening] == ["task", *["experience"] * len(t["used"]), "env"]
        prompt = renderer.decode(t["ids"][: t["mask"].index(1)])
        assert prompt == renderer.text(opening)
        assert (
            prompt.replace(f"{opening[1].text}\n", "") == renderer.text([opening[0], opening[-1]])
            or not t["used"]
        )
        if t["condition"] == "free":
            assert t["used"] == []
            assert not any(s["origin"] == "experience" for s in t["segments"])
            assert not any(f"\n{text}\n" in renderer.decode(t["ids"]) for text in texts)


def test_overtime_is_recorded_and_not_trained(either: Path) -> None:
    played = episodes(either)
    with_overtime = [
        t for t in played if sum(s["origin"] == "policy" for s in t["segments"]) > t["turns"]
    ]
    assert with_overtime
    for t in with_overtime:
        assert (t["turns"], t["success"], t["reward"], t["truncated"]) == (4, False, 0.0, True)
        assert len(t["versions"]) == len(t["ids"]) == len(t["mask"])
        assert t["mask"][-1] == 1, "the recorded tokens end with the last trained token"
    assert max(t["turns"] for t in played) == 4
    for t in played:
        assert t["turns"] + t["overtime_turns"] == sum(
            s["origin"] == "policy" for s in t["segments"]
        )
    turns, overtime = (sum(t[name] for t in played) for name in ("turns", "overtime_turns"))
    last = metrics(either, "train")[-1]
    assert (last["total/env_turns"], last["total/env_turns/overtime"]) == (
        turns + overtime,
        overtime,
    )


# ── exactly once ──────────────────────────────────────────────────────────────────────────────────


def test_every_episode_is_distilled_exactly_once(either: Path) -> None:
    bank = either / "bank.sqlite"
    addresses = [address(t) for t in episodes(either) if t["error"] is None]
    assert len(set(addresses)) == len(addresses) == 16 * steps_of(either)
    assert sorted(origin for origin, _ in log(bank, "submit")) == sorted(addresses)
    assert Counter(rows(bank, "SELECT id, state FROM requests")) == Counter(
        (name, "done") for name in addresses
    )
    answered = {origin for origin, _ in log(bank, "add", "update", "return", "drop", "malformed")}
    assert answered == set(addresses), "the extractor answered every one of them"
    operations = rows(
        bank, "SELECT origin, op, kind FROM log WHERE kind NOT IN ('retrieve', 'train')"
    )
    assert len(set(operations)) == len(operations)
    last = metrics(either, "bank")[-1]
    if json.loads((either / "config.json").read_text())["config"]["run"]["deterministic"]:
        assert (last["queue/done"], last["queue/pending"]) == (16 * STEPS, 0)
        ((size,),) = rows(bank, "SELECT COUNT(*) FROM entries WHERE status = 'active'")
        assert last["bank/size"] == size


def test_every_use_is_credited_exactly_once(either: Path) -> None:
    bank = either / "bank.sqlite"
    used = [
        (address(t), use["uid"], use["version"], 1.0 if t["success"] else -1.0)
        for t in episodes(either) for use in t["used"] if t["error"] is None
    ]  # fmt: skip
    credited = [
        (origin, data["uid"], data["version"], data["reward"])
        for origin, data in log(bank, "credit", "stray")
    ]
    assert sorted(credited) == sorted(used)
    assert used
    sums: Counter[tuple[str, int]] = Counter()
    for _, uid, version, _ in used:
        sums[uid, version] += 1
    assert {
        (uid, version): n
        for uid, version, n in rows(bank, "SELECT uid, version, credited FROM units")
        if n
    } == sums


def test_lifts_match_the_groups(either: Path) -> None:
    """Compare the lifts in the bank with lifts computed from the episodes.

    A lift is the guided success minus the free success of a group. The bank holds the mean over
    groups.
    """
    groups: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for t in episodes(either):
        groups[t["step"], t["group"]].append(t)
    expected: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for members in groups.values():
        free = [t["success"] for t in members if t["condition"] == "free" and t["error"] is None]
        guided: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
        for t in members:
            for use in t["used"] if t["error"] is None else ():
                guided[use["uid"], use["version"]].append(t["success"])
        for unit, won in guided.items() if free else ():
            expected[unit].append(fmean(won) - fmean(free))
    assert expected
    found = rows(
        either / "bank.sqlite",
        "SELECT uid, version, lift_groups, lift_mean FROM units WHERE lift_groups > 0",
    )
    assert {(uid, version): (n, mean) for uid, version, n, mean in found} == {
        unit: (len(lifts), pytest.approx(fmean(lifts))) for unit, lifts in expected.items()
    }


def test_experiences_are_used_only_after_they_were_written(done: Path) -> None:
    for t in episodes(done):
        for use in t["used"]:
            assert int(use["generation"].split("/")[1]) < t["step"] - 1
            assert use["uid"].split("#")[0].startswith("run/")


# ── crl eval ──────────────────────────────────────────────────────────────────────────────────────


def test_eval_repeats_the_last_evaluation_and_changes_no_file(done: Path) -> None:
    before = contents(done)
    result = crl("eval", done)
    assert (result.exit_code, result.stderr) == (0, "")
    assert contents(done) == before
    last = metrics(done, "eval")[-1]
    settings = {
        ("seen", "free"): "without experience",
        ("seen", "guided"): "with the run's bank",
        ("unseen", "free"): "without experience",
        ("unseen", "online"): "with a bank built online",
    }  # fmt: skip
    for (split, setting), words in settings.items():
        n, name = (
            last[f"eval/room/{split}/episodes/{setting}"],
            f"eval/room/{split}/success/{setting}",
        )
        rate = f"{last[name]:.3f} [{last[f'{name}/low']:.3f}, {last[f'{name}/high']:.3f}]"
        assert f"  room {split:<6} {words:<25} {n:>4} episodes   {rate}\n" in result.stdout
    assert last["eval/room/unseen/episodes/online"] == 2 * 4 * 3
    assert {"eval/room/lessons/correct", "eval/room/lessons/correct/untrained"} <= last.keys()
    first = metrics(done, "eval")[0].keys()
    assert "eval/room/unseen/success/free" in first, "the start is evaluated"
    assert not [
        name for name in first if "online" in name or "alone" in name or "lessons" in name
    ], "but builds no bank"


def test_eval_needs_the_bank_of_the_run_and_not_the_initial_one(done: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.sqlite"
    first.write_bytes((done / "bank.sqlite").read_bytes())
    run = tmp_path / "run"
    train(run, *DETERMINISTIC, f"bank.init={first}", steps=1)
    first.unlink()
    assert crl("eval", run).exit_code == 0
    (run / "bank.sqlite").unlink()
    result = crl("eval", run)
    assert result.exit_code == 2
    assert (
        one_line(result)
        == f"error: run = '{run}': its bank file bank.sqlite is missing. Restore the file.\n"
    )


def test_eval_of_a_concurrent_run_changes_no_file(concurrent: Path) -> None:
    before = contents(concurrent)
    assert crl("eval", concurrent).exit_code == 0
    assert contents(concurrent) == before


# ── the same seed, the same run ───────────────────────────────────────────────────────────────────


def test_deterministic_mode(done: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    train(again, *DETERMINISTIC)
    assert list(map(untimed, lines(again / "metrics.jsonl"))) == list(
        map(untimed, lines(done / "metrics.jsonl"))
    )
    assert episode_files(again) == episode_files(done)
    assert dump(again / "bank.sqlite") == dump(done / "bank.sqlite")
    for role in ("actor", "extractor"):
        assert equal_weights(
            again / f"checkpoints/{STEPS}/{role}", done / f"checkpoints/{STEPS}/{role}"
        )
    assert not equal_weights(done / f"checkpoints/{STEPS}/actor", resolve_model("tiny-actor")), (
        "the weights have changed"
    )


def test_evaluations_do_not_change_the_training(done: Path, tmp_path: Path) -> None:
    """Check that an evaluation and a probe after every step do not change the run.

    The bank has entries.
    """
    watched = tmp_path / "watched"
    train(watched, *DETERMINISTIC, "run.eval_every=1", "eval.probe_every=1")
    assert [line["step"] for line in metrics(watched, "eval")] == [0, 1, 2, 3]
    assert episode_files(watched) == episode_files(done)
    assert dump(watched / "bank.sqlite") == dump(done / "bank.sqlite")
    for kind in ("train", "extractor", "bank"):
        assert list(map(untimed, metrics(watched, kind))) == list(map(untimed, metrics(done, kind)))
    assert untimed(metrics(watched, "eval")[-1]) == untimed(metrics(done, "eval")[-1])


# ── banks of other runs ───────────────────────────────────────────────────────────────────────────


WRITE_KINDS = ("submit", "add", "update", "return", "drop", "malformed", "evict", "train")
"""Operations of distillation and of the extractor's training."""
ENTRIES = "SELECT uid, version, text, status FROM entries WHERE status = 'active' ORDER BY uid"


def test_a_run_can_start_from_the_bank_of_another_run(done: Path, tmp_path: Path) -> None:
    source, before = done / "bank.sqlite", contents(done)
    run = tmp_path / "run"
    train(run, *DETERMINISTIC, f"bank.init={source}", steps=1)
    assert contents(done) == before
    bank = run / "bank.sqlite"
    texts = {uid: text for uid, _, text, _ in rows(source, ENTRIES)}
    played = episodes(run)
    assert any(t["used"] for t in played), "guided from the first step on"
    assert {use["uid"] for t in played for use in t["used"]} <= texts.keys()
    submitted = [origin for origin, _ in log(bank, "submit")[len(log(source, "submit")) :]]
    (run_name,) = {origin.split("/")[0] for origin in submitted}
    assert run_name.startswith("run")
    assert run_name != "run", "the same addresses in another run are other episodes"
    assert sorted(submitted) == sorted(address(t, run_name) for t in played)
    uses = [(address(t, run_name), use["uid"]) for t in played for use in t["used"]]
    credited = log(bank, "credit", "stray")[len(log(source, "credit", "stray")) :]
    assert sorted((origin, data["uid"]) for origin, data in credited) == sorted(uses)
    last = metrics(run, "bank")[-1]
    assert (last["queue/done"], last["ops/submit"]) == (16, 16), (
        "the other run's are not counted again"
    )
    listed = json.loads(crl("bank", "ls", run, "--status", "all", "--limit", 0, "--json").stdout)
    assert {(entry["uid"].startswith(f"{run_name}/"), entry["step"]) for entry in listed} == {
        (False, None),
        (True, 1),
    }
    stats = json.loads(crl("bank", "stats", run, "--json").stdout)
    assert (stats["ops"]["submit"], stats["step"], stats["earlier"]) == (
        16,
        1,
        rows(source, "SELECT COUNT(*) FROM log")[0][0],
    )


def test_a_frozen_bank_guides_and_is_not_written(done: Path, tmp_path: Path) -> None:
    source = done / "bank.sqlite"
    run = tmp_path / "run"
    result = train(run, *DETERMINISTIC, f"bank.init={source}", "bank.frozen=true", steps=2)
    experience = json.loads((run / "summary.json").read_text("utf-8"))["experience"]
    assert experience["extractor_updates"] is None
    assert experience["bank"]["queue/done"] == experience["bank"]["ops/add"] == 0
    assert "built online" not in result.stdout, "a frozen bank has no online evaluation"
    assert any(t["used"] for t in episodes(run) if t["step"] == 1)
    assert rows(run / "bank.sqlite", ENTRIES) == rows(source, ENTRIES)
    assert log(run / "bank.sqlite", *WRITE_KINDS) == log(source, *WRITE_KINDS)
    assert metrics(run, "extractor") == []
    assert manifest(run, 2)["models"] == ["actor"]
    assert crl("eval", run).exit_code == 0


# ── switches ──────────────────────────────────────────────────────────────────────────────────────


def test_a_static_extractor_writes_and_learns_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, *DETERMINISTIC, "extractor.train=false", steps=1)
    assert len(log(run / "bank.sqlite", "submit")) == 16
    assert metrics(run, "extractor") == []
    assert manifest(run, 1)["models"] == ["actor"]
    experience = json.loads((run / "summary.json").read_text("utf-8"))["experience"]
    assert experience["extractor_updates"] is None
    assert experience["bank"]["queue/done"] == 16
    assert crl("eval", run).exit_code == 0


def test_all_members_can_be_guided(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sets = (
        "complementary.guided_share=1",
        "complementary.advantages=cross",
        "extractor.baseline=batch",
    )
    train(run, *DETERMINISTIC, *sets, steps=2)
    assert {t["condition"] for t in episodes(run)} == {"guided"}
    assert not any("rollout/gap" in line for line in metrics(run, "train")), (
        "there is no free member to compare with"
    )


def test_guided_members_can_have_different_experiences(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, *DETERMINISTIC, "retrieval.per=rollout", "retrieval.choice=diverse", steps=2)
    used: dict[int, set[str]] = {}
    for t in episodes(run):
        for use in t["used"]:
            used.setdefault(t["group"], set()).add(use["uid"])
    assert any(len(uids) == 2 for uids in used.values()), (
        "the two guided members of a group had different experiences"
    )


def test_agents_can_see_the_track_record_of_their_experience(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, *DETERMINISTIC, "complementary.show_record=true", "eval.probe_every=0", *NO_EVAL)
    texts = {text for (text,) in rows(run / "bank.sqlite", "SELECT text FROM entries")}
    outcomes: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    record_shown = Counter[bool]()
    for _, step in groupby(episodes(run), key=lambda t: t["step"]):
        guided = [t for t in step if t["used"]]
        units = [(t["used"][0]["uid"], t["used"][0]["version"]) for t in guided]
        for t, unit in zip(guided, units, strict=True):
            earlier = outcomes[unit]
            record = compact_record("", TrackRecord(len(earlier), sum(earlier)))
            (advice,) = (s["text"] for s in t["segments"] if s["origin"] == "experience")
            assert advice.startswith(record)
            assert advice.removeprefix(record) in texts
            record_shown[bool(record)] += 1
        for t, unit in zip(guided, units, strict=True):
            outcomes[unit].append(t["success"])
    assert record_shown[True] > 0, "some experiences were used before"
    assert record_shown[False] > 0, "and others were not"


def better_guided_members(run: Path) -> Counter[int]:
    """Return by step the number of members with experience that beat the mean of the free ones."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for t in episodes(run):
        groups.setdefault((t["step"], t["group"]), []).append(t)
    better = Counter[int]()
    for (step, _), members in groups.items():
        free = fmean(t["reward"] for t in members if t["condition"] == "free")
        better[step] += sum(bool(t["used"]) and t["reward"] > free for t in members)
    return better


def test_self_distillation_trains_better_guided_members(tmp_path: Path) -> None:
    weight = "complementary.self_distillation=1.0"
    settings = {
        "plain": (),
        "distilled": (weight,),
        "periodic": (weight, "complementary.self_distillation_every=4"),
    }
    for name, sets in settings.items():
        train(tmp_path / name, *DETERMINISTIC, *sets, "eval.probe_every=0", *NO_EVAL, steps=4)
    plain, distilled, periodic = (metrics(tmp_path / name, "train") for name in settings)
    assert not any("rollout/self_distilled" in line for line in plain)
    better = better_guided_members(tmp_path / "distilled")
    assert [line["rollout/self_distilled"] for line in distilled] == [
        better[line["step"]] for line in distilled
    ]
    first = next(i for i, line in enumerate(distilled) if line["rollout/self_distilled"])
    assert first < 3, "periodic self-distillation has this step without samples"
    assert plain[first]["actor/grad_norm"] != distilled[first]["actor/grad_norm"], (
        "they are trained on"
    )
    last = better_guided_members(tmp_path / "periodic")[4]
    assert last > 0
    assert [line["rollout/self_distilled"] for line in periodic] == [0, 0, 0, last]
    norms = [[line["actor/grad_norm"] for line in run] for run in (plain, periodic)]
    assert norms[0][:3] == norms[1][:3]
    assert norms[0][3] != norms[1][3]


def test_a_perplexity_reward_is_added_to_the_rewards_of_experiences(tmp_path: Path) -> None:
    """Compare the pending rewards of two runs whose extractor never has a full batch.

    Their episodes are therefore equal, and the rewards differ by the bonuses alone.
    """
    sets = (*DETERMINISTIC, "extractor.batch=999", "eval.probe_every=0", *NO_EVAL)
    runs = [tmp_path / "plain", tmp_path / "perplexity"]
    train(runs[0], *sets, steps=4)
    train(runs[1], *sets, "extractor.perplexity.weight=0.5", steps=4)
    assert episodes(runs[0]) == episodes(runs[1])
    lines = metrics(runs[1], "bank")
    measured = [line for line in lines if line["perplexity/episodes"]]
    used = Counter(t["step"] for t in episodes(runs[1]) if t["used"])
    assert {line["step"]: line["perplexity/episodes"] for line in measured} == used
    assert not any(line["perplexity/failed"] for line in lines)
    assert all(line["time/perplexity"] > 0 for line in measured)
    bonuses = [line["perplexity/bonus"] * line["perplexity/episodes"] for line in measured]
    assert all(bonuses)
    assert all(abs(line["perplexity/bonus"]) <= 1 for line in measured)
    query = "SELECT sum(pending_sum), sum(pending_count) FROM units WHERE version > 0"
    ((plain, plain_count),), ((total, count),) = (rows(run / "bank.sqlite", query) for run in runs)
    assert plain_count == count == sum(used.values())
    assert total - plain == pytest.approx(sum(bonuses))
    assert not any("perplexity/episodes" in line for line in metrics(runs[0], "bank")), (
        "off by default"
    )


@pytest.mark.parametrize("normaliser", ["tanh", "sigmoid", "asymmetric", "log"])
def test_a_run_with_each_normaliser_trains_the_extractor(normaliser: str, tmp_path: Path) -> None:
    sets = (
        "extractor.perplexity.weight=0.5",
        f"extractor.perplexity.normaliser={normaliser}",
        *("extractor.cooldown=0", "eval.probe_every=0", *NO_EVAL),
    )
    train(tmp_path / "run", *DETERMINISTIC, *sets)
    assert any(line.get("perplexity/bonus") for line in metrics(tmp_path / "run", "bank"))
    assert metrics(tmp_path / "run", "extractor")[-1]["extractor/updates"] > 0


def test_a_run_without_experience_has_no_experience_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sets = (
        "rollout.groups=2",
        "rollout.group_size=4",
        "tasks.room.eval.seen=2",
        "tasks.room.eval.unseen=2",
        "eval.probe_every=0",
    )
    result = crl(*arguments(run, "room", sets, 1, 0, "grpo"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert {path.name for path in run.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "episodes",
        ".lock",
        "log.txt",
        "summary.json",
        "checkpoints",
    }
    assert manifest(run, 1)["models"] == ["actor"]
    assert {t["condition"] for t in episodes(run)} == {"free"}
    assert {line["kind"] for line in lines(run / "metrics.jsonl")} == {"train", "eval"}
    assert "extractor" not in result.stdout


# ── interrupted ───────────────────────────────────────────────────────────────────────────────────


def read_until_trained_with_experience(output: IO[str]) -> None:
    """Read the output of a run until a step after the first is trained with a non-empty bank.

    With an empty bank, no episode would be guided.
    """
    has_experience = False
    for line in output:
        has_experience |= line.startswith("bank ") and " size 0 " not in line
        if has_experience and line.startswith("train ") and not line.startswith("train     1/"):
            return


def test_ctrl_c_leaves_a_consistent_bank(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "from crl.cli.main import main; main()",
        *arguments(run, "room", SIZES, 10_000, 0, "complementary"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        read_until_trained_with_experience(process.stdout)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "")
    step = metrics(run, "train")[-1]["step"]
    assert f"interrupted after {step} of 10,000 steps" in output
    bank = run / "bank.sqlite"
    assert not bank.with_name("bank.sqlite-wal").exists(), "the bank was closed"
    assert rows(bank, "PRAGMA integrity_check") == [("ok",)]
    played = [address(t) for t in episodes(run)]
    assert len(played) == 16 * step
    assert sorted(name for (name,) in rows(bank, "SELECT id FROM requests")) == sorted(played), (
        "no episode is lost"
    )
    assert {state for (state,) in rows(bank, "SELECT DISTINCT state FROM requests")} <= {
        "done",
        "pending",
    }
    assert sorted(manifest(run, step)["models"]) == ["actor", "extractor"]
    assert crl("eval", run).exit_code == 0
    kept = {uid for uid, *_ in rows(bank, ENTRIES)}
    train(tmp_path / "next", f"bank.init={bank}", "bank.frozen=true", steps=1)
    assert {uid for uid, *_ in rows(tmp_path / "next" / "bank.sqlite", ENTRIES)} == kept
    assert log(tmp_path / "next" / "bank.sqlite", *WRITE_KINDS) == log(bank, *WRITE_KINDS), (
        "the queue of the old run is not distilled"
    )


def test_the_bank_of_a_killed_run_is_complete(tmp_path: Path) -> None:
    """Check that the last commits of a killed run are used.

    They are still in SQLite's write-ahead log, which belongs to the bank.
    """
    run = tmp_path / "run"
    command = [sys.executable, "-c", "from crl.cli.main import main; main()"]
    sets = (*SIZES, "run.checkpoint_every=1")
    with subprocess.Popen(
        [*command, *arguments(run, "room", sets, 10_000, 0, "complementary")],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        read_until_trained_with_experience(process.stdout)
        while not complete_steps(run / "checkpoints"):
            time.sleep(0.05)  # the first checkpoint is written while training continues
        process.kill()
    bank = run / "bank.sqlite"
    assert bank.with_name("bank.sqlite-wal").stat().st_size > 0
    assert crl("eval", run).exit_code == 0
    shutil.copytree(run, tmp_path / "copy")
    # SQLite recovers the write-ahead log here.
    with closing(sqlite3.connect(tmp_path / "copy" / "bank.sqlite")) as db:
        committed = set(db.execute(ENTRIES))
    train(tmp_path / "next", f"bank.init={bank}", "bank.frozen=true", steps=1)
    assert set(rows(tmp_path / "next" / "bank.sqlite", ENTRIES)) == committed
    assert committed


# ── the merge ─────────────────────────────────────────────────────────────────────────────────────


def test_the_tiny_extractor_merges_too(tmp_path: Path) -> None:
    """Check that the entries of each place are merged.

    Every merged entry in the log must exist in the bank.
    """
    train(
        tmp_path / "run",
        *DETERMINISTIC,
        "extractor.merge_every=1",
        "eval.probe_every=0",
        *NO_EVAL,
        steps=2 * STEPS,
    )
    bank = tmp_path / "run" / "bank.sqlite"
    assert len(log(bank, "chunk")) >= 4 * STEPS
    merged = {data["uid"] for _, data in log(bank, "merge")}
    assert merged
    assert merged <= {uid for (uid,) in rows(bank, "SELECT uid FROM entries")}


# ── user errors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["bank.init={folder}/none.sqlite"],
            "bank.init = '{folder}/none.sqlite': there is no such file",
        ),
        (
            ["prompts.distil={folder}/none.txt"],
            "prompts.distil = '{folder}/none.txt': cannot be read",
        ),
        (
            ["extractor.merge_every=5", "extractor.merge_tokens=4096"],
            "extractor.merge_tokens = 4096: leaves no tokens for the rest of the prompt",
        ),
        (["bank.frozen=true"], "the bank would stay empty, because bank.init is not set"),
        (
            ["tasks.room.rendering=full"],
            "reads only the compact rendering, but tasks.room.rendering is full",
        ),
    ],
)
def test_a_user_error_is_one_line(sets: list[str], message: str, tmp_path: Path) -> None:
    settings = tuple(setting.format(folder=tmp_path) for setting in sets)
    result = crl(*arguments(tmp_path / "run", "room", (*SIZES, *settings), 1, 0, "complementary"))
    assert result.exit_code == 2, result.output
    assert message.format(folder=tmp_path) in one_line(result)


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("name", "sets", "reason"),
    [
        ("prose", [], "it is not a bank of crl (file is not a database)"),
        ("nothing", [], "it is not a bank of crl"),
        ("foreign", [], "it is not a bank of crl"),
        (
            "newer",
            [],
            f"its schema version {SCHEMA_VERSION + 1} is newer than this crl's {SCHEMA_VERSION}",
        ),
        (
            "empty",
            ["bank.frozen=true"],
            "it holds no experiences, so as a frozen bank it could not guide any episode",
        ),
    ],
)
def test_the_initial_bank_is_checked_first(
    name: str, sets: list[str], reason: str, options: list[str], tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.sqlite"
    if name == "prose":
        path.write_text(
            "This was a bank once, and now it is prose that goes on for quite a while." * 99
        )
    elif name == "nothing":
        path.touch()
    elif name == "foreign":
        execute(path, "CREATE TABLE entries (status TEXT)")
    else:
        asyncio.run(empty_bank(path))
        execute(path, f"PRAGMA user_version = {SCHEMA_VERSION + (name == 'newer')}")
    before = contents(tmp_path)
    settings = (*SIZES, f"bank.init={path}", *sets)
    result = crl(*arguments(tmp_path / "run", "room", settings, 1, 0, "complementary"), *options)
    assert result.exit_code == 2, result.output
    assert one_line(result) == (
        f"error: bank.init = '{path}': {reason}. "
        "Use the bank.sqlite of another run, written by this version of crl.\n"
    )
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


async def empty_bank(path: Path) -> None:
    await (await Database.open(path)).aclose()


def execute(bank: Path, sql: str) -> None:
    with closing(sqlite3.connect(bank)) as db:
        db.execute(sql)
