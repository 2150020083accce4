"""Assignment of GPUs to roles and rejected plans. An accepted plan must fit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crl.cli.main import app
from crl.config.load import load
from crl.config.models import find_model, resolve_model
from crl.config.schema import RunConfig
from crl.errors import ConfigError
from crl.modeling.memory import GIB, GpuAssignment, GpuUser
from crl.planning import gpu_plan as module
from crl.planning import gpus
from crl.planning.gpu_plan import (
    USABLE_SHARE,
    GpuPlan,
    assigned_gpus,
    describe,
    gpu_plan,
)
from crl.planning.gpus import Gpu
from crl.planning.preflight import fine_tuning_checks
from support.paths import ROOT


@pytest.fixture(autouse=True)
def no_gpus_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Hide the GPUs and the model cache of the machine that runs the tests."""
    monkeypatch.setattr(module, "visible_gpus", list)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def config(
    *sets: str,
    preset: str = "node8",
    tasks: tuple[str, ...] = ("room", "webshop"),
    method: str | None = None,
) -> RunConfig:
    return load(tasks, preset=preset, sets=sets, options={"method": method} if method else {})


def planned(
    *sets: str, preset: str = "node8", method: str | None = None, visible: list[Gpu] | None = None
) -> GpuPlan:
    plan = gpu_plan(config(*sets, preset=preset, method=method), visible or [])
    assert plan is not None
    return plan


def gpu(index: int, gib: float = 80, used: float = 0) -> Gpu:
    return Gpu(index, f"GPU-{index}aa", "NVIDIA H100", int(gib * GIB), int(used * GIB), "570.1")


def used_bytes(plan: GpuPlan, number: int) -> float:
    return sum(placement.memory.total for placement in plan.placements if number in placement.gpus)


# ── placing ───────────────────────────────────────────────────────────────────────────────────────


def test_a_node_of_eight():
    plan = planned()
    assert {placement.request.role: placement.gpus for placement in plan.placements} == {
        "actor engine": (0, 1),
        "actor learner": (2, 3),
        "extractor engine": (4, 5),
        "extractor learner": (6, 7),
        "embedder": (0,),
    }
    assert plan.problems == ()
    actor = plan["actor learner"].memory
    # Weights of 2 bytes per parameter, split in two. Gradients and optimizer are offloaded.
    assert (actor.weights, actor.gradients, actor.optimizer) == (
        7_615_616_512,
        0,
        0,
    )
    extractor = plan["extractor engine"]
    assert extractor.fraction == 0.9
    # Weights 2 · 0.6 B, keys and values of 32,768 tokens at 112 KiB, and 3 GiB.
    assert extractor.memory.cache == pytest.approx(72 * GIB - 2 * 4_022_468_096 - 4 * GIB)
    embedder_bytes = plan["embedder"].memory.total
    assert embedder_bytes == 2 * 595_776_512 + 3.5 * GIB + 3 * GIB
    assert plan["embedder"].fraction == embedder_bytes / (80 * GIB)
    assert plan["actor engine"].memory.total == pytest.approx(0.95 * 80 * GIB - embedder_bytes)
    assert max(used_bytes(plan, number) for number in range(8)) <= USABLE_SHARE * 80 * GIB + 1


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=20"])
@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_the_sort_of_truncated_sampling_is_counted(setting: str, role: str):
    plain, truncated = (planned(*sets, preset="gpu1") for sets in ((), (f"{role}.{setting}",)))
    engines: tuple[GpuUser, ...] = ("actor engine", "extractor engine")
    for engine in engines:
        more = truncated[engine].memory.activations - plain[engine].memory.activations
        assert more == engine.startswith(role) * (56 - 28) * 32 * 151_936


def test_too_few_gpus_are_shared():
    plan = planned("gpus=4", "tasks.room.eval.online_places=4")
    assert plan.problems == ()
    assert plan["actor learner"].gpus != plan["extractor learner"].gpus
    assert plan["actor engine"].gpus == plan["extractor learner"].gpus
    assert all(used_bytes(plan, number) <= USABLE_SHARE * 80 * GIB + 1 for number in range(4))
    assert plan["actor engine"].memory.cache >= 1.75 * GIB, "at least one whole sequence"


