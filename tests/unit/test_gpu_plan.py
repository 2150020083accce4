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
from crl.run import gpu_plan as module
from crl.run import gpus
from crl.run.gpu_memory import GIB
from crl.run.gpu_plan import USABLE, Assigned, GpuPlan, assigned_gpus, describe, gpu_plan
from crl.run.gpus import Gpu


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


def held(plan: GpuPlan, number: int) -> float:
    return sum(placement.memory.total for placement in plan.placements if number in placement.gpus)


# ── placing ───────────────────────────────────────────────────────────────────────────────────────


def test_a_node_of_eight():
    plan = planned()
    assert {placement.need.role: placement.gpus for placement in plan.placements} == {
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
    beside = plan["embedder"].memory.total
    assert beside == 2 * 595_776_512 + 3.5 * GIB + 3 * GIB
    assert plan["embedder"].fraction == beside / (80 * GIB)
    assert plan["actor engine"].memory.total == pytest.approx(0.95 * 80 * GIB - beside)
    assert max(held(plan, number) for number in range(8)) <= USABLE * 80 * GIB + 1


def test_too_few_gpus_are_shared_the_most_needful_apart():
    plan = planned("gpus=4")
    assert plan.problems == ()
    assert plan["actor learner"].gpus != plan["extractor learner"].gpus
    assert plan["actor engine"].gpus == plan["extractor learner"].gpus
    assert all(held(plan, number) <= USABLE * 80 * GIB + 1 for number in range(4))
    assert plan["actor engine"].memory.cache >= 1.75 * GIB, "at least one whole sequence"


def test_what_runs_in_this_process_is_on_the_first_gpu():
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
        "idle               GPU 3–6  raise engine.replicas or learner.ranks to use them"
        in describe(plan)
    )


def test_without_experience_the_actor_is_alone():
    assert [placement.need.role for placement in planned(method="grpo").placements] == [
        "actor engine",
        "actor learner",
    ]
    with pytest.raises(KeyError):
        planned(method="grpo")["embedder"]


def test_a_static_extractor_has_no_learner():
    assert "extractor learner" not in [
        placement.need.role for placement in planned("extractor.train=false").placements
    ]


def test_no_plan_without_gpus():
    assert gpu_plan(config(preset="cpu"), []) is None
    plan = gpu_plan(config(preset="cpu"), [gpu(0)])
    assert plan is not None
    assert plan.problems == ()


def test_a_run_of_this_process_alone_is_never_refused_unless_gpus_are_asked_for():
    small = [gpu(0, gib=0.001)]
    assert planned(preset="cpu", visible=small).problems == ()
    assert planned("gpus=1", preset="cpu", visible=small).problems != ()


def test_parts_on_the_cpu_ask_for_nothing():
    plan = planned("engine.device=cpu", preset="gpu1")
    assert [placement.need.role for placement in plan.placements] == [
        "actor learner",
        "extractor learner",
    ]


# ── sources of sizes ──────────────────────────────────────────────────────────────────────────────


def test_visible_gpus_count_before_the_setting():
    plan = planned(visible=[gpu(i, gib=40) for i in range(8)])
    assert plan.sizes == (40 * GIB,) * 8
    assert plan.source == "NVIDIA H100 of this machine"
    assert planned(visible=[gpu(0)]).source == "by gpu_memory; this machine shows 1 GPU"


def test_without_a_size_nothing_is_judged_but_the_number(tmp_path: Path):
    preset = tmp_path / "mine.toml"
    shipped = Path(__file__).parents[2] / "tasks" / "presets" / "node8.toml"
    preset.write_text(
        "\n".join(
            line for line in shipped.read_text().splitlines() if not line.startswith("gpu_memory")
        )
    )
    plan = planned("gpus=2", preset=str(preset))
    assert (plan.sizes, plan.problems) == (None, ())
    assert "2 GPUs, of unknown memory (gpu_memory is unset); this machine shows none" in describe(
        plan
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
def test_what_is_said_to_fit_fits(preset: str, sets: list[str]):
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
            r"GPU 0 would hold 107\.\d GiB of 76\.0 usable ones \(actor engine 19\.9, "
            r"actor learner 28\.1, "
        ),
        error.reason,
    )
    assert error.remedy.startswith("What would fit: --set gpus=3; or --set ")
    assert error.remedy.endswith("; or --method grpo")


