"""Tests of the command line: output, exit codes, and errors as one line."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click import Command, Context
from typer.main import get_command
from typer.testing import CliRunner

from crl.cli.main import app
from crl.config.load import dump, load
from crl.config.method import BUNDLED_METHODS
from crl.config.schema import RunConfig
from crl.errors import ConfigError, EngineError, Interrupted
from crl.manager.storage.database import Database
from crl.planning.plan import plan

COMMAND = [sys.executable, "-c", "from crl.cli.main import main; main()"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "crl.json").write_text('{"profile": "compact"}')
    return f"actor.model={folder}"


def crl(*args: str):
    return CliRunner().invoke(app, list(args))


def one_line_error(result, code: int = 2) -> str:
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    return result.stderr


class FakeRun:
    """Replacement of `crl.run.main` that needs no torch and records its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException = 0) -> None:
        self.calls: list[tuple] = []
        self.outcome = outcome
        module = ModuleType("crl.run.main")
        module.train = lambda *args, **kwargs: self._end(args, kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        module.evaluate_run = module.train  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "crl.run.main", module)

    def _end(self, args: tuple, kwargs: dict) -> int:
        self.calls.append((*args, kwargs))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize("late", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_end_of_the_interpreter_changes_no_exit_code(late: int) -> None:
    code = (
        "import atexit, time\n"
        "atexit.register(lambda: (print('closing', flush=True), time.sleep(2)))\n"
        "from crl.cli.main import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "--version"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "closing\n":
            assert process.poll() is None
        process.send_signal(late)
        assert process.wait(30) == 0


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom crl.cli.main import main\ntry: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'nle', 'rich', 'numpy'} "
        "& set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == "[]"
    assert "make-models" in result.stdout


def test_help_texts():
    assert crl("--help").output.startswith("Usage:")
    text = crl("train", "--help").output
    for option in (
        "--tasks A,B",
        "--method NAME",
        "--preset NAME",
        "--steps N",
        "--seed N",
        "--run-dir DIR",
        "--set KEY=VALUE",
    ):
        assert option in text
    assert "--dry-run" in text
    assert "--plain" in text
    assert "path/to/file.py:SPEC" in " ".join(text.split())
    usage, *lines = crl("bank", "dead", "--help").output.splitlines()
    assert usage == "Usage: crl bank dead [OPTIONS] RUN [EPISODE]..."
    assert any(re.match(r"  EPISODE  +Episodes for --retry", line) for line in lines)


def test_the_help_names_the_bundled_methods():
    """Compare texts: an import of the methods' table would make `crl --help` slower."""
    text = " ".join(crl("train", "--help").output.split())
    default = RunConfig.model_fields["method"].default
    others = [name for name in BUNDLED_METHODS if name != default]
    assert ", ".join([f"{default} (default)", *others, "or your own method:"]) in text


def test_arguments_are_shown_without_type():
    root: Any = get_command(app)
    names = [
        [name, *inner]
        for name, entry in root.commands.items()
        for inner in ([[word] for word in entry.commands] if hasattr(entry, "commands") else [[]])
    ]
    assert len(names) > 15
    for words in names:
        assert not re.search("[{<]", crl(*words, "--help").output), words


def test_the_version():
    assert crl("--version").output == "crl 0.1.0\n"


def test_bad_input_in_a_separate_process(model: str):
    result = subprocess.run(
        [*COMMAND, "train", "--tasks", "rom", "--set", model], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: tasks = 'rom': is not a known task. Did you mean room?")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize("words", [["tasks"], ["bank", "export"], ["bank", "stats"]])
def test_an_output_that_cannot_be_written_is_one_line(words: list[str], tmp_path: Path):
    if words[0] == "bank":
        asyncio.run(bank_of_one_entry(path := tmp_path / "bank.sqlite"))
        words = [*words, str(path)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_a_run_does_not_need_its_screen(tmp_path: Path):
    run, sets = tmp_path / "run", ("tasks.room.eval.seen=0", "tasks.room.eval.unseen=0")
    words = ["train", "--tasks", "room", "--method", "grpo", "--steps", "1", "--run-dir", str(run)]
    for setting in (*sets, "tasks.room.eval.online_places=0", "eval.probe_every=0"):
        words += ["--set", setting]
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (run / "checkpoints" / "1").is_dir()
    log = (run / "log.txt").read_text("utf-8")
    assert log.count("warning: the sink screen failed and gets no further metrics (OSError") == 1


@pytest.mark.parametrize("words", [["tasks"], ["bank", "ls"], ["bank", "stats", "--json"]])
def test_a_closed_output_is_not_an_error(words: list[str], tmp_path: Path):
    if words[0] == "bank":
        asyncio.run(bank_of_one_entry(path := tmp_path / "bank.sqlite"))
        words = [*words, str(path)]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *words],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)


def test_each_error_is_one_line(model: str, tmp_path: Path):
    assert "Did you mean rollout.groups?" in one_line_error(
        crl("train", "--tasks", "room", "--set", model, "--set", "rollout.group=3")
    )
    assert "rollout.groups = 'x': should be a valid integer" in one_line_error(
        crl("train", "--tasks", "room", "--set", model, "--set", "rollout.groups=x")
    )
    assert "is neither a known model nor a directory" in one_line_error(
        crl("train", "--tasks", "room", "--set", "actor.model=no/such")
    )
    assert "Did you mean grpo?" in one_line_error(
        crl("train", "--tasks", "room", "--method", "gropo", "--set", model)
    )
    assert "is not a run directory" in one_line_error(crl("eval", str(tmp_path / "nope")))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    taken = crl("train", "--tasks", "room", "--set", model, "--run-dir", str(tmp_path / "there"))
    assert ": exists and is not empty" in one_line_error(taken)


def usages(command: Command, context: Context) -> Iterator[str]:
    """Yield the usage lines of a command and of all its subcommands."""
    yield command.get_usage(context)
    for name, sub in getattr(command, "commands", {}).items():
        yield from usages(sub, type(context)(sub, info_name=name, parent=context))


def test_usages_show_arguments_by_their_names_only() -> None:
    root: Any = get_command(app)
    found = list(usages(root, root.make_context("crl", ["doctor"], resilient_parsing=True)))
    assert "Usage: crl compare [OPTIONS] RUN..." in found
    assert "Usage: crl bank dead [OPTIONS] RUN [EPISODE]..." in found
    assert [text for text in found if re.search(r"[{}]|\.{4}", text)] == []


def test_usage_errors_exit_with_2():
    for args in (
        ["train"],
        ["train", "--tasks", "room", "--stepz", "3"],
        ["train", "--tasks", "room", "--steps", "x"],
        ["nope"],
    ):
        result = crl(*args)
        assert result.exit_code == 2, args
        assert "Traceback" not in result.output


def test_train_passes_on_the_config_and_the_exit_code(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = FakeRun(monkeypatch, outcome=1)
    result = crl(
        *(
            "train",
            "--tasks",
            "room",
            "--steps",
            "2",
            "--seed",
            "5",
            "--plain",
            "--run-dir",
            str(tmp_path / "new"),
            "--set",
            model,
        ),
        *("--set", "rollout.groups=3", "--set", "run.seed=6"),
    )
    assert result.exit_code == 1
    ((config, run_dir, options),) = run.calls
    assert (config.run.steps, config.run.seed, config.rollout.groups, config.method) == (
        2,
        6,
        3,
        "complementary",
    )
    # The summary adds another seed to the command, which --set run.seed would override.
    repeated = f"crl train --tasks room --steps 2 --set {model} --set rollout.groups=3"
    assert (run_dir, options["command"]) == (tmp_path / "new", repeated)


def test_the_default_run_directory(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = FakeRun(monkeypatch)
    assert crl("train", "--tasks", "room", "--set", model).exit_code == 0
    name = run.calls[0][1].name
    assert run.calls[0][1].parent == Path("runs")
    assert name.startswith("room-complementary-")
    assert time.strptime(name.removeprefix("room-complementary-"), "%Y%m%d-%H%M%S")
    assert crl("train", "--tasks", "room", "--method", "grpo", "--set", model).exit_code == 0
    assert run.calls[1][1].name.startswith("room-grpo-")


def test_the_end_of_a_run_determines_the_exit_code(model: str, monkeypatch: pytest.MonkeyPatch):
    FakeRun(monkeypatch, outcome=EngineError("the engine\nis gone"))
    assert (
        one_line_error(crl("train", "--tasks", "room", "--set", model), code=1)
        == "error: the engine is gone\n"
    )
    FakeRun(
        monkeypatch,
        outcome=ConfigError("device", "cuda", "torch finds no CUDA device", "use auto or cpu"),
    )
    one_line_error(crl("train", "--tasks", "room", "--set", model))
    for outcome, line in ((KeyboardInterrupt(), "interrupted\n"), (Interrupted(), "")):
        FakeRun(monkeypatch, outcome=outcome)
        result = crl("train", "--tasks", "room", "--set", model)
        assert (result.exit_code, result.stderr) == (130, line)


def test_eval(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dump(load(["room"], sets=[model]), tmp_path / "config.json")
    run = FakeRun(monkeypatch)
    assert crl("eval", str(tmp_path)).exit_code == 0
    assert run.calls == [(tmp_path, {})]


# ── --dry-run ─────────────────────────────────────────────────────────────────────────────────────


def test_the_plan_has_at_most_one_minibatch_per_group() -> None:
    result = crl("train", "--tasks", "room", "--dry-run", "--set", "actor.minibatches=999")
    assert "16 minibatches of about 8 rollouts, one optimizer update each" in result.stdout
    assert "12,800 episodes, 1,600 updates" in result.stdout


def test_a_dry_run_prints_the_plan_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = crl("train", "--tasks", "room", "--dry-run")
    assert result.exit_code == 0
    assert not (tmp_path / "runs").exists()
    for line in (
        "engine       torch on cuda if available, else cpu, 1 CPU thread",
        "environments 4 threads",
        "room  compact rendering: the actor has the compact profile",
        "a step    16 groups × 8 members = 128 rollouts, at most 1 step ahead",
        "          2 minibatches of about 64 rollouts, one optimizer update each",
        "training  100 steps × 128 = 12,800 episodes, 200 updates",
        (
            "eval      2 times, 768 episodes at the start and 2,816 later = at most 3,584 "
            "episodes at temperature 1"
        ),
        # 2 · 256 seen, 256 unseen; later also 64 places · 4 · (5 + 3 visits)
        "extractor  one training step per 32 credit units",
        (
            "bank       every episode is distilled; at most 8 experiences per goal (evicts "
            "by credit); starts empty"
        ),
        (
            "retrieval  4 of 8 members are guided, one experience per rollout, chosen by "
            "success record; 50 % of searches choose the least retrieved one"
        ),
    ):
        assert line in result.output.splitlines()
    assert "\nextractor  " in result.output.split("── models ──")[1].split("──")[0]


def test_the_plan_without_experience(model: str):
    text = plan(load(["room"], options={"method": "grpo"}, sets=[model]))
    assert "eval      2 times × 512 episodes = 1,024 episodes at temperature 1" in text.splitlines()
    assert "── experience ──" not in text
    assert "\nextractor" not in text.split("── models ──")[1]


def test_the_config_of_the_plan_is_valid_toml(model: str):
    config = load(["room"], sets=[model])
    text = plan(config).split("── devices ──")[0].removeprefix("── resolved config ──")
    expected = config.model_dump()
    del (
        expected["gpus"],
        expected["gpu_memory"],
        expected["engine"]["memory_fraction"],
    )  # unset: TOML has no null
    del expected["actor"]["importance_cap"]
    del expected["actor"]["profile"], expected["extractor"]["profile"]
    del expected["eval"]["concurrency"]
    for name in ("max_entries", "evict_votes", "duplicate_similarity"):
        del expected["bank"][name]
    expected["prompts"] = {}
    assert tomllib.loads(text) == expected
    assert "# importance_cap is unset" in text


def test_the_plan_follows_the_settings(model: str):
    sets = [
        "method=grpo",
        "run.steps=10",
        "run.eval_every=5",
        "rollout.max_staleness=0",
        "engine.device=cpu",
        "tasks.room.rendering=full",
    ]
    text = plan(load(["room"], sets=[model, *sets]))
    assert "torch on cpu, 1 CPU thread" in text
    assert "room  full rendering: set in the config" in text
    assert "rollouts, synchronous" in text
    assert "eval      3 times × 512 episodes" in text
    assert "eval      1 time × 2,816 episodes" in plan(load(["room"], sets=[model, "run.steps=0"]))


def test_the_plan_shows_the_settings_of_experience(model: str, tmp_path: Path):
    bank = tmp_path / "bank.sqlite"
    asyncio.run(bank_of_one_entry(bank))
    sets = [
        "extractor.train=false",
        "complementary.guided_share=1",
        "retrieval.per=rollout",
        "retrieval.choice=diverse",
        f"bank.init={bank}",
    ]
    lines = plan(load(["room"], sets=[model, *sets])).splitlines()
    assert "extractor  not trained" in lines
    assert (
        "bank       every episode is distilled; at most 8 experiences per goal (evicts "
        f"by credit); starts from {bank}"
    ) in lines
    assert (
        "retrieval  8 of 8 members are guided, one experience per rollout, chosen by "
        "similarity and diversity (eq. 6)"
    ) in lines
    assert not any(line.startswith("critic ") for line in lines)
    lines = plan(
        load(["room"], sets=[model, "critic.enabled=true", "critic.warmup=2"])
    ).splitlines()
    assert (
        "critic     the actor accepts, refines or rejects each retrieved experience; "
        "warm-up of 2 batches without experience"
    ) in lines
    late = "unfinished episodes continue for at most 4 turns, only for distillation"
    assert any(late in line for line in lines)
    lines = plan(load(["room"], sets=[model, f"bank.init={bank}", "bank.frozen=true"])).splitlines()
    assert "extractor  not trained" in lines
    assert (
        "bank       frozen: nothing is distilled; at most 8 experiences per goal (evicts "
        f"by credit); starts from {bank}"
    ) in lines
    assert not any(late in line for line in lines), "no extractor reads it"
    for method, origin in (
        ("role_agent", f"{bank} of a run of role_agent"),
        ("complementary", bank),
    ):
        dump(load(["room"], options={"method": method}), bank.parent / "config.json")
        text = plan(load(["room"], sets=[model, f"bank.init={bank}", "bank.frozen=true"]))
        assert f"starts from {origin}" in text
        assert (f"of a run of {method}" in text) == (method == "role_agent")


PLACES = "  32 places, 8 permanent, the others for 5 visits"


def test_the_plan_only_shows_places_that_persist(model: str, tmp_path: Path):
    (tmp_path / "model" / "crl.json").unlink()
    sets = [model, "method=grpo"]
    lines = plan(load(["room", "alfworld"], sets=sets)).splitlines()
    own = {
        name: lines[lines.index(f"{name}  full rendering: the actor has the full profile") :]
        for name in ("room", "alfworld")
    }
    assert own["room"][2] == PLACES
    assert own["alfworld"][1] == "  40 turns of at most 2,048 tokens, context full"
    assert own["alfworld"][2] == (
        "  1,466 games in shuffled rounds, 800 groups: 0 % of the groups repeat a game"
    )
    assert "── method" not in "\n".join(lines), "grpo has nothing more to tell"
    assert "  a new place in every group" in plan(load(["webshop"], sets=sets)).splitlines()


@pytest.mark.parametrize("command", ["train", "dry run"])
@pytest.mark.parametrize(
    ("size", "said"),
    [
        (
            "online_places",
            (
                "has no effect because alfworld has no persistent places (its EnvSpec has no "
                "revisit). Set it to 0, or define"
            ),
        ),
        (
            "probe_places",
            (
                "has no effect because the right advice in alfworld is unknown (its EnvSpec "
                "has no advisor). Set it to 0, or define"
            ),
        ),
    ],
)
def test_evaluations_that_an_environment_does_not_support_are_refused(
    model: str, tmp_path: Path, size: str, said: str, command: str
):
    (tmp_path / "model" / "crl.json").unlink()
    dry = ("--dry-run",) if command == "dry run" else ()
    sets = [
        word for setting in (model, f"tasks.alfworld.eval.{size}=2") for word in ("--set", setting)
    ]
    result = crl(
        "train",
        "--tasks",
        "alfworld",
        "--method",
        "grpo",
        "--run-dir",
        str(tmp_path / "run"),
        *sets,
        *dry,
    )
    assert f"tasks.alfworld.eval.{size} = 2: {said}" in one_line_error(result)
    assert not (tmp_path / "run").exists()


async def bank_of_one_entry(path: Path) -> None:
    database = await Database.open(path)
    database.connection.execute(
        "INSERT INTO entries VALUES "
        "(1, 'e', 1, 'go east', 'room', 'goal', '[]', 'active', x'', '', NULL)"
    )
    await database.aclose()