def test_adapters_on_a_node() -> None:
    """Check that adapters need no memory for a reference and little for their states."""
    sets = (
        "actor.lora.rank=16", "extractor.lora.rank=16", "extractor.kl_coef=0.1", "gpus=4",
        "tasks.room.eval.online_places=4",
    )  # fmt: skip
    plan = planned(*sets, "learner.ranks=1", "engine.replicas=1", "learner.offload=false")
    assert not plan.problems
    engine, learner = plan["actor engine"].request, plan["extractor learner"].request
    adapter = 40_370_176  # of the actor, Qwen2.5-7B
    assert engine.memory.weights == 2 * (7_615_616_512 + adapter)
    assert ", an adapter of rank 16, vLLM" in engine.description
    assert learner.memory.weights < 2.1 * 4_022_468_096
    assert learner.memory.optimizer < 0.5e9
    assert "an adapter of 33,030,144 parameters, DeepSpeed ZeRO-3" in learner.description
    assert plan["untrained extractor"].request.memory.weights == 2 * 4_022_468_096
    with pytest.raises(ConfigError, match="kernels for adapters on GPUs need bfloat16"):
        planned(*sets, "learner.precision=float32")


def test_adapters_in_one_process_share_their_base_model() -> None:
    sets = (
        *(f"{role}.model=Qwen/Qwen2.5-0.5B-Instruct" for role in ("actor", "extractor")),
        *(f"{role}.max_context_tokens=32768" for role in ("actor", "extractor")),
        "actor.lora.rank=16",
    )
    both = planned(*sets, "extractor.lora.rank=16", preset="gpu1")
    one = planned(*sets, preset="gpu1")
    adapter = 4 * 8_798_208
    base = both["actor learner"].memory.weights - adapter
    assert both["extractor learner"].memory.weights == adapter
    assert both["extractor learner"].request.description.endswith(
        "; shares the base model of the actor learner"
    )
    assert one["extractor learner"].memory.weights == base, "all of its weights are trained"
    ranks = planned(*sets, "extractor.lora.rank=16", "learner.kind=deepspeed", "gpus=2")
    assert ranks["extractor learner"].memory.weights > adapter, "ranks have processes of their own"


def test_parts_of_this_process_are_on_the_first_gpu():
    plan = planned(preset="gpu1")
    assert {placement.gpus for placement in plan.placements} == {(0,)}
    assert {placement.fraction for placement in plan.placements} == {None}
    assert plan.problems == ()


def test_tensor_parallel_replicas_and_idle_gpus():
    plan = planned(
        "engine.tensor_parallel=2", "engine.replicas=1", "learner.ranks=1", "gpus=7", method="grpo"
    )
    assert (plan["actor engine"].gpus, plan["actor learner"].gpus) == ((0, 1), (2,))
    assert (
        "idle                GPU 3–6  increase engine.replicas or learner.ranks to use them"
        in describe(plan)
    )


def test_parts_of_this_process_use_no_second_gpu() -> None:
    text = describe(planned(preset="cpu", visible=[gpu(0), gpu(1)]))
    assert text.splitlines()[1] == "all parts run in this process, on the first GPU"
    assert "idle                GPU 1    torch engines and local learners do not use" in text
    ranks = describe(planned("learner.kind=deepspeed", "gpus=4", preset="gpu1"))
    assert "GPU 3    increase learner.ranks to use them" in ranks
    nothing = describe(
        planned("engine.device=cpu", "learner.device=cpu", preset="cpu", visible=[gpu(0)])
    )
    assert nothing.splitlines()[1] == "no part of the run uses a GPU"


def test_a_run_without_experience_has_only_the_actor():
    assert [placement.request.role for placement in planned(method="grpo").placements] == [
        "actor engine",
        "actor learner",
    ]
    with pytest.raises(KeyError):
        planned(method="grpo")["embedder"]


def test_an_actor_that_is_not_trained_has_no_learner():
    roles = {placement.request.role for placement in planned("actor.train=false").placements}
    assert roles == {"actor engine", "extractor engine", "extractor learner", "embedder"}


def test_a_static_extractor_has_no_learner():
    assert "extractor learner" not in [
        placement.request.role for placement in planned("extractor.train=false").placements
    ]


def test_no_plan_without_gpus():
    assert gpu_plan(config(preset="cpu"), []) is None
    plan = gpu_plan(config(preset="cpu"), [gpu(0)])
    assert plan is not None
    assert plan.problems == ()


def test_an_in_process_run_is_checked_only_if_gpus_is_set():
    small = [gpu(0, gib=0.001)]
    assert planned(preset="cpu", visible=small).problems == ()
    assert planned("gpus=1", preset="cpu", visible=small).problems != ()


def test_parts_on_the_cpu_request_no_gpu():
    plan = planned("engine.device=cpu", preset="gpu1")
    assert [placement.request.role for placement in plan.placements] == [
        "actor learner",
        "extractor learner",
    ]


