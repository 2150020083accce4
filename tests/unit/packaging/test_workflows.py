"""Workflows of the public forge: schema, permissions, and the targets of make that they call."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MORE_PERMISSIONS = {
    ("release.yml", "release"): {"contents": "write"},
    ("release.yml", "publish"): {"id-token": "write"},
}
"""Permissions of the jobs that may do more than read."""
OTHER_COMMANDS = {
    'gh release create "$TAG" dist/* --verify-tag --generate-notes',
    "apt-get update",
    "apt-get install --yes --no-install-recommends chromium",
}
"""Commands that are no targets of make."""

workflows = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def workflow(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text("utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


def test_there_are_workflows() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


@pytest.mark.skipif(
    not find_spec("check_jsonschema"), reason="check-jsonschema is not installed (make setup-dev)"
)
def test_the_files_follow_the_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    done = subprocess.run(
        [*command, "vendor.github-workflows", *map(str, WORKFLOWS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@workflows
def test_jobs_call_targets_of_make(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    commands = {step["run"] for step in steps(path) if "run" in step} - OTHER_COMMANDS
    targets = {re.fullmatch(r"make ([a-z-]+)", command) for command in commands}
    assert targets
    assert [target[1] for target in targets if target and f"\n{target[1]}:" not in makefile] == []
    assert None not in targets


@workflows
def test_expressions_never_reach_a_shell(path: Path) -> None:
    assert [step["run"] for step in steps(path) if "${{" in step.get("run", "")] == []


@workflows
def test_jobs_may_only_read(path: Path) -> None:
    found = workflow(path)
    assert found["permissions"] == {"contents": "read"}
    more = {
        (path.name, name): job["permissions"]
        for name, job in found["jobs"].items()
        if "permissions" in job
    }
    assert more == {key: value for key, value in MORE_PERMISSIONS.items() if key[0] == path.name}


@workflows
def test_jobs_have_a_time_limit(path: Path) -> None:
    assert [
        name for name, job in workflow(path)["jobs"].items() if "timeout-minutes" not in job
    ] == []


@workflows
def test_actions_are_pinned_by_major_version(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    pin = r"(?:actions/[a-z-]+@v\d+|pypa/gh-action-pypi-publish@release/v1)"
    assert [action for action in used if not re.fullmatch(pin, action)] == []
    checkouts = [
        step for step in steps(path) if step.get("uses", "").startswith("actions/checkout")
    ]
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_ci_has_the_python_versions_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = [
        text.rpartition(" :: ")[2]
        for text in project["classifiers"]
        if re.search(r":: 3\.\d+$", text)
    ]
    jobs = workflow(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    for name in ("test", "test-wheel"):
        assert jobs[name]["strategy"]["matrix"]["python"] == versions


def test_ci_has_every_target_of_tests() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    called = {step.get("run") for step in steps(ROOT / ".github" / "workflows" / "ci.yml")}
    targets = {f"make {name}" for name in re.findall(r"^(test[a-z-]*):", makefile, re.MULTILINE)}
    assert targets
    assert targets - called == set()


def test_publishing_is_off_by_default() -> None:
    publish = workflow(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["publish"]
    assert publish["if"] == "vars.PUBLISH_TO_PYPI == 'true'"
