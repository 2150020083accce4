"""Rules for imports between the packages.

Imports go downward only. Concrete classes are named in one place. The command line starts without
torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crl.config.load import dump, load
from crl.config.method import BUNDLED_METHODS
from support.paths import ROOT

RANKS = {
    **dict.fromkeys(
        [
            "crl",
            "crl.types",
            "crl.errors",
            "crl.failures",
            "crl.seeds",
            "crl.intervals",
            "crl.plugins",
            "crl.wording",
        ],
        0,
    ),
    **dict.fromkeys(
        ["crl.protocols", "crl.child_processes", "crl.config", "crl.extras", "crl.scratch"], 1
    ),
    **dict.fromkeys(["crl.modeling", "crl.algo", "crl.envs", "crl.monitor", "crl.prompts"], 2),
    **dict.fromkeys(["crl.manager", "crl.engines", "crl.learners", "crl.records"], 3),
    **dict.fromkeys(["crl.rollout", "crl.embedders"], 4),
    **dict.fromkeys(["crl.methods", "crl.evaluation"], 5),
    **dict.fromkeys(["crl.planning", "crl.report", "crl.tiny"], 6),
    **dict.fromkeys(["crl.run", "crl.serve"], 7),
    "crl.cli": 8,
    "crl.__main__": 9,
}
"""Rank of every package.

A package may import itself and packages of strictly lower ranks. Packages of rank 0 may also import
each other. A new package must be added here.
"""

SHARED = {
    "crl.engines": frozenset({"backends", "background", "vllm_replica"}),
    "crl.learners": frozenset({"backends", "optimizer_file", "step"}),
    "crl.methods": frozenset[str](),
    "crl.embedders": frozenset({"blocking", "cached"}),
    "crl.envs": frozenset(
        {"actions", "base", "curriculum", "hosting", "mixture", "registry", "seeded"}
    ),
}
"""Packages of concrete classes. The listed modules may be imported by other packages too."""

ASSEMBLERS = {"crl.planning.context", "crl.tiny"}
"""Modules and packages that may name concrete engines, learners, methods and environments."""

CURRICULUM = frozenset({"curriculum", "lessons", "oracle", "player"})
"""Names of the modules in `crl.envs` that only serve tiny models and diagnostics.

The other modules of an environment are its core: game, tasks and texts. They must not import these
modules. The package of an environment declares them, in its `__init__.py`. `crl.tiny` uses them.
"""


# ── the rule ──────────────────────────────────────────────────────────────────────────────────────


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = sorted((ROOT / "crl").rglob("*.py"))
MODULES = {module_name(path) for path in PATHS}
PACKAGES = {module_name(path) for path in PATHS if path.name == "__init__.py"}


def package(module: str) -> str:
    """Return the top-level package that contains `module`. Example: crl.run.loop → crl.run."""
    return ".".join(module.split(".")[:2])


def imported(module: str, source: str) -> Iterator[str]:
    """Yield every crl module that `source`, the text of `module`, imports.

    Nested imports and imports for type checking are included.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = list(from_import(module, node))
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "crl")


def from_import(module: str, node: ast.ImportFrom) -> Iterator[str]:
    """Yield the modules that `from A import b` imports.

    The module is A.b if A.b is a module, else A. Relative imports are resolved from `module`.
    """
    package = module if module in PACKAGES else module.rpartition(".")[0]
    parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
    origin = ".".join([*parents, *([node.module] if node.module else [])])
    for alias in node.names:
        submodule = f"{origin}.{alias.name}"
        yield submodule if submodule in MODULES or submodule in RANKS else origin