# ── sources of sizes ──────────────────────────────────────────────────────────────────────────────


def test_visible_gpus_take_precedence_over_the_setting():
    plan = planned(visible=[gpu(i, gib=40) for i in range(8)])
    assert plan.sizes == (40 * GIB,) * 8
    assert plan.source == "NVIDIA H100 of this machine"
    assert (
        planned(visible=[gpu(0)]).source == "size from gpu_memory; this machine has 1 visible GPU"
    )


def test_without_a_size_only_the_number_of_gpus_is_checked(tmp_path: Path):
    preset = tmp_path / "mine.toml"
    shipped = ROOT / "tasks" / "presets" / "node8.toml"
    preset.write_text(
        "\n".join(
            line for line in shipped.read_text().splitlines() if not line.startswith("gpu_memory")
        )
    )
    plan = planned("gpus=2", preset=str(preset))
    assert (plan.sizes, plan.problems) == (None, ())
    assert (
        "2 GPUs, memory unknown (gpu_memory is not set); this machine has no visible GPU"
        in describe(plan)
    )
    assert planned("gpus=1", preset=str(preset)).problems[0].key == "engine.replicas"


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────


def refusal(plan: GpuPlan) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan.require_fit()
    return caught.value


@pytest.mark.parametrize(
    ("preset", "sets"),
    [
        ("node8", ["gpus=2"]),
        ("node8", ["gpus=1"]),
        ("node8", ["gpu_memory=24"]),
        ("node8", ["learner.offload=false"]),
        ("node8", ["engine.memory_fraction=0.2"]),
        ("gpu1", ["gpu_memory=24"]),
    ],
)
def test_suggested_alternatives_fit(preset: str, sets: list[str]):
    plan = planned(*sets, preset=preset)
    assert plan.problems
    assert plan.alternatives
    for option in plan.alternatives:
        words = shlex.split(option)
        given = list(zip(words[::2], words[1::2], strict=True))
        more = [value for name, value in given if name == "--set"]
        assert (
            planned(*sets, *more, preset=preset, method=dict(given).get("--method")).problems == ()
        )


def test_two_gpus_are_too_few():
    error = refusal(planned("gpus=2"))
    assert (error.key, error.value) == ("gpus", 2)
    assert re.match(
        (
            r"GPU 0 needs 107\.\d GiB, but 76\.0 GiB are usable \(actor engine 19\.9, "
            r"actor learner 28\.1, "
        ),
        error.reason,
    )
    assert error.remedy.startswith("Settings that fit: --set gpus=3; or --set ")
    assert error.remedy.endswith("; or --method grpo")


def test_more_ranks_than_gpus():
    error = refusal(planned("gpus=1", "engine.replicas=1"))
    assert (error.key, error.value) == ("learner.ranks", 2)
    assert error.reason == "the actor learner needs 2 GPUs, but the run has 1 GPU"


def test_a_fraction_too_small_for_one_sequence():
    error = refusal(planned("engine.memory_fraction=0.2"))
    assert (error.key, error.value) == ("engine.memory_fraction", 0.2)
    assert (
        error.reason
        == "the actor engine needs at least 19.9 of 80.0 GiB to cache one full sequence"
    )
    assert (
        error.remedy == "Settings that fit: --set engine.memory_fraction=0.8; "
        "or --set engine.memory_fraction=0.5"
    )
    assert planned("engine.memory_fraction=0.5")["actor engine"].memory.total == pytest.approx(
        40 * GIB
    )


def test_nccl_needs_different_gpus():
    assert planned("engine.transfer=nccl").problems == ()
    plan = planned("engine.transfer=nccl", "gpus=2", "gpu_memory=141.0")
    error = refusal(plan)
    assert (error.key, error.value) == ("engine.transfer", "nccl")
    assert "actor engine and actor learner share GPU 0" in error.reason
    assert "--set engine.transfer=file" in plan.alternatives


def test_another_method_is_suggested_only_if_it_needs_fewer_changes():
    assert planned("learner.offload=false").alternatives == ("--set learner.offload=true",)


