"""Models of a run: their roles, engines and learners."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from crl.config import RunConfig, resolve_model
from crl.config.schema import ActorSection, ExtractorSection
from crl.engines.backends import ENGINES, ServedModel, open_engine
from crl.learners.backends import LEARNERS, TrainedModel, open_learner
from crl.learners.step import TrainSettings
from crl.modeling import Precision
from crl.modeling.adapters import BaseModel
from crl.modeling.gguf import converted
from crl.modeling.loading import (
    load_tokenizer,
    precision,
    resolve_device,
    stop_ids,
)
from crl.modeling.lora import Adapter
from crl.modeling.memory import GpuAssignment
from crl.modeling.tokens import ChatRenderer
from crl.planning.machine_checks import require_assigned
from crl.protocols import (
    Engine,
    Learner,
    Loss,
)
from crl.seeds import derive_seed
from crl.types import RoleName

NO_GPU = GpuAssignment()
"""Assignment of a role that needs no GPU."""


@dataclass(frozen=True)
class ModelRole:
    """Actor or extractor of a run, with its section of the config."""

    name: RoleName
    path: Path
    """Directory in Hugging Face format."""
    source: Path
    """Directory or file from which `path` was made: `path` itself, a GGUF file or an adapter."""
    section: ActorSection | ExtractorSection

    @property
    def key(self) -> str:
        """Config key that names the model."""
        return f"{self.name}.model"

    @property
    def renderer(self) -> ChatRenderer:
        tokenizer = load_tokenizer(self.path, self.key)
        return ChatRenderer(tokenizer, stop_ids(self.path, tokenizer, self.key))


def print_to_stderr(text: str) -> None:
    """Print `text` and a line break in one write, which output of other threads cannot split."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def actor_model(config: RunConfig, note: Callable[[str], object] = print_to_stderr) -> ModelRole:
    """Return the actor. `note` is called with a line of text before a conversion from GGUF."""
    return model_of("actor", resolve_model(config.actor.model), config.actor, note)


def extractor_model(
    config: RunConfig, note: Callable[[str], object] = print_to_stderr
) -> ModelRole:
    """Return the extractor that the run starts with, like `actor_model`."""
    source = resolve_model(config.extractor.model, "extractor.model")
    return model_of("extractor", source, config.extractor, note)


def model_of(
    name: RoleName,
    source: Path,
    section: ActorSection | ExtractorSection,
    note: Callable[[str], object] = print_to_stderr,
) -> ModelRole:
    """Return a role whose model is in the directory or file `source`, like `actor_model`."""
    return ModelRole(name, converted(source, f"{name}.model", note), source, section)


async def open_role_learner(
    config: RunConfig,
    gpus: Mapping[str, GpuAssignment],
    role: ModelRole,
    loss: Loss,
    stack: AsyncExitStack,
) -> Learner:
    """Start the learner of a role. `stack` closes it."""
    section = config.learner
    assigned = gpus.get(f"{role.name} learner", NO_GPU)
    if not LEARNERS[section.kind].in_process and _learner_device(config).type == "cuda":
        require_assigned("learner.device", section.device, assigned.gpus, "learner.device=cpu")
    model = TrainedModel(
        role.name,
        role.path,
        _precision(config, role),
        role.section.optimizer,
        loss,
        _train_settings(config, role.section),
        await asyncio.to_thread(_adapter, config, role),  # it reads all weights of the base model
    )
    learner = await open_learner(
        section,
        model,
        assigned,
        receivers=ENGINES[config.engine.kind].nccl_receivers(config.engine),
        deterministic=config.run.deterministic,
    )
    stack.push_async_callback(learner.aclose)
    return learner


def _adapter(config: RunConfig, role: ModelRole) -> Adapter | None:
    """Return the adapter that the learner of a role trains; None if it trains all weights."""
    if not role.section.lora.rank:
        return None
    return Adapter(
        role.section.lora,
        BaseModel.of(role.source, role.key),
        derive_seed(config.run.seed, "adapter", role.name),
        merged=not ENGINES[config.engine.kind].receives_adapters,
    )


def _train_settings(config: RunConfig, section: ActorSection | ExtractorSection) -> TrainSettings:
    actor = section if isinstance(section, ActorSection) else None
    return TrainSettings(
        temperature=section.temperature,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        max_grad_norm=section.optimizer.max_grad_norm,
        recompute=actor is not None and actor.old_logp == "recompute",
        importance_cap=actor.importance_cap if actor else None,
        kl_coef=section.kl_coef,
        activation_checkpointing=config.learner.activation_checkpointing,
    )


async def open_role_engine(
    config: RunConfig,
    gpus: Mapping[str, GpuAssignment],
    role: ModelRole,
    stack: AsyncExitStack,
    *,
    trained: bool = False,
) -> Engine:
    """Start the engine of a role. `stack` closes it.

    `trained`: a learner of the role sends weights to the engine.
    """
    assigned = gpus.get(f"{role.name} engine", NO_GPU)
    replicas = ENGINES[config.engine.kind].replicas(config.engine)
    return await _open_engine(config, assigned, role, replicas, stack, trained=trained)


async def open_untrained_engine(
    config: RunConfig, gpus: Mapping[str, GpuAssignment], stack: AsyncExitStack
) -> Engine:
    """Open an engine with one replica of the extractor that the run started with.

    It runs in addition to all other engines.
    """
    return await _open_engine(
        config, gpus.get("untrained extractor", NO_GPU), extractor_model(config), 1, stack
    )


async def _open_engine(
    config: RunConfig,
    assigned: GpuAssignment,
    role: ModelRole,
    replicas: int,
    stack: AsyncExitStack,
    *,
    trained: bool = False,
) -> Engine:
    section = config.engine
    if not ENGINES[section.kind].in_process:
        require_assigned("engine.kind", section.kind, assigned.gpus, "engine.kind=torch")
    engine = await open_engine(
        section,
        ServedModel(
            role.name,
            role.path,
            _precision(config, role),
            role.section.max_context_tokens,
            role.section.lora if trained and role.section.lora.rank else None,
            isinstance(role.section, ExtractorSection) and role.section.structured_outputs,
        ),
        assigned,
        replicas=replicas,
        deterministic=config.run.deterministic,
    )
    stack.push_async_callback(engine.aclose)
    return engine


def _learner_device(config: RunConfig) -> torch.device:
    return resolve_device(config.learner.device, "learner.device")


def _precision(config: RunConfig, role: ModelRole) -> Precision:
    """Return the precision of learner and engine.

    Both use the same one, so the engine samples with exactly the weights that the learner
    publishes.
    """
    dtype = precision(config.learner.precision, role.path, _learner_device(config))
    return "bfloat16" if dtype == torch.bfloat16 else "float32"