def test_more_ranks_than_gpus():
    error = refusal(planned("gpus=1", "engine.replicas=1"))
    assert (error.key, error.value) == ("learner.ranks", 2)
    assert error.reason == "the actor learner asks for 2 GPUs, and there is 1"


def test_a_fraction_that_holds_no_whole_sequence():
    error = refusal(planned("engine.memory_fraction=0.2"))
    assert (error.key, error.value) == ("engine.memory_fraction", 0.2)
    assert (
        error.reason == "the actor engine needs 19.9 of 80.0 GiB with room for one whole sequence"
    )
    assert (
        error.remedy
        == "What would fit: --set engine.memory_fraction=0.8; or --set engine.memory_fraction=0.5"
    )
    assert planned("engine.memory_fraction=0.5")["actor engine"].memory.total == pytest.approx(
        40 * GIB
    )


def test_nccl_between_parts_of_one_gpu():
    assert planned("engine.transfer=nccl").problems == ()
    plan = planned("engine.transfer=nccl", "gpus=2", "gpu_memory=141.0")
    error = refusal(plan)
    assert (error.key, error.value) == ("engine.transfer", "nccl")
    assert "actor engine and actor learner share GPU 0" in error.reason
    assert "--set engine.transfer=file" in plan.alternatives


def test_another_method_is_named_only_where_it_changes_less():
    assert planned("learner.offload=false").alternatives == ("--set learner.offload=true",)


def test_a_model_whose_size_cannot_be_told(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    sets, visible = [f"actor.model={tmp_path}"], [gpu(0)]
    assert gpu_plan(config(*sets, preset="cpu", tasks=("room",)), visible) is None, (
        "the run takes GPUs as they come"
    )
    with pytest.raises(ConfigError, match="its memory cannot be planned"):
        gpu_plan(config(*sets, "gpus=1", preset="cpu", tasks=("room",)), visible)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "engine.tensor_parallel=3",
            "engine.tensor_parallel = 3: the model of actor.model has 28 attention heads",
        ),
        (
            "actor.max_context_tokens=100000",
            "actor.max_context_tokens = 100000: the model reads at most 32768 tokens",
        ),
        (
            "extractor.max_context_tokens=300000",
            "extractor.max_context_tokens = 300000: the model reads at most 262144 tokens",
        ),
    ],
)
def test_what_no_number_of_gpus_would_mend(setting: str, said: str):
    with pytest.raises(ConfigError, match=said):
        planned(setting)
    result = crl("train", "--preset", "node8", "--tasks", "room", "--set", setting, "--dry-run")
    assert result.exit_code == 2
    assert said in result.output


def test_models_that_nothing_makes_fit():
    error = refusal(planned("gpu_memory=1"))
    assert error.remedy == "No change of settings was found that would fit: use smaller models"


def test_a_run_needs_the_gpus_themselves(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="gpus = 8: this machine shows 0 GPUs"):
        assigned_gpus(config())
    monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(i, gib=16) for i in range(8)])
    with pytest.raises(ConfigError, match=r"would hold .* of 15\.2 usable ones"):
        assigned_gpus(config())
    assert assigned_gpus(config("gpus=1", preset="cpu", method="grpo")).keys() == {
        "actor engine",
        "actor learner",
    }


def test_roles_get_the_gpus_of_the_plan_by_name(monkeypatch: pytest.MonkeyPatch):
    assert assigned_gpus(config(preset="cpu")) == {}
    monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(i) for i in (7, 6, 5, 4, 3, 2, 1, 0)])
    assigned, plan = assigned_gpus(config()), planned()
    assert assigned["actor engine"] == Assigned(
        ("GPU-7aa", "GPU-6aa"), plan["actor engine"].fraction
    )
    assert assigned["extractor learner"] == Assigned(("GPU-1aa", "GPU-0aa"))