def test_a_model_of_unknown_size(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    sets, visible = [f"actor.model={tmp_path}"], [gpu(0)]
    assert gpu_plan(config(*sets, preset="cpu", tasks=("room",)), visible) is None, (
        "the plan is not checked"
    )
    with pytest.raises(ConfigError, match="so its memory use cannot be planned"):
        gpu_plan(config(*sets, "gpus=1", preset="cpu", tasks=("room",)), visible)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "engine.tensor_parallel=3",
            (
                "engine.tensor_parallel = 3: does not divide the 28 attention heads of the "
                "model actor.model"
            ),
        ),
        (
            "actor.max_context_tokens=100000",
            "actor.max_context_tokens = 100000: exceeds the context of the model, which is 32768",
        ),
        (
            "extractor.max_context_tokens=300000",
            (
                "extractor.max_context_tokens = 300000: exceeds the context of the model, "
                "which is 262144"
            ),
        ),
    ],
)
def test_errors_that_more_gpus_cannot_fix(setting: str, message: str):
    with pytest.raises(ConfigError, match=message):
        planned(setting)
    result = crl("train", "--preset", "node8", "--tasks", "room", "--set", setting, "--dry-run")
    assert result.exit_code == 2
    assert message in result.output


def test_models_that_never_fit():
    error = refusal(planned("gpu_memory=1"))
    assert error.remedy == "No settings were found that fit. Use smaller models"


def test_a_run_needs_visible_gpus(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="gpus = 8: this machine has 0 visible GPUs"):
        assigned_gpus(config())
    monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(i, gib=16) for i in range(8)])
    with pytest.raises(ConfigError, match=r"needs .* but 15\.2 GiB are usable"):
        assigned_gpus(config())
    assert assigned_gpus(config("gpus=1", preset="cpu", method="grpo")).keys() == {
        "actor engine",
        "actor learner",
    }


def test_roles_get_the_gpus_of_the_plan_by_name(monkeypatch: pytest.MonkeyPatch):
    assert assigned_gpus(config(preset="cpu")) == {}
    monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(i) for i in (7, 6, 5, 4, 3, 2, 1, 0)])
    assigned, plan = assigned_gpus(config()), planned()
    assert assigned["actor engine"] == GpuAssignment(
        ("GPU-7aa", "GPU-6aa"), plan["actor engine"].fraction
    )
    assert assigned["extractor learner"] == GpuAssignment(("GPU-1aa", "GPU-0aa"))


def test_an_evaluation_requests_no_gpus_for_learners(monkeypatch: pytest.MonkeyPatch):
    """Check that half of the run's GPUs suffice for an evaluation.

    They serve the run's engines, one engine per GPU as in the run.
    """
    monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(i) for i in range(4)])
    with pytest.raises(ConfigError, match="gpus = 8: this machine has 4 visible GPUs"):
        assigned_gpus(config("gpus=8"))
    assigned = assigned_gpus(config("gpus=8"), learners=False)
    assert {role: place.gpus for role, place in assigned.items()} == {
        "actor engine": ("GPU-0aa", "GPU-1aa"),
        "extractor engine": ("GPU-2aa", "GPU-3aa"),
        "embedder": ("GPU-0aa",),
    }  # fmt: skip
    monkeypatch.setattr(module, "visible_gpus", list)
    with pytest.raises(ConfigError, match="this machine has 0 visible GPUs"):
        assigned_gpus(config("gpus=8"), learners=False)


def test_fine_tuning_requests_gpus_for_the_trained_model_alone(monkeypatch: pytest.MonkeyPatch):
    """The learner of the larger model does not fit, but it does not run."""
    sets = ("gpus=4", "tasks.room.eval.online_places=4", "learner.offload=false")
    monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(i) for i in range(4)])
    with pytest.raises(ConfigError, match=r"are usable \(actor learner"):
        assigned_gpus(config(*sets))
    assigned = assigned_gpus(config(*sets), only="extractor")
    assert {role: place.gpus for role, place in assigned.items()} == {
        "extractor engine": ("GPU-0aa", "GPU-1aa"),
        "extractor learner": ("GPU-2aa", "GPU-3aa"),
    }
    assert assigned_gpus(config("gpus=4"), only="actor").keys() == {"actor engine", "actor learner"}
    (check,) = [c for c in fine_tuning_checks("extractor") if c.name == "GPU plan"]
    check.require(config(*sets))
    monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(i, gib=30) for i in range(4)])
    with pytest.raises(ConfigError) as refused:
        check.require(config(*sets))
    assert "Settings that fit: --set learner.offload=true --set extractor.max_context" in str(
        refused.value
    )
    assert not re.search(r"method|extractor\.train|\bactor learner", str(refused.value))


def test_the_untrained_extractor_shares_a_gpu_with_a_learner():
    plan = planned("tasks.room.eval.online_places=4")
    untrained, caches = (
        plan["untrained extractor"],
        [plan[role].memory.cache for role in ("actor engine", "extractor engine")],
    )
    assert untrained.gpus == (2,)
    assert untrained.fraction == untrained.memory.total / (80 * GIB)
    assert untrained.memory.cache == plan["extractor engine"].request.memory.cache
    assert caches == [planned()[role].memory.cache for role in ("actor engine", "extractor engine")]
    assert (plan.requested, plan.problems) == (8, ())


