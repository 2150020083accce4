"""Checks before a run: the run and the dry run refuse the same, with the same text."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crl.config.load import dump, load
from crl.config.models.packaged import imported_folder
from crl.config.models.shapes import require_context
from crl.config.schema import RunConfig
from crl.errors import ConfigError
from crl.manager.storage.database import Database
from crl.modeling.loading import load_tokenizer
from crl.modeling.memory import GIB
from crl.modeling.tokenizer_files import read_tokenizer
from crl.modeling.tokens import ChatRenderer
from crl.monitor.plain import PlainMonitor
from crl.monitor.run_dir import RunDir
from crl.planning import doctor, gpu_plan, machine_checks, model_checks, preflight
from crl.planning import plan as plan_module
from crl.planning.gpus import Gpu
from crl.planning.plan import dry_run, overview
from crl.planning.preflight import require_tasks
from crl.run import main
from crl.types import Segment


@pytest.fixture(autouse=True)
def no_gpus_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Hide the GPUs, the model cache and DeepSpeed and vLLM of the machine that runs the tests."""
    for module in (gpu_plan, machine_checks, plan_module, doctor):
        monkeypatch.setattr(module, "visible_gpus", list)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    set_installed(monkeypatch, {"deepspeed": False, "vllm": False, "wandb": False})


def set_installed(monkeypatch: pytest.MonkeyPatch, installed: dict[str, bool]) -> None:
    """Set which packages seem to be installed."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        if name in installed:
            return object() if installed[name] else None
        return real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def refusals(config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the texts with which the dry run and the run refuse `config`.

    The run must refuse before its directory is created, so before a model is loaded.
    """

    def never(path: Path) -> RunDir:
        raise AssertionError("the run was started")

    monkeypatch.setattr(RunDir, "create", never)
    with pytest.raises(ConfigError) as dry:
        dry_run(config, lambda text: None)
    with pytest.raises(ConfigError) as run:
        main.train(config, folder / "run", command="", screen=PlainMonitor())
    for error in (dry.value, run.value):
        assert error.key
        assert error.reason
        assert error.remedy
    return str(dry.value), str(run.value)


