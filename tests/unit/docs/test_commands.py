"""Commands of the documentation, run on a machine without a GPU and without downloaded models.

`crl train` runs with `--dry-run`, and `crl bank` on the bank of a small finished run. `crl play`
waits for no input.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path, PurePath

import pytest
from typer.testing import CliRunner, Result

from crl.cli.main import app
from crl.cli.new_task import write_task
from crl.config.models import resolve_model
from support.bank_commands import finished_run
from support.pages import PAGES, blocks, code, commands
from support.paths import ROOT

NOT_RUN = {
    "crl sft --preset smollm2 --from drills --role extractor --tasks room --demonstrations 2000 "
    "--epochs 1 --batch-tokens 1024 --learning-rate 2e-4 --decay --run-dir runs/sft2": (
        "downloads a model; see tests/engines/test_smollm2.py"
    ),
    "crl sft --preset smollm2 --from drills --tasks room --demonstrations 1000 --epochs 1 "
    "--batch-tokens 1024 --learning-rate 2e-4 --decay --run-dir runs/sft1": (
        "downloads a model; see tests/engines/test_smollm2.py"
    ),
    "crl sft --preset smollm2 --from drills --tasks room --demonstrations 200 --epochs 1 "
    "--batch-tokens 1024 --learning-rate 5e-5 --run-dir runs/sft": (
        "downloads a model; see tests/engines/test_smollm2.py"
    ),
    "crl sft --from scripted --tasks room --run-dir runs/sft": (
        "trains; see tests/integration/test_sft.py"
    ),
    "crl doctor --preset gpu1": "checks this machine; see tests/unit/planning/test_doctor.py",
    "crl doctor --preset node8": "checks this machine; see tests/unit/planning/test_doctor.py",
    "crl resume runs/first --steps 6": "needs a trained run; see tests/integration/test_resume.py",
    "crl fork runs/first runs/other --set actor.optimizer.learning_rate=1e-5": (
        "needs a trained run; see tests/integration/test_resume.py"
    ),
    "crl episodes runs/first --failed --limit 10": "needs a trained run; see test_episodes.py",
    "crl replay runs/first --guided --tokens": "needs a trained run; see test_episodes.py",
    "crl replay runs/first run/2/47/3": "needs a trained run; see test_episodes.py",
    "crl rollout --tasks room --steps 2 --run-dir runs/played": (
        "plays for a while; see tests/integration/test_halves.py"
    ),
    "crl learn --from runs/played --run-dir runs/learned --set "
    "actor.optimizer.learning_rate=1e-4": "needs episodes; see tests/integration/test_halves.py",
    "crl learn --from runs/played/episodes/000002.jsonl.gz --run-dir runs/second": (
        "needs episodes; see tests/integration/test_halves.py"
    ),
    "crl models get smollm2": "downloads; see tests/unit/modeling/test_importing.py",
    "crl export runs/first models/mine": "needs a run; see tests/integration/test_resume.py",
    "crl eval runs/first": "needs a trained run; see tests/integration/test_complementary.py",
    "crl eval runs/first --samples 4": "needs a trained run; see tests/integration/test_eval.py",
    "crl eval runs/first --step 3 --experience bank --temperature 0": (
        "needs a trained run; see tests/integration/test_eval.py"
    ),
    "crl eval models/mine --tasks room,webshop --samples 8 --out results/mine": (
        "needs a trained model; see tests/integration/test_eval.py"
    ),
    "crl eval runs/first --show": "needs a trained run; see tests/integration/test_eval.py",
    "crl compare runs/first runs/other": ("needs trained runs; see tests/integration/test_eval.py"),
    "crl report runs/first": "needs a trained run; see tests/unit/report/test_report.py",
    "crl report runs/a0 runs/a1 runs/b0 --out ab.html": (
        "needs trained runs; see tests/unit/report/test_report.py"
    ),
    "crl plot runs/first --what time": "needs a trained run; see tests/unit/report/test_plot.py",
    "crl plot runs/a0 runs/a1 runs/b0 --what success --out success.svg": (
        "needs trained runs; see tests/unit/report/test_plot.py"
    ),
    "crl serve runs": "ends with Ctrl-C; see tests/unit/serve/test_server.py",
    "crl serve runs/first": "ends with Ctrl-C; see tests/unit/serve/test_server.py",
    "crl serve runs --port 0": "ends with Ctrl-C; see tests/unit/serve/test_server.py",
    "crl serve runs --host 0.0.0.0": "ends with Ctrl-C; see tests/unit/serve/test_server.py",
    "crl make-models --out models": "takes hours; see tests/integration/test_make_models.py",
    "crl --install-completion": "changes the configuration of a shell; see test_completion.py",
    "crl --show-completion": "depends on the shell; see test_completion.py",
    "crl bank failures RUN": "see tests/integration/test_role_agent.py",
    "crl bank failures runs/mine": "see tests/integration/test_role_agent.py",
    "crl bank failures runs/mine --mode premature_give_up": (
        "needs a run of role_agent; see tests/integration/test_role_agent.py"
    ),
    "crl bank build --from RUN": "needs episodes; see tests/integration/test_bank_build.py",
    "crl bank build --from runs/mine --run-dir runs/offline": (
        "needs episodes; see tests/integration/test_bank_build.py"
    ),
}
"""Commands that these tests do not run, and the reason."""
EXIT_CODES = {"crl train --preset node8 --tasks three --set gpus=2 --dry-run": 2}
"""Exit codes of commands that end with an error. Those of all others are 0."""
EXTRAS = {
    "--tasks three": "alfworld",
    "--tasks scienceworld": "scienceworld",
    "learner.kind=deepspeed": "deepspeed",
    "engine.kind=vllm": "vllm",
}
"""Extra that a command needs if it contains a text."""
SAMPLE_ENDS = {
    "crl play room --scripted --rendering compact --split unseen --episodes 256": (
        "won 149 of 256 episodes"
    ),
}
"""Last lines of samples in docs/tasks.md."""
PLACEHOLDERS = {
    "RUN": "runs/mine",
    "RUN_A": "runs/mine",
    "RUN_B": "runs/first",
    "4/67/2#0": "0/0/0#0",
    "2/36/1#0": "0/0/0#0",
    "actor.model=PATH": "actor.model=language_model",
    "extractor.model=PATH": "extractor.model=language_model",
    "embedder.model=PATH": "embedder.model=encoder",
    "prompts.distil=FILE": "prompts.distil=distil.txt",
    "retrieval.choice=package.module:POLICY": "retrieval.choice=lift:POLICY",
}
"""Words of commands that stand for others, and the words to run instead."""
ANSWERS = {"prune": "y\n"}
"""Input of commands that ask a question."""


def documented(*names: str) -> list[str]:
    """Return the commands of crl with these names in all pages, each once; without names all."""
    found = (words for page in PAGES for words in commands(page))
    texts = [
        shlex.join(["crl", *words[1:]])
        for words in found
        if PurePath(words[0]).name == "crl" and words[1] in (names or words)
    ]
    return list(dict.fromkeys(texts))


def run(command: str, *options: str) -> Result:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)[1:]]
    text = ANSWERS.get(words[1] if len(words) > 1 else "")
    return CliRunner().invoke(app, [*words, *options], input=text)


@pytest.fixture(scope="module")
def material(
    tmp_path_factory: pytest.TempPathFactory, random_qwen3: Path, random_bert: Path
) -> Path:
    """Return a folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "lift.py").write_text(code(ROOT / "docs" / "bank.md", '"""Retrieval by lift."""'))
    turn_cost = code(ROOT / "docs" / "methods.md", '"""GRPO with a cost for each turn."""')
    (folder / "turn_cost.py").write_text(turn_cost)
    shutil.copy(ROOT / "crl" / "prompts" / "distil.txt", folder)
    (folder / "encoder").symlink_to(random_bert)
    (folder / "runs" / "sft").mkdir(parents=True)
    (folder / "runs" / "sft" / "actor").symlink_to(resolve_model("tiny-actor"))
    (folder / "runs" / "sft1").mkdir()
    (folder / "runs" / "sft1" / "actor").symlink_to(resolve_model("tiny-actor"))
    (folder / "runs" / "sft2").mkdir()
    (folder / "runs" / "sft2" / "extractor").symlink_to(resolve_model("tiny-extractor"))
    shutil.copytree(random_qwen3, folder / "language_model")
    config = folder / "language_model" / "config.json"
    longer = json.loads(config.read_text()) | {"max_position_embeddings": 65536}
    config.write_text(json.dumps(longer))
    write_task("my_task", folder)
    finished_run(folder / "runs" / "mine")
    (folder / "runs" / "offline").symlink_to("mine")  # stands for the output of `crl bank build`
    return folder