def fault(module: str, target: str) -> str | None:
    """Return the reason why `module` may not import `target`, or None if it may."""
    source_package, target_package = package(module), package(target)
    for name in (source_package, target_package):
        if name not in RANKS:
            return f"{name} has no rank: place it in RANKS"
    if is_curriculum(target) and not may_use_curriculum(module, target):
        return f"the core of an environment does not use its curriculum, such as {target}"
    if source_package == target_package:
        return None
    ranks = RANKS[source_package], RANKS[target_package]
    if ranks[0] <= ranks[1] and ranks != (0, 0):
        return (
            f"{source_package} (rank {ranks[0]}) may not import {target_package} (rank {ranks[1]})"
        )
    if is_concrete(target) and not {module, source_package} & ASSEMBLERS:
        return (
            f"only {' and '.join(sorted(ASSEMBLERS))} name concrete classes, such as those of "
            f"{target}"
        )
    return None


def is_concrete(module: str) -> bool:
    parts = module.split(".")
    return len(parts) > 2 and package(module) in SHARED and parts[2] not in SHARED[package(module)]


def is_curriculum(module: str) -> bool:
    return package(module) == "crl.envs" and module.rpartition(".")[2] in CURRICULUM


def may_use_curriculum(module: str, target: str) -> bool:
    """Return whether `module` may import `target`, a module of the curriculum.

    Packages other than `crl.envs` may import its interfaces.
    """
    if package(module) == "crl.envs":
        return is_curriculum(module) or module in PACKAGES or module == "crl.envs.base"
    return package(module) == "crl.tiny" or target == "crl.envs.curriculum"


def faults(module: str, source: str) -> list[str]:
    found = ((target, fault(module, target)) for target in imported(module, source))
    return [f"{module} → {target}: {reason}" for target, reason in found if reason]


def test_imports_go_downward_only():
    assert [text for path in PATHS for text in faults(module_name(path), path.read_text())] == []


def test_every_package_has_a_rank():
    assert {package(module) for module in MODULES} - set(RANKS) == set()


def test_every_folder_is_a_package():
    """A folder without this file, or one that git ignores, would be missing in a wheel."""
    assert {path.parent for path in PATHS if not (path.parent / "__init__.py").exists()} == set()


# ── tests of the rule ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("crl.run.loop", "from crl.rollout.collector import Collector"),
        ("crl.run.loop", "from crl.envs.registry import load"),
        ("crl.run.assemble", "from crl.engines.backends import open_engine"),
        ("crl.planning.context", "from crl.methods.parts.asking import full_tool"),
        ("crl.tiny.recipe", "from crl.learners.local import LocalLearner"),
        ("crl.methods.grpo", "from crl.methods.parts.rollouts import OutcomeReward"),
        ("crl.modeling.tokens", "from crl.modeling import loading"),
        ("crl.types", "from crl.errors import CrlError"),
        ("crl.envs.room", "from crl.envs.room.player import RoomPlayer"),
        ("crl.envs.maze", "def late():\n    from crl.envs.maze.oracle import small_layout"),
        ("crl.envs.room.lessons", "from crl.envs.room.player import possible_stairs"),
        ("crl.tiny.drills.room", "from crl.envs.room import lessons"),
        ("crl.evaluation.probe", "from crl.envs.curriculum import Advisor"),
        ("crl.protocols", "import crl.types"),
        (
            "crl.cli.main",
            "import crl\nfrom crl import __version__\nfrom . import dashboard\nimport torch",
        ),
    ],
)
def test_the_rule_allows(module, source):
    assert faults(module, source) == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        (
            "crl.types",
            "from crl.protocols import Engine",
            "crl.types (rank 0) may not import crl.protocols (rank 1)",
        ),
        (
            "crl.config.schema",
            "from crl.protocols import Engine",
            "crl.config (rank 1) may not import crl.protocols (rank 1)",
        ),
        (
            "crl.modeling.loading",
            "from crl.manager.records import Entry",
            "crl.modeling (rank 2) may not import crl.manager (rank 3)",
        ),
        (
            "crl.envs.hosting.threads",
            "def late():\n    import crl.algo.losses",
            "crl.envs (rank 2) may not import crl.algo (rank 2)",
        ),
        (
            "crl.manager.storage.store",
            "import crl.engines.torch",
            "crl.manager (rank 3) may not import crl.engines (rank 3)",
        ),
        (
            "crl.algo.losses",
            "if TYPE_CHECKING:\n    from crl import run",
            "crl.algo (rank 2) may not import crl.run (rank 7)",
        ),
        (
            "crl.algo",
            "from ..engines import torch",
            "crl.algo (rank 2) may not import crl.engines (rank 3)",
        ),
        (
            "crl.algo.losses",
            "from ..rollout.gate import Gate",
            "crl.algo (rank 2) may not import crl.rollout (rank 4)",
        ),
        (
            "crl.run.loop",
            "from crl.cli import main",
            "crl.run (rank 7) may not import crl.cli (rank 8)",
        ),
        (
            "crl.run.loop",
            "from crl.learners.local import LocalLearner",
            "name concrete classes",
        ),
        (
            "crl.cli.main",
            "from crl.methods.grpo import build",
            "name concrete classes",
        ),
        (
            "crl.rollout.episode",
            "from crl.envs.room import Room",
            "name concrete classes",
        ),
        (
            "crl.envs.room.game",
            "def late():\n    from crl.envs.room import player",
            "the core of an environment does not use its curriculum",
        ),
        (
            "crl.envs.webshop.tasks",
            "from crl.envs.curriculum import Advisor",
            "the core of an environment does not use its curriculum",
        ),
        (
            "crl.run.assemble",
            "from crl.envs.room.lessons import digest",
            "the core of an environment does not use its curriculum",
        ),
        ("crl.attic.box", "import crl.types", "crl.attic has no rank"),
        ("crl.cli.main", "import crl.attic", "crl.attic has no rank"),
    ],
)
def test_the_rule_refuses(module, source, reason):
    (text,) = faults(module, source)
    assert reason in text


