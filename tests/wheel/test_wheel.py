"""The wheel in dist, installed with constraints.txt into a new environment outside the tree.

`make test-wheel` builds the wheel and runs these tests. The installation downloads torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.wheel

EVALUATIONS = ("seen=8", "unseen=8", "online_places=0")


class Installed:
    """Environment with the wheel, and an empty working directory."""

    def __init__(self, folder: Path) -> None:
        self._python = folder / "venv" / "bin" / "python"
        self.here = folder / "here"
        self.here.mkdir()
        # Neither the tree nor files of the user are visible.
        kept = ("PATH", "LANG", "TMPDIR", "OMP_NUM_THREADS")
        self._environment = {name: os.environ[name] for name in kept if name in os.environ}
        self._environment |= {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)

    def install(self, wheel: Path) -> None:
        """Install a wheel with the settings and the cache of the user's pip."""
        options = ["--quiet", str(wheel), "--constraint", str(ROOT / "constraints.txt")]
        environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
        self._run(["-m", "pip", "install", *options], environment)

    def python(self, *arguments: str) -> str:
        """Run Python. Return its output."""
        return self._run(arguments, self._environment)

    def crl(self, *arguments: str) -> str:
        """Run the installed command. Return its output."""
        code = "import sys; sys.argv[0] = 'crl'; from crl.cli.main import main; main()"
        return self.python("-c", code, *arguments)

    def _run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
        done = subprocess.run(
            [str(self._python), *arguments],
            cwd=self.here,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    wheels = list((ROOT / "dist").glob("*.whl"))
    assert len(wheels) == 1, "run `make wheel` first"
    environment = Installed(tmp_path_factory.mktemp("wheel"))
    environment.install(wheels[0])
    return environment


def test_the_package_is_that_of_the_environment(installed: Installed) -> None:
    path = installed.python("-c", "import crl; print(crl.__file__)")
    assert "site-packages" in path
    assert str(ROOT) not in path


def test_the_command_is_installed(installed: Installed) -> None:
    program = "import os, sys; print(os.path.join(os.path.dirname(sys.executable), 'crl'))"
    done = subprocess.run(
        [installed.python("-c", program).strip(), "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("crl ")


def test_the_machine_can_train(installed: Installed) -> None:
    assert "fail" not in installed.crl("doctor").split()


def test_tasks_presets_and_models_are_found(installed: Installed) -> None:
    found = json.loads(installed.crl("tasks", "--json"))
    shipped = {path.stem for path in (ROOT / "tasks").glob("*.toml")}
    assert {task["name"] for task in found["tasks"]} | found["mixtures"].keys() == shipped
    assert "# gpu1.toml" in installed.crl("config", "show", "--tasks", "room", "--preset", "gpu1")
    models = installed.crl("models", "list")
    assert "tiny-actor" in models
    assert "tiny-extractor" in models


def test_files_of_a_new_task_are_written_from_the_templates(installed: Installed) -> None:
    installed.crl("new-task", "hidden_door")
    names = {path.name for path in (installed.here / "hidden_door").iterdir()}
    assert names == {"hidden_door.py", "hidden_door.toml", "test_hidden_door.py"}


def test_it_trains_in_an_empty_directory(installed: Installed) -> None:
    sets = [f"tasks.room.eval.{setting}" for setting in EVALUATIONS]
    options = [word for key in [*sets, "eval.probe_every=0"] for word in ("--set", key)]
    installed.crl(
        "train", "--tasks", "room", "--steps", "2", "--plain", "--run-dir", "runs/first", *options
    )
    lines = (installed.here / "runs" / "first" / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2]
    assert installed.crl("bank", "ls", "runs/first", "--limit", "1").count("\n") == 2