def test_an_evaluation_asks_for_no_learners_gpus(monkeypatch: pytest.MonkeyPatch):
    """Check that half of the run's GPUs suffice for an evaluation.

    They serve the run's engines, one engine per GPU as in the run.
    """
    monkeypatch.setattr(module, "visible_gpus", lambda: [gpu(i) for i in range(4)])
    with pytest.raises(ConfigError, match="gpus = 8: this machine shows 4 GPUs"):
        assigned_gpus(config("gpus=8"))
    assigned = assigned_gpus(config("gpus=8"), learners=False)
    assert {role: place.gpus for role, place in assigned.items()} == {
        "actor engine": ("GPU-0aa", "GPU-1aa"),
        "extractor engine": ("GPU-2aa", "GPU-3aa"),
        "embedder": ("GPU-0aa",),
    }  # fmt: skip
    monkeypatch.setattr(module, "visible_gpus", list)
    with pytest.raises(ConfigError, match="this machine shows 0 GPUs"):
        assigned_gpus(config("gpus=8"), learners=False)


def test_the_extractor_of_the_start_is_placed_beside_a_learner_where_lessons_are_compared():
    plan = planned("tasks.room.eval.online=4")
    untrained, caches = (
        plan["untrained extractor"],
        [plan[role].memory.cache for role in ("actor engine", "extractor engine")],
    )
    assert untrained.gpus == (2,)
    assert untrained.fraction == untrained.memory.total / (80 * GIB)
    assert untrained.memory.cache == plan["extractor engine"].need.memory.cache
    assert caches == [planned()[role].memory.cache for role in ("actor engine", "extractor engine")]
    assert (plan.asked, plan.problems) == (8, ())


# ── the command line ──────────────────────────────────────────────────────────────────────────────


def crl(*args: str):
    return CliRunner().invoke(app, list(args))


def test_a_dry_run_prints_the_plan_of_a_node():
    result = crl("train", "--preset", "node8", "--tasks", "room,webshop", "--dry-run")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "8 GPUs of 80.0 GiB, by gpu_memory; this machine shows none" in lines
    assert "engines and learners ask for 8: each gets GPUs of its own" in lines
    assert (
        "actor      Qwen/Qwen2.5-7B-Instruct (not downloaded: hf download Qwen/Qwen2.5-7B-Instruct)"
        in lines
    )
    assert "engine       vllm, 2 replicas of each model; weights by file" in lines
    how = "ZeRO-3, optimizer offloaded, bfloat16, activations computed again"
    assert (
        "learner      deepspeed on cuda when present, else cpu, 1 CPU thread each; "
        f"2 ranks of each model, {how}"
    ) in lines
    (learner,) = [line for line in lines if line.startswith("actor learner ")]
    assert "GPU 2–3" in learner
    assert (
        "156.0 GiB of states, 141.9 of them in the machine's memory; "
        "32,768 tokens at a time; alone there"
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


def test_a_dry_run_says_what_does_not_fit_and_what_would():
    result = crl(
        "train", "--preset", "node8", "--tasks", "room,webshop", "--set", "gpus=2", "--dry-run"
    )
    assert result.exit_code == 2
    assert "does not fit: gpus = 2: GPU 0 would hold" in result.output
    assert "would fit: --set gpus=3" in result.output
    assert result.stderr.startswith("error: gpus = 2: GPU 0 would hold")


def test_a_run_without_its_models_is_refused():
    result = crl("train", "--preset", "node8", "--tasks", "room")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: actor.model = 'Qwen/Qwen2.5-7B-Instruct': "
        "is not downloaded (and crl downloads nothing). "
        "Run hf download Qwen/Qwen2.5-7B-Instruct, or give a directory.\n"
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


def test_a_model_that_is_neither_here_nor_known():
    with pytest.raises(ConfigError, match="or download it: hf download NAME"):
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


def test_what_nvidia_smi_lists():
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
