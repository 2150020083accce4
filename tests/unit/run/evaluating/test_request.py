"""Requests of `crl eval`: wrong input is reported before torch is imported."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from crl.config.load import dump, load
from crl.envs.registry import get_spec
from crl.errors import ConfigError
from crl.evaluation.samples import Source
from crl.manager.inspection.reading import KeyVectors
from crl.manager.storage.database import require_vectors_of
from crl.manager.storage.tables import set_fact
from crl.run.checkpoint import MANIFEST
from crl.run.evaluating import request as requests
from crl.run.evaluating.request import Options, Request, resolve
from crl.types import Split
from support.bank_commands import finished_run


@pytest.fixture(scope="module")
def banked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bank of a run."""
    run = tmp_path_factory.mktemp("bank") / "run"
    finished_run(run)
    return run / "bank.sqlite"


@pytest.fixture
def run(tmp_path: Path, tiny_actor: Path) -> Path:
    """Return the directory of a run of the room with a checkpoint, without a bank file."""
    path = tmp_path / "run"
    path.mkdir()
    dump(load(["room"], options={"run.seed": 3}), path / "config.json")
    shutil.copytree(tiny_actor, path / "checkpoints" / "4" / "actor")
    manifest = {"step": 4, "models": ["actor"], "files": {}, "state": {"bank": 1}}
    (path / "checkpoints" / "4" / MANIFEST).write_text(json.dumps(manifest))
    return path


def request_of(subject: Path, **options: object) -> Request:
    return resolve(subject, replace(Options(), **options), print)  # type: ignore[arg-type]


def test_a_run_is_evaluated_with_its_own_settings(run: Path) -> None:
    request = request_of(run, samples=4)
    assert (request.step, request.source, request.samples) == (4, Source.none, 4)
    assert request.name == "step4-no-experience-4samples"
    assert request.config.run.seed == 3
    assert Path(request.config.actor.model) == run / "checkpoints" / "4" / "actor"
    assert request.config.tasks["room"].rendering == "compact"
    assert request.config.eval.temperature == 1.0


def test_options_and_sets_change_the_settings(run: Path) -> None:
    request = request_of(
        run,
        tasks="webshop,room",
        temperature=0.5,
        sets=["tasks.room.eval.seen=3", "run.deterministic=true"],
    )
    config = request.config
    assert (list(config.tasks), config.eval.temperature) == (["webshop", "room"], 0.5)
    assert (config.tasks["room"].eval.seen, config.tasks["webshop"].rendering) == (3, "compact")
    assert (config.run.deterministic, config.rollout.max_staleness) == (True, 0)


def test_the_share_of_errors_may_be_larger(run: Path) -> None:
    assert request_of(run, sets=["run.max_error_rate=1.0"]).config.run.max_error_rate == 1