@pytest.fixture
def folder(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of `material`, as working directory of a machine without GPUs and models.

    Models and games in the cache of the user are not found.
    """
    shutil.copytree(material, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "here"


@pytest.mark.parametrize("command", documented("train"))
def test_dry_runs_of_training(command: str, folder: Path) -> None:
    if "--run-dir" in command:
        shutil.rmtree("runs")  # the directory of a new run must be empty
    result = run(command, *([] if "--dry-run" in command else ["--dry-run"]))
    if any(word in command and not find_spec(extra) for word, extra in EXTRAS.items()):
        missing = re.search("it needs the extra|'smollm2': is not downloaded", result.stderr)
        assert (result.exit_code, bool(missing)) == (2, True), result.stderr
    else:
        assert result.exit_code == EXIT_CODES.get(command, 0), result.stderr


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("crl train --preset node8 --tasks three --dry-run", "── GPUs ──"),
        ("crl train --preset node8 --tasks three --set gpus=2 --dry-run", "fits: --set gpus=3"),
    ],
)
def test_samples_of_the_gpu_plan_are_printed(command: str, line: str, folder: Path) -> None:
    pytest.importorskip("alfworld")
    (sample,) = (text for _, text in blocks(ROOT / "docs" / "gpus.md") if f"\n{line}\n" in text)
    plan = sample.partition("\n── missing on this machine ──\n")[0]  # depends on the machine
    result = run(command)
    printed = [*result.output.splitlines(), *result.stderr.splitlines(), "…"]
    assert [text for text in plan.splitlines() if text not in printed] == []


@pytest.mark.parametrize(
    ("gib", "options", "exit_code"),
    [(43, "", 0), (42, "", 2), (22, " --method grpo", 0), (21, " --method grpo", 2)],
)
def test_gpu1_needs_the_documented_memory(
    gib: int, options: str, exit_code: int, folder: Path
) -> None:
    assert "a GPU of 43 GiB (22 GiB)" in (ROOT / "docs" / "gpus.md").read_text("utf-8")
    command = f"crl train --preset gpu1 --tasks room --dry-run --set gpu_memory={gib}{options}"
    assert run(command).exit_code == exit_code


@pytest.mark.parametrize(
    "command", [command for command in documented("bank") if command not in NOT_RUN]
)
def test_commands_of_banks(command: str, folder: Path) -> None:
    shutil.copytree("runs/mine", "runs/first")
    exported = run("crl bank export RUN").output
    Path("lessons.jsonl").write_text(exported, "utf-8")
    if " import " in command:
        assert run("crl bank export RUN --format markdown --out lessons.md").exit_code == 0
        assert run("crl bank export RUN --format skills --out skills").exit_code == 0
    if " import " not in command:
        assert run("crl bank import new.sqlite lessons.jsonl").exit_code == 0
    result = run(command)
    assert (result.exit_code, "error" in result.stderr) == (0, False)


@pytest.mark.parametrize("command", documented("new-task", "play", "tasks"))
def test_other_commands(command: str, folder: Path) -> None:
    if "new-task" in command:
        shutil.rmtree("my_task")
    result = run(command)
    assert (result.exit_code, result.stderr) == (0, "")
    if "--scripted" in command:
        assert "\nwon in" in result.output
    if sample := SAMPLE_ENDS.get(command):
        assert result.output.splitlines()[-1] == sample
        assert f"\n{sample}\n" in (ROOT / "docs" / "tasks.md").read_text("utf-8")


def test_a_command_that_is_not_run_has_a_reason() -> None:
    tested = {*documented("train", "bank", "new-task", "play", "tasks")} - NOT_RUN.keys()
    assert set(documented()) - tested == NOT_RUN.keys()