# ── the command line ──────────────────────────────────────────────────────────────────────────────


def crl(*args: str):
    return CliRunner().invoke(app, list(args))


def test_a_dry_run_prints_the_plan_of_a_node():
    result = crl("train", "--preset", "node8", "--tasks", "room,webshop", "--dry-run")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "8 GPUs of 80.0 GiB, size from gpu_memory; this machine has no visible GPU" in lines
    assert "engines and learners need 8 GPUs: each has separate GPUs" in lines
    assert (
        "actor      Qwen/Qwen2.5-7B-Instruct (not downloaded: hf download Qwen/Qwen2.5-7B-Instruct)"
        in lines
    )
    assert "engine       vllm, 2 replicas of each model; weight transfer by file" in lines
    options = "ZeRO-3, optimizer offloaded, bfloat16, activation checkpointing"
    assert (
        "learner      deepspeed on cuda if available, else cpu, 1 CPU thread each; "
        f"2 ranks of each model, {options}"
    ) in lines
    (learner,) = [line for line in lines if line.startswith("actor learner ")]
    assert "GPU 2–3" in learner
    assert (
        "156.0 GiB of states, 141.9 of them in host memory; 32,768 tokens at a time; not shared"
    ) in learner
    (row,) = [line for line in lines if line.startswith("GPU 2 ")]
    assert row.split()[2:] == [
        "actor",
        "learner",
        "7.1",
        "–",
        "–",
        "–",
        "17.2",
        "3.8",
        "28.1",
        "GPU",
        "2:",
        "28.1",
        "of",
        "80.0",
    ]


def test_a_dry_run_shows_problems_and_alternatives():
    result = crl(
        "train", "--preset", "node8", "--tasks", "room,webshop", "--set", "gpus=2", "--dry-run"
    )
    assert result.exit_code == 2
    assert "does not fit: gpus = 2: GPU 0 needs" in result.output
    assert "fits: --set gpus=3" in result.output
    assert result.stderr.startswith("error: gpus = 2: GPU 0 needs")


def test_a_run_without_its_models_is_refused():
    result = crl("train", "--preset", "node8", "--tasks", "room")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: actor.model = 'Qwen/Qwen2.5-7B-Instruct': "
        "is not downloaded, and crl does not download models from hubs. "
        "Run hf download Qwen/Qwen2.5-7B-Instruct, or give the directory of a model.\n"
    )


# ── models of the hub ─────────────────────────────────────────────────────────────────────────────


def test_a_downloaded_model_is_found_in_the_cache(tmp_path: Path):
    name, revision = "Qwen/Qwen2.5-7B-Instruct", "a" * 40
    repository = tmp_path / "hub" / "models--Qwen--Qwen2.5-7B-Instruct"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    assert find_model(name) is None
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert resolve_model(name) == snapshot
    assert config(tasks=("room",)).actor.model == str(snapshot), "a saved run keeps the revision"


def test_a_model_that_is_neither_downloaded_nor_known():
    with pytest.raises(ConfigError, match="or download it: hf download some/model"):
        find_model("some/model")
    with pytest.raises(ConfigError) as caught:
        find_model("Qwen/Qwen2.5-7B-Instrukt")
    assert "Did you mean Qwen/Qwen2.5-7B-Instruct?" in caught.value.remedy


# ── nvidia-smi ────────────────────────────────────────────────────────────────────────────────────

LISTING = """\
0, GPU-0aa, NVIDIA H100 80GB HBM3, 81559, 4, 570.1
1, GPU-1ab, NVIDIA H100 80GB HBM3, 81559, 70000, 570.1
2, GPU-1ac, NVIDIA H100 80GB HBM3, [N/A], [N/A], 570.1
"""


def test_output_of_nvidia_smi():
    first, second = gpus.parse(LISTING)
    assert (first.index, first.name, first.memory, first.driver) == (
        0,
        "NVIDIA H100 80GB HBM3",
        81559 << 20,
        "570.1",
    )
    assert second.used == 70000 << 20


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1]),
        ("1,0", [1, 0]),
        ("GPU-1", [1]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
        ("GPU-", []),
    ],
)
def test_cuda_visible_devices(variable: str | None, expected: list[int]):
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert [gpu.index for gpu in gpus.visible(gpus.parse(LISTING), environment)] == expected


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert gpus.visible_gpus() == []