# ── imports without torch ─────────────────────────────────────────────────────────────────────────

HEAVY = ("torch", "transformers", "vllm", "deepspeed")


@pytest.mark.parametrize(
    "statement",
    [
        "import crl.manager",
        "import crl.embedders",
        "import crl.cli.main",
        "import crl.config",
        "import crl.envs.hosting.threads",
        "import crl.planning.context",
        "import crl.cli.play",
        "import crl.cli.tasks",
        "import crl.monitor.sinks",
        "import crl.planning.gpu_plan",
        "import crl.planning.doctor",
        "import crl.planning.plan",
        "import crl.planning.preflight",
        "import crl.algo",
        "from crl.algo import critic_reward, diversity_score, training_weight",
        "from crl.algo import micro_batches, optimizer_minibatches",
    ],
)
def test_it_imports_without_torch(statement):
    _assert_without_torch(statement)


@pytest.mark.parametrize("run", ["train", "resume"])
def test_the_screen_opens_before_torch_is_imported(run: str, tmp_path: Path):
    """The import of torch takes seconds, in which the screen shows the stage."""
    (tmp_path / "run").mkdir()
    dump(load(["room"]), tmp_path / "run" / "config.json")
    options = {
        "train": ["train", "--tasks", "room", "--run-dir", str(tmp_path / "new")],
        "resume": ["resume", str(tmp_path / "run"), "--steps", "200"],
    }
    statement = (
        "from crl.cli import main\n"
        "class Opened(BaseException): pass\n"
        "def screen(*_): raise Opened\n"
        "main._screen = screen\n"
        f"try: main.app({options[run]!r}, standalone_mode=False)\n"
        "except Opened: pass\n"
        "else: raise AssertionError('no screen')"
    )
    _assert_without_torch(statement)


@pytest.mark.parametrize("name", BUNDLED_METHODS)
def test_a_method_is_short(name: str):
    """A method only names its parts and settings; trainer code belongs elsewhere."""
    text = (ROOT / "crl" / "methods" / f"{name}.py").read_text("utf-8")
    assert len(text.splitlines()) < 150


def _assert_without_torch(statement: str):
    report = f"import sys\n{statement}\nprint(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", report],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
