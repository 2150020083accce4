"""Own retrieval policies: a run with one, and errors of references."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from crl.config import load, load_saved
from crl.config.schema import RetrievalSection
from crl.errors import ConfigError
from crl.manager.records import Entry
from crl.manager.retrieval.choice import Candidate, choose_entries
from crl.planning.plan import plan
from crl.records.reader import read_episode_records
from crl.types import Counters, Lift, Place, Provenance
from support.pages import code
from support.paths import ROOT

PAGE = ROOT / "docs" / "bank.md"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Return the file of the example of docs/bank.md."""
    (path := tmp_path / "lift.py").write_text(
        code(PAGE, '"""Retrieval by lift."""') + "\nNUMBER = 3\n"
    )
    return path


def error(choice: str, *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(["room"], sets=[f"retrieval.choice={choice}", *sets])
    return str(caught.value)


def counted(retrieved: int, lift: Lift | None) -> Candidate:
    uid = f"e{retrieved}"
    entry = Entry(
        uid, 1, "Go west.", Place("room", "goal"), Provenance("g", (0, 1)),
        counters=Counters(retrieved=retrieved, lift=lift),
    )  # fmt: skip
    return Candidate(entry, 0.9)


def test_the_example_prefers_lift_and_trials_prefer_rare_entries(policy: Path):
    found = [counted(9, Lift(3, 0.4)), counted(2, Lift(1, 0.5)), counted(1, None)]
    settings = RetrievalSection(choice=f"{policy}:POLICY")
    rng = partial(random.Random, 0)
    (chosen,), (trial,) = (
        choose_entries(found, 0, rng, settings, trial=trial) for trial in (False, True)
    )
    assert (chosen.uid, trial.uid) == ("e9", "e1")  # 0.4 · 3/4 = 0.3 > 0.5 · 1/2 = 0.25 > 0


@pytest.mark.parametrize("scores", ["[]", "[1.0, 2.0, 3.0]", "[float('nan'), 1.0]"])
def test_scores_that_cannot_be_used_are_refused(tmp_path: Path, scores: str):
    (path := tmp_path / "own.py").write_text(
        "from crl.config.retrieval import RetrievalPolicy\n"
        f"POLICY = RetrievalPolicy(lambda found, step, settings: {scores}, 'by nothing')"
    )
    found, settings = (
        [counted(9, None), counted(2, None)],
        RetrievalSection(choice=f"{path}:POLICY"),
    )
    with pytest.raises(ConfigError, match="must return 1 to 2 finite scores for 2 candidates, not"):
        choose_entries(found, 0, partial(random.Random, 0), settings)


def test_a_run_retrieves_by_an_own_policy(policy: Path, tmp_path: Path):
    reference = f"{policy}:POLICY"
    sets = (
        *("rollout.groups=2", "rollout.group_size=4", "eval.probe_every=0"),
        *(f"tasks.room.eval.{name}=0" for name in ("seen", "unseen", "online_places")),
        *("tasks.room.stream.places=1", "tasks.room.stream.permanent=1"),
        *("run.deterministic=true", "rollout.max_staleness=0"),
        f"retrieval.choice={reference}",
    )
    command = [sys.executable, "-m", "crl", "train", "--tasks", "room", "--steps", "3", "--plain"]
    words = [word for text in sets for word in ("--set", text)]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run"), *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "by lift; 50 % of searches choose the least retrieved one" in plan(
        load(["room"], sets=sets)
    )
    assert any(episode["used"] for episode in read_episode_records(tmp_path / "run"))
    assert load_saved(tmp_path / "run").config.retrieval.choice == reference


def test_a_relative_path_is_made_absolute(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = load(["room"], sets=["retrieval.choice=lift.py:POLICY"])
    assert config.retrieval.choice == f"{policy}:POLICY"


def test_errors_name_the_key_and_the_remedy(policy: Path):
    assert "retrieval.choice = 'divers': is not a retrieval policy" in error("divers")
    assert "diverse" in error("divers")
    assert "'NUMBER' of" in error(f"{policy}:NUMBER")
    assert "there is no such file" in error(f"{policy.parent}/none.py:POLICY")


def test_a_policy_without_trials_refuses_a_share_of_trials():
    assert '"diverse" has no trials' in error("diverse", "retrieval.trial_share=0.5")


def test_a_method_without_experience_ignores_the_policy(tmp_path: Path):
    missing = f"retrieval.choice={tmp_path}/none.py:POLICY"
    assert load(["room"], options={"method": "grpo"}, sets=[missing])
