"""`crl eval` with options and `crl compare` on whole runs, and evaluations during training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from crl.prompts import hashes
from crl.run.evaluating import evaluate as play
from support.complementary_runs import dump, train
from support.whole_runs import (
    DETERMINISTIC,
    contents,
    crl,
    equal_weights,
    metrics,
    one_line,
    untimed,
)
from support.worker_rooms import BROKEN_SETTING

STEPS = 3
GAMES = {"seen": 8, "unseen": 4}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a deterministic run of the room, with a checkpoint of step 2."""
    run = tmp_path_factory.mktemp("eval") / "run"
    train(run, *DETERMINISTIC, "run.checkpoint_every=2")
    return run


def evaluate(subject: object, *options: object) -> dict[str, Any]:
    """Run `crl eval` and return the record that it saved."""
    result = crl("eval", subject, *options)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("saved in ")]
    return json.loads(Path(line.split()[2]).read_text())


def test_a_few_games_that_all_fail_are_an_error(tmp_path: Path) -> None:
    out, sets = tmp_path / "out", (BROKEN_SETTING, *(f"tasks.room.eval.{k}=2" for k in GAMES))
    options = [part for text in sets for part in ("--set", text)]
    result = crl("eval", "tiny-actor", "--tasks", "room", "--out", out, *options)
    assert result.exit_code == 1
    assert 'raise OSError("the game is broken")' in result.stderr
    assert "error: task room: all episodes failed. The last error: env: room: step: OSError" in (
        result.stderr
    )
    assert not out.exists()


def played(record: dict[str, Any]) -> Counter[tuple[str, int, int]]:
    return Counter(
        (e["game"]["split"], e["game"]["number"], e["sample"]) for e in record["episodes"]
    )


def test_every_game_is_played_once_per_sample_for_any_batch_size(
    done: Path, tmp_path: Path
) -> None:
    before = contents(done)
    records = [
        evaluate(done, "--samples", 2, "--set", f"eval.concurrency={limit}", "--out", tmp_path)
        for limit in (1, 7, 64)
    ]
    assert played(records[0]) == Counter(
        (split, number, sample)
        for split, n in GAMES.items()
        for number in range(n)
        for sample in range(2)
    )
    first, *others = (record["episodes"] for record in records)
    assert all(other == first for other in others), "the batch size changes no result"
    assert {e["condition"] for e in first} == {"free"}
    assert contents(done) == before
    last = metrics(done, "eval")[-1]
    for split, n in GAMES.items():
        won = sum(e["success"] for e in first if e["game"]["split"] == split and e["sample"] == 0)
        assert won / n == last[f"eval/room/{split}/success/free"], "the draws are the run's"


def test_a_bank_is_read_as_it_was_at_the_checkpoint(done: Path) -> None:
    before = contents(done)
    for number, step in enumerate((2, 3), start=1):
        options = ("--step", step, "--experience", "bank", "--set", "eval.concurrency=5")
        record = evaluate(done, *options)
        assert record["about"]["step"] == step
        assert record["about"]["options"]["step"] == step
        assert record["about"]["weights"].keys() >= {"actor/model.safetensors"}
        assert record["about"]["prompts"] == hashes()
        assert record["about"]["settings"]["prompts"].keys() == hashes().keys()
        assert {e["condition"] for e in record["episodes"]} == {"guided"}
        assert len(list((done / "eval").glob("*.json"))) == number
    after = contents(done)
    assert {path: after[path] for path in before} == before, "only new files"
    shown = crl("eval", done, "--show").stdout
    assert shown.count("with a bank that is only read, 1 sample per game") == 2
    for path in (done / "eval").iterdir():
        path.unlink()
    (done / "eval").rmdir()


def test_an_online_evaluation_builds_a_scratch_bank(done: Path, tmp_path: Path) -> None:
    before = contents(done)
    record = evaluate(done, "--experience", "online", "--out", tmp_path)
    assert contents(done) == before
    rows = {row["condition"]: row for row in record["results"]}
    last = metrics(done, "eval")[-1]
    for condition in ("online", "alone"):
        assert rows[condition]["games"] == 2
        name = f"eval/room/unseen/success/{condition}"
        assert rows[condition]["success"]["value"] == last[name], "it repeats the run's"


def test_a_folder_that_cannot_be_written_is_found_before_the_games(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play, "play_samples", None)
    (file := tmp_path / "file").touch()
    result = crl("eval", done, "--out", file)
    assert result.exit_code == 2
    assert f"out = '{file}': cannot be written (File exists)" in one_line(result)


def test_a_model_directory_is_evaluated_without_a_run(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert crl("export", done, "mine").exit_code == 0
    sizes = [f"tasks.room.eval.{split}=4" for split in ("seen", "unseen")]
    sets = [word for size in sizes for word in ("--set", size)]
    record = evaluate("mine", "--tasks", "room", "--samples", 3, "--temperature", 0, *sets)
    assert (record["about"]["model"], record["about"]["temperature"]) == (str(tmp_path / "mine"), 0)
    (row, _) = record["results"]
    assert row["pass@2"]["value"] == row["pass@3"]["value"] == row["success"]["value"], "greedy"
    (folder,) = Path("evals").iterdir()
    assert folder.name.startswith("mine-")
    assert (folder / "no-experience-3samples.csv").is_file()
    bank = done / "bank.sqlite"
    guided = evaluate(
        "mine", "--tasks", "room", "--experience", "bank", "--bank", bank, "--out", "out", *sets
    )
    assert guided["about"]["bank"] == {"path": str(bank), "snapshot": None}


def test_evaluations_reach_neither_training_nor_the_bank(done: Path, tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    train(watched, *DETERMINISTIC, "run.checkpoint_every=2", "run.eval_every=1")
    assert len(metrics(watched, "eval")) == STEPS + 1 > len(metrics(done, "eval"))
    for kind in ("train", "extractor", "bank", "probe"):
        assert list(map(untimed, metrics(watched, kind))) == list(map(untimed, metrics(done, kind)))
        assert metrics(done, kind) or kind == "extractor"
    assert dump(watched / "bank.sqlite") == dump(done / "bank.sqlite")
    for role in ("actor", "extractor"):
        path = f"checkpoints/{STEPS}/{role}"
        assert equal_weights(watched / path, done / path)


def test_runs_are_compared(done: Path, tmp_path: Path) -> None:
    other, unfinished = tmp_path / "other", tmp_path / "unfinished"
    train(other, *DETERMINISTIC, "run.checkpoint_every=2", "eval.temperature=0.5", steps=1)
    result = crl("compare", done, other)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert f"A: {done} (seed 0)" in lines
    assert "eval.temperature: A 1.0, B 0.5" in lines
    assert "run.steps: A 3, B 1" in lines
    assert [x for x in lines if x.startswith("room  unseen  without experience") and "B − A" in x]
    unfinished.mkdir()
    (unfinished / "config.json").write_text((done / "config.json").read_text())
    result = crl("compare", done, unfinished)
    assert result.exit_code == 2
    message = one_line(result)
    assert "it is not finished. Leave it out." in message