def test_a_model_needs_no_run(tiny_actor: Path, banked: Path) -> None:
    request = request_of(tiny_actor, tasks="room")
    assert (request.step, request.checkpoint, request.bank) == (None, None, None)
    assert request.name == "no-experience"
    assert request.config.tasks["room"].rendering == "compact"
    with_bank = request_of(
        tiny_actor,
        tasks="room",
        experience=Source.bank,
        bank=banked,
        sets=["bank.scope=shared"],
    )
    assert with_bank.bank is not None
    assert (with_bank.bank.path, with_bank.bank.foreign) == (banked, True)
    online = request_of(tiny_actor, tasks="room", experience=Source.online)
    assert online.bank is not None
    assert online.bank.path is None, "it starts with an empty bank"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 7}, "checkpoint = 7: .* has no checkpoint of this step.*4"),
        ({"tasks": "rom"}, "tasks = 'rom': is not a known task.*room"),
        ({"tasks": " ,"}, "contains no task"),
        ({"samples": 0}, "samples = 0: must be at least 1"),
        ({"temperature": -0.5}, "temperature = -0.5: must not be negative"),
        ({"temperature": float("nan")}, "temperature = nan: must not be negative"),
        ({"bank": Path("x")}, "bank = 'x': has no effect without experience"),
        ({"experience": Source.bank, "bank": Path("x")}, "bank = 'x': there is no such file"),
        ({"experience": Source.bank}, "its bank file bank.sqlite is missing"),
        ({"experience": Source.online, "samples": 2}, "does not apply to the online evaluation"),
        ({"preset": "cpu"}, "preset = 'cpu': does not apply to a run"),
        ({"sets": ["learner.threads=2"]}, "an evaluation trains nothing"),
        ({"sets": ["actor.lora.rank=4"]}, "an evaluation trains nothing"),
        ({"sets": ["extractor.optimizer.learning_rate=1"]}, "an evaluation trains nothing"),
        ({"sets": ["run.steps=9"]}, "an evaluation trains nothing"),
        ({"sets": ["actor.model=x"]}, "the checkpoint has the models"),
        ({"sets": ["tasks.maze.eval.seen=1"]}, "maze is not a task of this evaluation"),
        ({"sets": ["tasks.room.evl.seen=1"]}, "tasks.room.evl"),
        (
            {"sets": ["tasks.room.eval.seen=0", "tasks.room.eval.unseen=0"]},
            "tasks.room.eval.unseen = 0: no task of the evaluation has games",
        ),
    ],
)
def test_wrong_options_of_a_run(run: Path, options: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request_of(run, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "tasks = None: is required for a model"),
        ({"tasks": "room", "step": 3}, "--step = 3: .* is a model and not a run"),
        ({"tasks": "room", "experience": Source.bank}, "--experience = 'bank': needs a bank"),
        (
            {"tasks": "river", "experience": Source.online, "sets": ["bank.frozen=true"]},
            "bank.frozen|frozen",
        ),
        (
            {"tasks": "room", "experience": Source.online, "sets": ["method=grpo"]},
            "--experience = 'online': the method grpo has no bank",
        ),
        (
            {"tasks": "room", "experience": Source.online, "sets": ["method=role_agent"]},
            "the method role_agent shows its agents no experience",
        ),
    ],
)
def test_wrong_options_of_a_model(
    tiny_actor: Path, options: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        request_of(tiny_actor, **options)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run directory; as a model: .*no config\.json"):
        request_of(tmp_path, tasks="room")


def test_a_run_without_a_bank(run: Path) -> None:
    dump(load(["room"], options={"method": "grpo"}), run / "config.json")
    with pytest.raises(ConfigError, match="the method grpo of the run has no bank"):
        request_of(run, experience=Source.bank)
    with pytest.raises(ConfigError, match=r"crl eval .*actor --tasks … --bank FILE"):
        request_of(run, experience=Source.bank, bank=Path("x"))


def test_a_bank_of_another_embedder_or_of_other_tasks(
    tiny_actor: Path, banked: Path, tmp_path: Path
) -> None:
    options = {"tasks": "room", "experience": Source.bank}
    with pytest.raises(ConfigError, match="its experiences are of other tasks"):
        request_of(tiny_actor, **options | {"tasks": "webshop"}, bank=banked)
    other = tmp_path / "bank.sqlite"
    shutil.copy(banked, other)
    with sqlite3.connect(other) as db:
        set_fact(db, "embedder", "bge-small: goal + 0.1 text")
    db.close()
    with pytest.raises(ConfigError, match="made by the embedder bge-small, not by hash"):
        request_of(tiny_actor, **options, bank=other)


def test_a_run_with_a_bank_of_another_embedder_takes_the_advice_of_the_message(
    run: Path, banked: Path, tmp_path: Path
) -> None:
    """The setting of the embedder is refused only for the bank of the run itself."""
    saved = load(["room"], sets=["embedder.model=http://localhost:9", "embedder.name=m"])
    dump(saved, run / "config.json")
    foreign = {"experience": Source.bank, "bank": banked}
    assert request_of(run, **foreign).config.embedder.model == "http://localhost:9"
    with pytest.raises(ConfigError) as refused:
        require_vectors_of(banked, "m", "bank")
    assert refused.value.remedy == "Add --set embedder.model=hash"
    sets = ["embedder.model=hash"]
    assert request_of(run, **foreign, sets=sets).config.embedder.model == "hash"
    with pytest.raises(ConfigError, match=r"embedder.model = 'hash': has no effect: the vectors"):
        request_of(run, experience=Source.bank, sets=sets)


def test_a_bank_of_tips_guides_episodes(tiny_actor: Path, banked: Path, tmp_path: Path) -> None:
    """Its keys are states of episodes, by the same embedder."""
    other = tmp_path / "bank.sqlite"
    shutil.copy(banked, other)
    with closing(sqlite3.connect(other)) as db, db:
        set_fact(db, "embedder", "hash-char_wb-2-4-384: state before the last action")
    sets = ["method=empo2"]
    options = {"tasks": "room", "experience": Source.bank, "sets": sets}
    assert request_of(tiny_actor, **options, bank=other).bank
    keys = KeyVectors("hash-char_wb-2-4-384: state before the last action", {})
    assert keys.comparable("hash-char_wb-2-4-384", 384)
    assert not keys.comparable("hash-char_wb-2-4", 384)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("hash-char_wb-2-4-384", "Add --set embedder.model=hash"),
        ("wordllama-256: goal + 0.1 text", "Add --set embedder.model=wordllama"),
        ("bert-0a1b2c3d-384", "Add --set embedder.model=MODEL with the embedder bert-0a1b2c3d-384"),
    ],
)
def test_the_remedy_names_the_embedder_of_the_bank(
    banked: Path, tmp_path: Path, name: str, remedy: str
) -> None:
    other = tmp_path / "bank.sqlite"
    shutil.copy(banked, other)
    with closing(sqlite3.connect(other)) as db, db:
        set_fact(db, "embedder", name)
    with pytest.raises(ConfigError) as refused:
        require_vectors_of(other, "m", "bank")
    assert refused.value.remedy == remedy


def test_official_splits_are_played_in_full(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_spec("room", key="room")
    sizes: dict[Split, int] = {"seen": 140, "unseen": 134}
    official = replace(spec, tasks=replace(spec.tasks, split_sizes=lambda: sizes))
    monkeypatch.setattr(requests.tasks, "specs", lambda config: {"room": official})
    played = request_of(run, samples=1).config.tasks["room"].eval
    assert (played.seen, played.unseen) == (140, 134)
    chosen = request_of(run, sets=["tasks.room.eval.unseen=5"]).config.tasks["room"].eval
    assert (chosen.seen, chosen.unseen) == (140, 5), "--set has the last word"


def test_wrong_input_needs_no_torch(run: Path) -> None:
    for arguments in (
        [run, "--samples", "0"], [run, "--step", "7"], [run, "--tasks", "rom"],
        [run, "--experience", "bank", "--bank", "x"], ["tiny-actor"], [run, "--show"],
    ):  # fmt: skip
        code = (
            "import sys\nfrom crl.cli.main import main\ntry: main()\n"
            "finally: print('torch' in sys.modules)"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, "eval", *map(str, arguments)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stdout == "False\n"
