"""Checks of this machine: installed extras, devices and GPUs.

Torch is imported only if a device or DeepSpeed is asked for, because only torch knows whether it
can use a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from crl.config.schema import RunConfig
from crl.engines import require_vllm
from crl.engines.backends import ENGINES
from crl.errors import ConfigError
from crl.learners.backends import LEARNERS
from crl.modeling.gguf import find_folder
from crl.monitor.sinks import require_sinks
from crl.planning.gpu_plan import assigned_gpus
from crl.planning.gpus import visible_gpus
from crl.planning.model_checks import model_sections
from crl.types import RoleName


def require_learner(config: RunConfig) -> None:
    """Raise `ConfigError` if the run's learner needs an extra that is not installed."""
    LEARNERS[config.learner.kind].require_installed()


def require_engine(config: RunConfig) -> None:
    """Raise `ConfigError` if the engine of the models or of the embedder is not installed."""
    ENGINES[config.engine.kind].require_installed()
    if config.with_bank and config.embedder.kind == "vllm":
        require_vllm("embedder.kind", "vllm")


def require_monitors(config: RunConfig) -> None:
    """Raise `ConfigError` if a sink of metrics needs an extra that is not installed."""
    require_sinks(config.monitor)


def require_gpus(config: RunConfig, only: RoleName | None = None) -> None:
    """Raise `ConfigError` if the run does not fit on this machine's GPUs.

    `only`: the run consists of the engine and the learner of this model; None for a whole run.
    """
    assigned_gpus(config, only=only)


def require_gpus_to_evaluate(config: RunConfig) -> None:
    """Raise `ConfigError` if the run's engines do not fit on this machine's GPUs."""
    assigned_gpus(config, learners=False)


def require_devices(config: RunConfig) -> None:
    """Raise `ConfigError` if a part of the run is to use a GPU that torch does not find."""
    devices = {"learner.device": config.learner.device}
    if ENGINES[config.engine.kind].in_process:
        devices["engine.device"] = config.engine.device
    embedder = config.embedder
    if config.with_bank and embedder.kind == "local" and embedder.is_encoder:
        devices["embedder.device"] = embedder.device
    for key, device in devices.items():
        if device not in ("auto", "cpu"):
            from crl.modeling.loading import resolve_device

            resolve_device(device, key)


def require_engine_devices(config: RunConfig) -> None:
    """Raise `ConfigError` as `require_devices` does, for an evaluation without learners."""
    require_devices(
        config.model_copy(update={"learner": config.learner.model_copy(update={"device": "cpu"})})
    )


def require_ranks(config: RunConfig, only: RoleName | None = None) -> None:
    """Raise `ConfigError` if ranks cannot train the run's models on this machine's devices.

    `only` is the model that is trained alone, or None.
    """
    learner = config.learner
    if LEARNERS[learner.kind].in_process:
        return
    from crl.modeling.loading import precision, resolve_device

    device = resolve_device(learner.device, "learner.device")
    for role, section in model_sections(config, only).items():
        if config.trains(role) and (path := find_folder(section.model, f"{role}.model")):
            bfloat16 = str(precision(learner.precision, path, device)) == "torch.bfloat16"
            LEARNERS[learner.kind].require_trainable(
                learner,
                cuda=device.type == "cuda",
                bfloat16=bfloat16,
                receivers=ENGINES[config.engine.kind].nccl_receivers(config.engine),
            )


def require_assigned_gpus(config: RunConfig) -> None:
    """Raise `ConfigError` if another process of the run needs a GPU that crl cannot assign."""
    if visible_gpus():
        return
    if not LEARNERS[config.learner.kind].in_process and config.learner.device != "cpu":
        require_assigned("learner.device", config.learner.device, (), "learner.device=cpu")
    if not ENGINES[config.engine.kind].in_process:
        require_assigned("engine.kind", config.engine.kind, (), "engine.kind=torch")
    if config.with_bank and config.embedder.kind == "vllm":
        require_assigned("embedder.kind", "vllm", (), "embedder.kind=local")


def require_assigned(key: str, value: str, gpus: Sequence[str], remedy: str) -> None:
    """Raise `ConfigError` if torch finds a GPU, but `gpus`, the GPUs of a role, are empty.

    The GPU plan is empty if nvidia-smi lists no GPU with its memory. `key` and `value` name the
    setting that needs the GPU, `remedy` the setting that does without it.
    """
    if gpus:
        return
    import torch

    if torch.cuda.is_available():
        reason = (
            "torch finds a GPU, but nvidia-smi reports no GPU with its memory size, "
            "so crl cannot assign GPUs to engines and learners"
        )
        raise ConfigError(key, value, reason, f"Fix nvidia-smi (see crl doctor), or use {remedy}")