def refused(config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    dry, run = refusals(config, folder, monkeypatch)
    assert dry == run
    return dry


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["prompts.distil={folder}/none"], "prompts.distil = '{folder}/none': cannot be read"),
        (["prompts.distil={prompt}"], "is not used by any model of this run"),
        (
            ["tasks.room.rendering=full"],
            "reads only the compact rendering, but tasks.room.rendering is full. Remove --set "
            "tasks.room.rendering, or this setting in your preset.",
        ),
        (["bank.evict_votes=2"], "was not trained to vote"),
        (
            ["method=reflexion", "tasks.room.rendering=full"],
            "actor.model = 'tiny-actor': reads only the compact rendering",
        ),
        (["bank.init={prompt}"], "bank.init = '{prompt}': it is not a bank of crl"),
        (
            ["actor.max_context_tokens=1025"],
            "actor.max_context_tokens = 1025: exceeds the context of the model, which is 1024 "
            "tokens. Choose at most 1024.",
        ),
        (
            ["extractor.max_context_tokens=2048"],
            "extractor.max_context_tokens = 2048: exceeds the context of the model",
        ),
        (
            ["extractor.merge_every=5", "extractor.merge_tokens=980"],
            "extractor.merge_tokens = 980: does not fit into the extractor's context: its 1024 "
            "tokens also hold 9 tokens of the merge prompt and 40 tokens of the answer. Choose at "
            "most 975, or raise extractor.max_context_tokens.",
        ),
        (["embedder.model={folder}/none"], "is not hash, wordllama, a URL or a directory"),
        (
            ["embedder.model=Qwen/X"],
            "embedder.model = 'Qwen/X': is not hash, wordllama, a URL or a directory. Use hash, "
            "wordllama, the URL of an endpoint, or a directory with an encoder in Hugging Face "
            "format (crl does not download models from hubs); or download it: hf download Qwen/X.",
        ),
        (
            ["embedder.model=http://localhost:9", "embedder.name=m", "embedder.key_env=NO_SUCH"],
            "embedder.key_env = 'NO_SUCH': this environment variable is not set",
        ),
    ],
)
def test_settings(
    sets: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt").write_text(Path("crl/prompts/distil.txt").read_text("utf-8"), "utf-8")
    names = {"folder": tmp_path, "prompt": tmp_path / "prompt"}
    config = load(["room"], sets=[text.format(**names) for text in sets])
    assert message.format(**names) in refused(config, tmp_path, monkeypatch)


def test_a_full_chunk_fits_exactly(tmp_path: Path) -> None:
    sets = ["extractor.merge_every=5", "extractor.merge_tokens={}"]
    preflight.require(load(["room"], sets=[text.format(975) for text in sets]))
    with pytest.raises(ConfigError, match=r"merge_tokens = 976"):
        preflight.require(load(["room"], sets=[text.format(976) for text in sets]))


async def bank_of(path: Path, *tasks: str) -> None:
    database = await Database.open(path)
    for number, task in enumerate(tasks, start=1):
        database.connection.execute(
            "INSERT INTO entries VALUES "
            "(?, ?, 1, 'go east', ?, 'goal', '[]', 'active', x'', '', NULL)",
            (number, f"e{number}", task),
        )
    await database.aclose()


def test_a_bank_of_other_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = tmp_path / "bank.sqlite"
    asyncio.run(bank_of(bank, "webshop", "maze"))
    for frozen, scope in (("true", "task"), ("false", "task"), ("true", "goal")):
        sets = [f"bank.init={bank}", f"bank.frozen={frozen}", f"bank.scope={scope}"]
        assert refused(load(["room"], sets=sets), tmp_path, monkeypatch) == (
            f"bank.init = '{bank}': its experiences are of other tasks (maze, webshop) than the "
            f"run's (room), and with bank.scope={scope} they guide no episode. Use the bank of a "
            "run of these tasks, or add --set bank.scope=shared."
        )
    preflight.require(load(["room"], sets=[f"bank.init={bank}", "bank.scope=shared"]))
    asyncio.run(bank_of(tmp_path / "both", "webshop", "room"))
    preflight.require(load(["room"], sets=[f"bank.init={tmp_path / 'both'}"]))
    asyncio.run(bank_of(tmp_path / "empty"))
    preflight.require(load(["room"], sets=[f"bank.init={tmp_path / 'empty'}"]))


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def change_json(file: str, **changes: Any) -> Callable[[Path], None]:
    """Return a function that changes values of a JSON file of a model."""

    def change(model: Path) -> None:
        settings = json.loads((model / file).read_text("utf-8")) | changes
        (model / file).write_text(json.dumps(settings), "utf-8")

    return change


def rewrite(file: str, text: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / file).write_text(text, "utf-8")

    return change


def remove(*files: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for file in files:
            (model / file).unlink()

    return change


BROKEN_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no template": (remove("chat_template.jinja"), "its tokenizer has no chat template"),
    "bad template": (rewrite("chat_template.jinja", "{% if %}"), "cannot be rendered"),
    "template of one turn": (
        rewrite(
            "chat_template.jinja",
            "{% if messages|length > 2 %}{{ raise_exception('One turn only') }}{% endif %}"
            "{% for m in messages %}{{ m.content }}{% endfor %}",
        ),
        "in turn (TemplateError: One turn only). Fix chat_template.jinja",
    ),
    "no stop token": (
        change_json("tokenizer_config.json", eos_token=None, tokenizer_class="TokenizersBackend"),
        "its tokenizer has no eos_token",
    ),
    "no tokenizer": (
        remove("tokenizer.json", "tokenizer_config.json"),
        "the directory contains no tokenizer. Put the tokenizer's files in this directory",
    ),
    "no vocabulary": (
        remove("tokenizer.json"),
        "Put the tokenizer's files in this directory",
    ),
    "bad generation config": (
        rewrite("generation_config.json", "{"),
        "its generation_config.json cannot be read",
    ),
    "no weights": (remove("model.safetensors"), "the directory contains no weights"),
    "torn weights": (rewrite("model.safetensors", "torn off"), "is not a safetensors file"),
    "a file missing": (
        rewrite(
            "model.safetensors.index.json",
            '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}',
        ),
        "its checkpoint lacks the file model-00001-of-00002.safetensors (1 in total)",
    ),
    "sliding windows": (
        change_json(
            "config.json", sliding_window=8, num_hidden_layers=4,
            layer_types=["full_attention", "sliding_attention"] * 2,
        ),
        "only full attention is supported, but the model has layers of sliding_attention",
    ),
    "bad config": (rewrite("config.json", "{"), "the model cannot be loaded"),
    "another kind": (
        rewrite("config.json", '{"model_type": "t5"}'),
        "T5Config is not a causal language model",
    ),
    "few positions": (
        change_json("config.json", max_position_embeddings=64),
        "max_context_tokens = 1024: exceeds the context of the model, which is 64 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("role", ["actor", "extractor"])
@pytest.mark.parametrize("broken", BROKEN_MODELS)
def test_models(
    broken: str,
    role: str,
    tiny_actor: Path,
    tiny_extractor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny_actor if role == "actor" else tiny_extractor
    model = Path(shutil.copytree(source, tmp_path / "model"))
    damage, message = BROKEN_MODELS[broken]
    damage(model)
    text = refused(load(["room"], sets=[f"{role}.model={model}"]), tmp_path, monkeypatch)
    assert text.startswith(f"{role}.m")
    assert message in text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "tasks.room.rendering=full",
            "extractor.profile = 'compact': reads only the compact rendering, but "
            "tasks.room.rendering is full. Add --set extractor.profile=full.",
        ),
        (
            "bank.evict_votes=2",
            "bank.evict_votes = 2: needs extractor.profile=full. Leave it unset.",
        ),
    ],
)
def test_a_language_model_with_the_compact_profile(
    setting: str,
    message: str,
    tiny_extractor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Path(shutil.copytree(tiny_extractor, tmp_path / "model"))
    (model / "crl.json").unlink()
    sets = [f"extractor.model={model}", "extractor.profile=compact", setting]
    assert message in refused(load(["room"], sets=sets), tmp_path, monkeypatch)


def test_structured_outputs_of_a_model_that_thinks(
    tiny_extractor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a template that opens the thinking, in a run and in an evaluation."""
    set_installed(monkeypatch, {"vllm": True})
    model = Path(shutil.copytree(tiny_extractor, tmp_path / "model"))
    sets = [
        f"extractor.model={model}", "extractor.train=false", "engine.kind=vllm",
        "extractor.structured_outputs=true",
    ]  # fmt: skip
    preflight.require(load(["room"], sets=sets), "settings", "models")
    template = model / "chat_template.jinja"
    opening = "{% if add_generation_prompt %}<think>\n{% endif %}"
    template.write_text(template.read_text("utf-8").rstrip() + opening, "utf-8")
    config = load(["room"], sets=sets)
    text = refused(config, tmp_path, monkeypatch)
    assert text.startswith("extractor.structured_outputs = True: the chat template of ")
    assert "ends every prompt with <think>, but the answer would have to be JSON" in text
    with pytest.raises(ConfigError, match="ends every prompt with <think>"):
        preflight.require(config, "models", checks=preflight.EVALUATION_CHECKS)
    preflight.require(load(["room"], sets=sets[:-1]), "settings", "models")


def test_models_that_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    config = load(["room"], sets=[f"actor.model={name}", "method=grpo"])
    assert f"'{name}': is not downloaded" in refused(config, tmp_path, monkeypatch)


def test_a_plan_for_another_machine_needs_config_json_alone(
    tiny_actor: Path, tiny_extractor: Path, tmp_path: Path
) -> None:
    sets = ["gpus=1", "gpu_memory=80", "extractor.merge_every=5"]
    for role, source in {"actor": tiny_actor, "extractor": tiny_extractor}.items():
        (tmp_path / role).mkdir()
        for file in ("config.json", "crl.json"):
            shutil.copy(source / file, tmp_path / role)
        sets.append(f"{role}.model={tmp_path / role}")
    texts: list[str] = []
    dry_run(load(["room"], sets=sets), texts.append)
    shown, missing = texts
    assert f"actor      {tmp_path}/actor (local directory)\n           197,440 parameters" in shown
    assert f"actor.model = '{tmp_path}/actor': the directory contains no weights" in missing


def test_an_encoder_without_weights(
    random_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Path(shutil.copytree(random_bert, tmp_path / "encoder"))
    preflight.require(load(["room"], sets=[f"embedder.model={encoder}"]))
    (encoder / "model.safetensors").unlink()
    config = load(["room"], sets=[f"embedder.model={encoder}"])
    text = refused(config, tmp_path, monkeypatch)
    assert text.startswith(f"embedder.model = '{encoder}': the directory contains no weights")


def test_activation_checkpointing_with_dropout(
    tiny_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(tiny_actor, tmp_path / "model"))
    change_json("config.json", attention_dropout=0.1)(model)
    sets = [f"actor.model={model}", "learner.activation_checkpointing=true"]
    text = refused(load(["room"], sets=sets), tmp_path, monkeypatch)
    assert "would also enable dropout, and the model's attention_dropout is 0.1" in text


# ── this machine ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sets", "installed", "message"),
    [
        (["learner.kind=deepspeed"], {}, "learner.kind = 'deepspeed': it needs the extra"),
        (["engine.kind=vllm"], {}, "engine.kind = 'vllm': it needs the extra 'vllm'"),
        (["monitor.wandb=mine"], {}, "monitor.wandb = 'mine': it needs the extra 'wandb'"),
        (
            ["monitor.tensorboard=true"],
            {"tensorboard": False},
            "monitor.tensorboard = True: it needs the extra 'tensorboard', which is not installed. "
            "Run pip install 'crl[tensorboard]'.",
        ),
        (["gpus=2"], {}, "gpus = 2: this machine has 0 visible GPUs"),
        (["learner.device=cuda"], {}, "learner.device = 'cuda': torch finds no CUDA device"),
        (["engine.device=cuda"], {}, "engine.device = 'cuda': torch finds no CUDA device"),
        (
            ["embedder.model={bert}", "embedder.device=cuda"],
            {},
            "embedder.device = 'cuda': torch finds no CUDA device",
        ),
        (
            ["embedder.model={bert}", "embedder.kind=vllm"],
            {},
            "embedder.kind = 'vllm': it needs the extra 'vllm'",
        ),
        (
            ["learner.kind=deepspeed", "learner.zero=0", "learner.precision=bfloat16"],
            {"deepspeed": True},
            "learner.zero = 0: keeps no float32 weights, but training in bfloat16 needs them",
        ),
        (
            ["learner.kind=deepspeed", "engine.kind=vllm", "engine.transfer=nccl"],
            {"deepspeed": True, "vllm": True},
            "engine.transfer = 'nccl': NCCL sends from GPU to GPU, but the learner runs on the CPU",
        ),
    ],
)
def test_this_machine(
    sets: list[str],
    installed: dict[str, bool],
    message: str,
    random_bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_installed(monkeypatch, installed)
    config = load(["room"], sets=[text.format(bert=random_bert) for text in sets])
    assert message in refused(config, tmp_path, monkeypatch)


def test_a_task_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_installed(monkeypatch, {"alfworld": False})
    task = tmp_path / "own.py"
    task.write_text(
        "from dataclasses import replace\nfrom crl.envs.room import SPEC as ROOM\n"
        "SPEC = replace(ROOM, runtime=replace(ROOM.runtime, extra='alfworld'))\n"
    )
    (tmp_path / "own.toml").write_text(Path("tasks/room.toml").read_text("utf-8"))
    change = (tmp_path / "own.toml").read_text().replace('env = "room"', f'env = "{task}:SPEC"')
    (tmp_path / "own.toml").write_text(change)
    text = refused(load([str(tmp_path / "own.toml")]), tmp_path, monkeypatch)
    assert "it needs the extra 'alfworld', which is not installed" in text


def test_a_gpu_that_only_torch_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_installed(monkeypatch, {"deepspeed": True})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = load(["room"], sets=["learner.kind=deepspeed"])
    text = refused(config, tmp_path, monkeypatch)
    assert text.startswith("learner.device = 'auto': torch finds a GPU, but nvidia-smi reports")


def test_a_gpu_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [Gpu(0, "GPU-0", "NVIDIA A10", GIB // 2, 0, "570.1")]
    for module in (gpu_plan, machine_checks, plan_module):
        monkeypatch.setattr(module, "visible_gpus", lambda: small)
    text = refused(load(["room"], sets=["gpus=1"]), tmp_path, monkeypatch)
    assert text.startswith("gpus = 1: GPU 0 needs")


def test_the_bundled_models_pass_every_check() -> None:
    assert list(preflight.problems(load(["room"]))) == []


# ── the list ──────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_for_another_machine_lists_what_is_missing_here() -> None:
    config, shown = load(["room"], preset="node8"), list[str]()
    dry_run(config, shown.append)
    plan, here = shown
    assert "actor learner       GPU 2–3" in plan
    assert here.startswith("\n── missing on this machine ──\nactor.model = 'Qwen/Qwen2.5-7B")
    for text in ("learner.kind = 'deepspeed'", "engine.kind = 'vllm'", "gpus = 8: this machine"):
        assert f"\n{text}" in here
    config = load(["room"], preset="node8", sets=["actor.max_context_tokens=40000"])
    with pytest.raises(ConfigError, match="exceeds the context of the model, which is 32768"):
        dry_run(config, shown.append)


@pytest.mark.parametrize(
    ("method", "sets", "warned"),
    [
        ("empo2", [], True),
        ("empo2", ["tasks.search_qa.stream.permanent=8"], False),
        ("empo2", ["bank.scope=task"], False),
        ("complementary", ["bank.scope=goal"], True),
        ("complementary", [], False),
        ("reflexion", [], False),  # its attempts need no search
        ("role_agent", [], False),
    ],
)
def test_the_plan_warns_if_no_search_can_find_an_experience(
    method: str, sets: list[str], *, warned: bool
) -> None:
    full = ["actor.profile=full", "extractor.profile=full"]
    config = load(["search_qa"], options={"method": method}, sets=[*full, *sets])
    assert ("searches find hardly any experience" in overview(config)) == warned


@pytest.mark.parametrize(
    ("sets", "share", "warned"),
    [
        # 16 groups × 100 steps
        ([], "8 %", False),
        (["run.steps=91"], "0 %", True),
        (["run.steps=92"], "0 %", False),
        (["run.steps=10", "bank.scope=goal"], "0 %", False),  # other games have the same goal
    ],
)
def test_the_plan_tells_how_many_games_return(sets: list[str], share: str, *, warned: bool) -> None:
    full = ["actor.profile=full", "extractor.profile=full"]
    text = overview(load(["alfworld"], options={"method": "empo2"}, sets=[*full, *sets]))
    assert f"groups: {share} of the groups repeat a game" in text
    assert ("with its own variation, and every group has a new one" in text) == warned


@pytest.mark.parametrize(
    ("method", "sets", "warned"),
    [
        ("reflexion", [], True),
        ("empo2", [], True),
        ("role_agent", [], True),
        ("reflexion", ["reflexion.writer=extractor"], False),
        ("empo2", ["actor.profile=full"], False),
        ("role_agent", ["role_agent.replay_ratio=0"], False),
        ("complementary", [], False),
        ("grpo", [], False),
    ],
)
def test_the_plan_warns_if_a_tiny_actor_should_write_notes(
    method: str, sets: list[str], *, warned: bool
) -> None:
    text = overview(load(["room"], options={"method": method}, sets=sets))
    assert ("tiny actors were not trained to write" in text) == warned
    assert (f"Add --set {method}.writer=extractor" in text) == warned


@pytest.mark.parametrize("folder", [False, True])
def test_the_plan_warns_of_an_untrained_packaged_model(
    folder: bool, tiny_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warning = (
        "warning: actor.model is smollm2 as published, and hardly any of its replies can be used "
        "(docs/results/language-models.md, Prompts). Train it first: crl sft "
    )
    drills = "--preset smollm2 --from drills --role actor --tasks room\n"
    scripted = "--from scripted --model smollm2 --tasks room\n"
    if folder:
        shutil.copytree(tiny_actor, imported_folder("smollm2"))
    options = {"method": "grpo"}
    assert warning + drills in overview(load(["room"], preset="smollm2", options=options))
    full = load(["room"], preset="smollm2", options=options, sets=["actor.profile=full"])
    assert warning + scripted in overview(full)
    trained = [f"actor.model={shutil.copytree(tiny_actor, tmp_path / 'trained')}"]
    assert "warning" not in overview(
        load(["room"], preset="smollm2", options=options, sets=trained)
    )


def test_the_plan_of_reflexion_tells_which_reflections_guide() -> None:
    shown: list[str] = []
    writer = "reflexion.writer=extractor"
    dry_run(load(["room"], options={"method": "reflexion"}, sets=[writer]), shown.append)
    assert (
        "retrieval  attempts one after the other, guided by the last 3 reflections; evaluations "
        "are guided by at most 3, chosen by success record"
    ) in shown[0]
    assert "members = at most 128 rollouts" in shown[0], "attempts end with the first success"
    assert "training  100 steps × 128 = at most 12,800 episodes, 0 updates" in shown[0]


def test_a_context_of_minus_one_is_no_limit() -> None:
    require_context("actor", 512, -1)  # as in the config.json of XLNet
    with pytest.raises(ConfigError, match="which is 511 tokens"):
        require_context("actor", 512, 511)


def test_the_plan_is_shown_before_this_machine_is_refused() -> None:
    shown: list[str] = []
    with pytest.raises(ConfigError, match=r"learner\.kind = 'deepspeed'"):
        dry_run(load(["room"], sets=["learner.kind=deepspeed"]), shown.append)
    assert "── batch ──" in shown[0]


@pytest.mark.parametrize(
    "sets", [[], ["gpus=2"], ["engine.kind=vllm"], ["monitor.wandb=x"], ["engine.device=cuda"],
             ["learner.kind=deepspeed"], ["actor.model=Qwen/Qwen2.5-7B-Instruct", "method=grpo"]]
)  # fmt: skip
def test_the_doctor_makes_the_same_checks(sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(["room"], sets=sets)
    monkeypatch.setattr(doctor, "_config", lambda preset: config)
    failures = [check for check in doctor.diagnose("cpu") if check.status == "fail"]
    assert bool(failures) == bool(list(preflight.problems(config))) == bool(sets)


def test_an_evaluation_makes_its_part_of_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An evaluation needs no learner, and no model of the config.
    preflight.require(
        load(["room"], sets=["learner.kind=deepspeed", "learner.device=cuda"]),
        checks=preflight.EVALUATION_CHECKS,
    )
    config = load(["room"], sets=["engine.device=cuda"])
    dump(config, tmp_path / "config.json")
    monkeypatch.setattr(main, "latest_checkpoint", lambda path, note: path / "3")
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda': torch finds no CUDA device"):
        main.evaluate_run(tmp_path)


def test_names_of_checks_are_unique() -> None:
    names = [check.name for check in preflight.CHECKS]
    assert len(set(names)) == len(names)


def test_a_dry_run_of_bundled_models_needs_no_torch() -> None:
    code = (
        "import sys\nfrom crl.config.load import load\nfrom crl.planning.plan import dry_run\n"
        "dry_run(load(['room'], sets=['extractor.merge_every=5', 'gpus=1', 'gpu_memory=40']), "
        "lambda text: None)\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# ── tokenizers without transformers ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", ["tiny_actor", "tiny_extractor", "random_qwen3"])
def test_a_tokenizer_file_is_read_like_transformers_reads_it(
    model: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    light = read_tokenizer(path)
    assert light is not None
    renderers = [ChatRenderer(light, ()), ChatRenderer(load_tokenizer(path), ())]  # pyright: ignore
    segments = [
        Segment("user", "Room: the jade attic.\nat 2 1 <|im_end|> naïve 12345", "task"),
        Segment("assistant", "south<|im_end|>", "policy"),
        Segment("user", "  stairs reached.  ", "env"),
    ]
    text, expected = (renderer.text(segments) for renderer in renderers)
    assert text == expected
    ids, expected_ids = (renderer.encode(text) for renderer in renderers)
    assert ids == expected_ids
    assert renderers[0].decode(ids) == renderers[1].decode(ids)


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"model_type": "qwen3"}, False),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, False),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, True),
        ({"layer_types": ["sliding_attention"]}, False),
        ({"layer_types": None, "sliding_window": 8, "use_sliding_window": False}, True),
        ({"layer_types": None, "sliding_window": 8, "use_sliding_window": True}, False),
        ({"attention_dropout": 0.1}, False),
        ({"max_position_embeddings": None}, False),
    ],
)
def test_architectures_that_need_no_torch(
    changes: dict[str, Any], plain: bool, tiny_actor: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_actor / "config.json", tmp_path)
    change_json("config.json", **changes)(tmp_path)
    assert model_checks._is_plain(tmp_path) == plain


def test_the_rank_of_a_trained_adapter_is_checked_before_a_new_run_only() -> None:
    """A resumed run cannot change its rank."""
    ranks = next(check for check in preflight.CHECKS if check.name == "adapter ranks")
    assert ranks not in preflight.RESUME_CHECKS
    config = load(["room"], sets=["extractor.lora.rank=64"])
    with pytest.raises(ConfigError, match=r"extractor\.lora\.rank = 64: is above the smallest"):
        ranks.require(config)
    untrained = config.extractor.model_copy(update={"train": False})
    ranks.require(config.model_copy(update={"extractor": untrained}))


@pytest.mark.parametrize(
    ("task", "env", "small"),
    [
        ("scienceworld", "scienceworld:power-component", "scienceworld_small"),
        ("alfworld", "alfworld", "alfworld_small"),
    ],
)
def test_tiny_models_do_not_play_environments_for_language_models(
    task: str, env: str, small: str
) -> None:
    chosen = [f"tasks.{task}.env={env}"]
    with pytest.raises(ConfigError) as refused:
        require_tasks(load([task], sets=chosen))
    assert str(refused.value) == (
        f"tasks.{task}.env = {env!r}: is only for language models, but the task has the compact "
        f"rendering. Use {small}, or a language model as actor."
    )
    require_tasks(load([task]))


def test_eval_sets_that_are_larger_than_their_splits_are_reported_together() -> None:
    task, env = "tasks.scienceworld", "scienceworld:power-component"
    sets = ["actor.profile=full", "extractor.profile=full", f"{task}.env={env}"]
    with pytest.raises(ConfigError) as refused:
        require_tasks(load(["scienceworld"], sets=sets))
    assert str(refused.value) == (
        f"{task}.eval.seen = 89: {env} has only 5 games of this split. "
        f"Add --set {task}.eval.seen=5 --set {task}.eval.unseen=5."
    )
    sizes = [f"{task}.eval.{split}=5" for split in ("seen", "unseen")]
    require_tasks(load(["scienceworld"], sets=[*sets, *sizes]))
