"""GPU plan of a run: GPUs of each role, memory of each GPU, alternatives if it does not fit.

The plan is computed from model sizes and settings alone. It needs torch only for a model without
safetensors files; see `crl.planning.model_size`.

Roles are the engine and the learner of each model, the embedder, and the untrained extractor. The
last one is the extractor of the run's start; it runs at the end of a run that compares lessons.
Placement follows these rules:

* Parts of this process (torch engine, local learner, local embedder) are on the first GPU.
* With enough GPUs, each engine and each learner gets separate GPUs.
* Otherwise they share GPUs. The role with the largest memory is placed first, and each role gets
  the GPUs with the least planned memory.
* The untrained extractor and the embedder always share GPUs.
* Free memory of a GPU becomes cache of its vLLM engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from crl.config.layers import put
from crl.config.method import ACTOR_ALONE
from crl.config.models.shapes import PUBLISHED_SHAPES, ModelShape, require_context
from crl.config.schema import LoraSection, RunConfig
from crl.config.validate import run_config
from crl.embedders import embedder_memory, encoder_folder
from crl.engines.backends import ENGINES
from crl.errors import ConfigError
from crl.learners.backends import LEARNERS
from crl.modeling.memory import (
    GIB,
    GpuAssignment,
    GpuRequest,
    GpuUser,
    Memory,
    VllmCache,
    adapter_size,
    dtype_bytes,
    gib_text,
    size_text,
)
from crl.planning.gpus import Gpu, visible_gpus
from crl.planning.model_size import planned_shape
from crl.types import RoleName
from crl.wording import counted

USABLE_SHARE = 0.95
"""Share of a GPU's memory that a plan may use. The allocator loses the rest between its blocks."""

MAX_ENGINE_SHARE = 0.9
"""Largest share of a GPU's memory that a vLLM engine gets."""

MAX_GPUS = 64
"""Largest number of GPUs that is tried as an alternative."""

SHARING_ROLES: tuple[GpuUser, ...] = ("untrained extractor", "embedder")
"""Roles that always share a GPU: they do not reduce the number of GPUs of other roles."""


@dataclass(frozen=True)
class Placement:
    """Role on its GPUs."""

    request: GpuRequest
    gpus: tuple[int, ...]
    """Positions among the visible GPUs, from 0. GPUs of one replica are adjacent in the tuple."""
    memory: Memory
    """Memory on each GPU."""
    fraction: float | None = None
    """Share of a GPU's memory for a vLLM engine; None for other roles and unknown GPU sizes."""


@dataclass(frozen=True)
class Problem:
    """Reason why a plan does not fit, in the terms of a `ConfigError`."""

    key: str
    """Config key of the setting that causes the problem."""
    value: object
    reason: str


@dataclass(frozen=True)
class GpuPlan:
    """Placement of all roles on the GPUs of a run."""

    count: int
    """Number of GPUs."""
    requested: int
    """Number of GPUs that the roles request (see `_requested`)."""
    sizes: tuple[float, ...] | None
    """Memory of each GPU in bytes; None if unknown."""
    source: str
    """Origin of `count` and `sizes`, for people."""
    placements: tuple[Placement, ...]
    problems: tuple[Problem, ...]
    """Reasons why the plan does not fit; empty if it fits."""
    alternatives: tuple[str, ...] = ()
    """Command-line options with which the plan would fit; empty if it fits or none was found."""

    def __getitem__(self, role: GpuUser) -> Placement:
        """Return the placement of `role`. Raise `KeyError` if the role is not on a GPU."""
        return {placement.request.role: placement for placement in self.placements}[role]

    def require_fit(self) -> None:
        """Raise `ConfigError` if the plan does not fit. The error names the alternatives."""
        if self.problems:
            key, value, reason = (
                self.problems[0].key,
                self.problems[0].value,
                self.problems[0].reason,
            )
            options = "; or ".join(self.alternatives)
            remedy = (
                f"Settings that fit: {options}"
                if options
                else "No settings were found that fit. Use smaller models"
            )
            raise ConfigError(key, value, reason, remedy)


# ── making a plan ─────────────────────────────────────────────────────────────────────────────────


def gpu_plan(
    config: RunConfig,
    visible: Sequence[Gpu] | None = None,
    *,
    learners: bool = True,
    only: RoleName | None = None,
    shapes: Mapping[str, ModelShape] | None = None,
) -> GpuPlan | None:
    """Return the GPU plan of a run; None for a run without GPUs.

    `visible` holds this machine's GPUs; None: ask nvidia-smi. `learners` is False if nothing is
    trained, as in an evaluation. `only`: the run consists of the engine and the learner of this
    model, as in supervised fine-tuning. `shapes` are sizes by model (see `model_shapes`) that
    replace those of the run's models. Raise `ConfigError` if the size of a model is unknown, or if
    a model cannot be served with these settings.

    A run with all parts in this process and without the setting `gpus` is not checked: its plan has
    no problems. If the size of one of its models is unknown, the result is None instead of an
    error.
    """
    visible = visible_gpus() if visible is None else visible
    count = len(visible) if config.gpus is None else config.gpus
    if not count:
        return None
    unchecked = (
        config.gpus is None
        and ENGINES[config.engine.kind].in_process
        and LEARNERS[config.learner.kind].in_process
        and config.embedder.kind == "local"
    )
    try:
        shapes = shapes or model_shapes(config, only)
    except ConfigError:
        if unchecked:
            return None
        raise
    _require_served(config, shapes, learners=learners)
    sizes, source = _sizes(config, count, visible)
    requests = _requests(config, shapes, learners=learners, only=only)
    placements, problems = _place(config, requests, count, sizes)
    if unchecked:
        problems = []
    alternatives = (
        tuple(_alternatives(config, shapes, count, sizes, learners=learners, only=only))
        if problems
        else ()
    )
    return GpuPlan(
        count, _requested(requests), sizes, source, tuple(placements), tuple(problems), alternatives
    )


def assigned_gpus(
    config: RunConfig, *, learners: bool = True, only: RoleName | None = None
) -> dict[str, GpuAssignment]:
    """Return the assigned GPUs by role, for the roles that are on a GPU.

    `learners` and `only` are as in `gpu_plan`. Without learners, a machine may have fewer GPUs than
    the setting `gpus`. Raise `ConfigError` if the run does not fit on this machine's GPUs.
    """
    visible = visible_gpus()
    if config.gpus is not None and config.gpus > len(visible):
        if learners or not visible:
            remedy = "Check crl doctor and CUDA_VISIBLE_DEVICES"
            if visible:
                remedy = f"Use at most {len(visible)}, or check crl doctor and CUDA_VISIBLE_DEVICES"
            raise ConfigError(
                "gpus",
                config.gpus,
                f"this machine has {counted(len(visible), 'visible GPU')}",
                remedy,
            )
        config = config.model_copy(update={"gpus": len(visible)})
    plan = gpu_plan(config, visible, learners=learners, only=only)
    if plan is None:
        return {}
    plan.require_fit()
    return {
        p.request.role: GpuAssignment(tuple(visible[gpu].uuid for gpu in p.gpus), p.fraction)
        for p in plan.placements
    }


def planned_elsewhere(config: RunConfig, visible: Sequence[Gpu] | None = None) -> bool:
    """Return whether a plan is for another machine.

    This is the case if the settings `gpus` and `gpu_memory` describe GPUs that this machine does
    not have. `visible` is as in `gpu_plan`.
    """
    if config.gpus is None or config.gpu_memory is None:
        return False
    return len(visible_gpus() if visible is None else visible) < config.gpus


def _sizes(
    config: RunConfig, count: int, visible: Sequence[Gpu]
) -> tuple[tuple[float, ...] | None, str]:
    if len(visible) >= count:
        names = ", ".join(sorted({gpu.name for gpu in visible[:count]}))
        return tuple(float(gpu.memory) for gpu in visible[:count]), f"{names} of this machine"
    visible_text = (
        f"this machine has {counted(len(visible), 'visible GPU') if visible else 'no visible GPU'}"
    )
    if config.gpu_memory is None:
        return None, f"memory unknown (gpu_memory is not set); {visible_text}"
    return (config.gpu_memory * GIB,) * count, f"size from gpu_memory; {visible_text}"


def model_shapes(config: RunConfig, only: RoleName | None = None) -> dict[str, ModelShape]:
    """Return the sizes of actor, extractor and embedder, as far as they are used; or of `only`.

    Raise `ConfigError` if the size of a model is unknown.
    """
    if only:
        return {only: planned_shape(_section(config, only).model, f"{only}.model")}
    shapes = {"actor": planned_shape(config.actor.model)}
    if config.with_extractor:
        shapes["extractor"] = planned_shape(config.extractor.model, "extractor.model")
    return shapes | embedder_shapes(config)


def embedder_shapes(config: RunConfig) -> dict[str, ModelShape]:
    """Return the sizes of the embedder; empty if it needs no model on this machine."""
    model = config.embedder.model
    if not config.with_bank or not config.embedder.is_encoder:
        return {}
    folder = model if model in PUBLISHED_SHAPES else str(encoder_folder(Path(model)))
    return {"embedder": planned_shape(folder, "embedder.model", encoder=True)}


def _require_served(config: RunConfig, shapes: Mapping[str, ModelShape], *, learners: bool) -> None:
    """Raise `ConfigError` for a model that cannot be served, however many GPUs there are."""
    for model in (role for role in ("actor", "extractor") if role in shapes):
        require_context(
            model, _section(config, model).max_context_tokens, shapes[model].max_context
        )
        backend = ENGINES[config.engine.kind]
        backend.require_servable(config.engine, model, shapes[model])
        if learners and (adapter := config.trained_adapter(model)):
            float32 = dtype_bytes(shapes[model], config.learner) == 4
            backend.require_adapter(model, adapter, float32_on_gpu=float32)


def _requests(
    config: RunConfig, shapes: Mapping[str, ModelShape], *, learners: bool,
    only: RoleName | None = None,
) -> list[GpuRequest]:  # fmt: skip
    trained = {role: learners and config.trains(role) for role in ("actor", "extractor")}
    uses_gpu = ENGINES[config.engine.kind].uses_gpu(config.engine)
    requests = []
    roles = ("actor", "extractor") if config.with_extractor else ("actor",)
    for model in (only,) if only else roles:
        if uses_gpu:
            adapter = config.trained_adapter(model) if trained[model] else None
            requests.append(_engine(config, model, shapes[model], adapter))
        if trained[model] and config.learner.device != "cpu":
            requests.append(_learner(config, model, shapes[model]))
    if only:
        return requests
    if _shares_base(config):
        requests = [
            _without_base(config, request, shapes["extractor"])
            if request.role == "extractor learner"
            else request
            for request in requests
        ]
    if _compares_lessons(config) and uses_gpu:
        requests.append(
            _untrained_extractor(config, _engine(config, "extractor", shapes["extractor"]))
        )
    embedder = config.embedder
    if config.with_bank and "embedder" in shapes and embedder.device != "cpu":
        local = embedder.kind == "local"
        description = f"""{size_text(shapes["embedder"])}, {
            "in this process" if local else "vLLM pooling engine, on the GPU with most free memory"
        }"""
        requests.append(
            GpuRequest(
                "embedder",
                1,
                embedder_memory(shapes["embedder"], vllm=not local),
                description,
                vllm_cache=None if local else VllmCache(),
                first_gpu=local,
            )
        )
    return requests


def host_requests(
    config: RunConfig, shapes: Mapping[str, ModelShape], visible: Sequence[Gpu]
) -> list[GpuRequest]:
    """Return the requests of the parts of this process that are on the CPU, for the RAM.

    `visible` and `shapes` are as in `gpu_plan`. On a CPU, the precision `auto` is float32.
    """
    on_gpus: set[GpuUser] = set()
    if visible or config.gpus:
        on_gpus = {request.role for request in _requests(config, shapes, learners=True)}
    learner: dict[str, Any] = {"device": "auto"}
    if config.learner.precision == "auto":
        learner["precision"] = "float32"
    placed = config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"device": "auto"}),
            "learner": config.learner.model_copy(update=learner),
            "embedder": config.embedder.model_copy(update={"device": "auto"}),
        }
    )
    requests = _requests(placed, shapes, learners=True)
    return [request for request in requests if request.first_gpu and request.role not in on_gpus]


def _engine(
    config: RunConfig, model: str, shape: ModelShape, adapter: LoraSection | None = None
) -> GpuRequest:
    role: GpuUser = "actor engine" if model == "actor" else "extractor engine"
    section = _section(config, model)
    return ENGINES[config.engine.kind].request(
        role,
        config.engine,
        shape,
        section.max_context_tokens,
        dtype_bytes(shape, config.learner),
        adapter,
        truncated=section.top_p < 1 or section.top_k > 0,
    )


def _compares_lessons(config: RunConfig) -> bool:
    """Return whether the run uses its untrained extractor at the end; see `OnlineEvaluator`."""
    places = any(task.eval.online_places for task in config.tasks.values())
    return config.compares_lessons and places


def _untrained_extractor(config: RunConfig, engine: GpuRequest) -> GpuRequest:
    """Return the untrained extractor's request: one replica of `engine` with the minimum cache."""
    description = (
        f"{engine.description.partition(',')[0]}, initial weights, "
        "for the comparison after the last step"
    )
    cache = engine.vllm_cache
    return replace(
        engine,
        role="untrained extractor",
        gpus=ENGINES[config.engine.kind].gpus_per_replica(config.engine),
        description=description,
        key="engine.tensor_parallel",
        vllm_cache=replace(cache, takes_free_memory=False) if cache else None,
    )


def _learner(config: RunConfig, model: str, shape: ModelShape) -> GpuRequest:
    learner, section = config.learner, _section(config, model)
    role: GpuUser = "actor learner" if model == "actor" else "extractor learner"
    tokens = max(learner.micro_batch_tokens, section.max_context_tokens)
    return LEARNERS[learner.kind].request(
        role,
        learner,
        shape,
        tokens,
        reference=bool(section.kl_coef),
        adapter=adapter_size(shape, section.lora),
        merged=not ENGINES[config.engine.kind].receives_adapters,
    )


def _shares_base(config: RunConfig) -> bool:
    """Return whether the adapters of both learners share a base model (see `shared_base`)."""
    return (
        LEARNERS[config.learner.kind].in_process
        and config.actor.model == config.extractor.model
        and all(config.trained_adapter(role) for role in ("actor", "extractor"))
    )


def _without_base(config: RunConfig, request: GpuRequest, shape: ModelShape) -> GpuRequest:
    """Return the request of a learner whose base model is in the memory of another one."""
    base = shape.parameters * dtype_bytes(shape, config.learner)
    return replace(
        request,
        memory=replace(request.memory, weights=request.memory.weights - base),
        description=f"{request.description}; shares the base model of the actor learner",
    )


def _section(config: RunConfig, model: str) -> Any:
    return config.actor if model == "actor" else config.extractor


# ── placing ───────────────────────────────────────────────────────────────────────────────────────


def _place(
    config: RunConfig, requests: Sequence[GpuRequest], count: int, sizes: tuple[float, ...] | None
) -> tuple[list[Placement], list[Problem]]:  # fmt: skip
    """Return the placements, in the order of `requests`, and the problems.

    A role that requests more GPUs than the run has is a problem and is not placed.
    """
    loads, has_engine, gpus_by_role = [0.0] * count, [False] * count, {}
    problems = [
        _too_many_gpus(config, request, count) for request in requests if request.gpus > count
    ]
    shared = _requested(requests) > count

    def priority(request: GpuRequest) -> tuple[bool, bool, float]:
        return (
            not request.first_gpu,
            request.role in SHARING_ROLES,
            -request.memory.total if shared else 0.0,
        )

    for request in sorted((request for request in requests if request.gpus <= count), key=priority):
        # The untrained extractor prefers GPUs of learners, which are idle when it runs. On a GPU of
        # an engine it would reduce the cache.
        avoid_engines = request.role == "untrained extractor"
        by_load = sorted(
            range(count), key=lambda gpu: (avoid_engines and has_engine[gpu], loads[gpu], gpu)
        )
        gpus = tuple(sorted(range(1) if request.first_gpu else by_load[: request.gpus]))
        gpus_by_role[request.role] = gpus
        for gpu in gpus:
            loads[gpu] += request.memory.total
            has_engine[gpu] |= request.takes_free_memory
    placed = [
        Placement(request, gpus_by_role[request.role], request.memory)
        for request in requests
        if request.role in gpus_by_role
    ]
    if sizes:
        placed, size_problems = _with_free_memory(config, placed, sizes)
        problems += size_problems
    return placed, problems + list(_transfer_problems(config, gpus_by_role))


def _requested(requests: Sequence[GpuRequest]) -> int:
    """Return the number of GPUs that the roles request.

    Parts of this process together request one GPU. The roles in `SHARING_ROLES` request none.
    """
    return any(request.first_gpu for request in requests) + sum(
        request.gpus
        for request in requests
        if not request.first_gpu and request.role not in SHARING_ROLES
    )


def _too_many_gpus(config: RunConfig, request: GpuRequest, count: int) -> Problem:
    section, _, name = request.key.partition(".")
    reason = (
        f"the {request.role} needs {counted(request.gpus, 'GPU')}, "
        f"but the run has {counted(count, 'GPU')}"
    )
    return Problem(request.key, getattr(getattr(config, section), name), reason)


def _with_free_memory(
    config: RunConfig, placed: Sequence[Placement], sizes: Sequence[float]
) -> tuple[list[Placement], list[Problem]]:
    """Return the placements with free memory given to the engines that take it, and the problems.

    If a GPU would be too full, the placements are returned unchanged.
    """
    problems = []
    for gpu, size in enumerate(sizes):
        on_gpu = [placement for placement in placed if gpu in placement.gpus]
        needed = sum(_min_bytes(config, placement, size) for placement in on_gpu)
        if needed > USABLE_SHARE * size:
            parts = ", ".join(
                f"{placement.request.role} {gib_text(_min_bytes(config, placement, size))}"
                for placement in on_gpu
            )
            reason = (
                f"GPU {gpu} needs {gib_text(needed)} GiB, "
                f"but {gib_text(USABLE_SHARE * size)} GiB are usable ({parts})"
            )
            problems.append(Problem("gpus", len(sizes), reason))
            break  # other GPUs usually have the same problem
    if problems:
        return list(placed), problems
    sized = []
    for placement in placed:
        size = min(sizes[gpu] for gpu in placement.gpus)
        if not placement.request.takes_free_memory:
            sized.append(
                replace(
                    placement,
                    fraction=placement.memory.total / size
                    if placement.request.vllm_cache
                    else None,
                )
            )
            continue
        extra_bytes = min(_extra_bytes(config, placed, gpu, sizes[gpu]) for gpu in placement.gpus)
        fraction = config.engine.memory_fraction or min(
            MAX_ENGINE_SHARE, (placement.memory.total + extra_bytes) / size
        )
        extra = fraction * size - placement.memory.total
        if extra < 0:
            reason = (
                f"the {placement.request.role} needs at least "
                f"{gib_text(placement.memory.total)} of {gib_text(size)} GiB "
                "to cache one full sequence"
            )
            problems.append(Problem("engine.memory_fraction", fraction, reason))
        sized.append(
            replace(
                placement,
                memory=replace(placement.memory, cache=placement.memory.cache + extra),
                fraction=fraction,
            )
        )
    return sized, problems


def _min_bytes(config: RunConfig, placement: Placement, size: float) -> float:
    if placement.request.takes_free_memory and config.engine.memory_fraction:
        return config.engine.memory_fraction * size
    return placement.memory.total


def _extra_bytes(config: RunConfig, placed: Sequence[Placement], gpu: int, size: float) -> float:
    """Return the bytes that each engine that takes free memory may take above its minimum.

    The free memory is divided equally among these engines.
    """
    on_gpu = [placement for placement in placed if gpu in placement.gpus]
    free = USABLE_SHARE * size - sum(_min_bytes(config, placement, size) for placement in on_gpu)
    return free / sum(placement.request.takes_free_memory for placement in on_gpu)


def _transfer_problems(
    config: RunConfig, gpus_by_role: Mapping[GpuUser, tuple[int, ...]]
) -> Iterator[Problem]:
    pairs: tuple[tuple[GpuUser, GpuUser], ...] = (
        ("actor engine", "actor learner"),
        ("extractor engine", "extractor learner"),
    )
    for engine, learner in pairs:
        shared = set(gpus_by_role.get(engine, ())) & set(gpus_by_role.get(learner, ()))
        if shared and ENGINES[config.engine.kind].nccl_receivers(config.engine):
            reason = (
                f"NCCL sends between different GPUs, but {engine} and {learner} "
                f"share GPU {min(shared)}"
            )
            yield Problem("engine.transfer", "nccl", reason)


# ── alternatives that fit ─────────────────────────────────────────────────────────────────────────


def _alternatives(
    config: RunConfig, shapes: Mapping[str, ModelShape], count: int,
    sizes: tuple[float, ...] | None, *, learners: bool, only: RoleName | None,
) -> Iterator[str]:  # fmt: skip
    """Yield command-line options with which the plan would fit.

    First the smallest larger number of GPUs. Then at most two smallest sets of changed settings
    that keep the method, the cheapest set first. Last the method `ACTOR_ALONE`, if it takes fewer
    changes than those. A model that is trained alone (`only`) stays trained.
    """
    size = min(sizes) if sizes else None
    fits = partial(_fits, learners=learners, only=only)
    for more in range(count + 1, MAX_GPUS + 1):
        if fits(config, shapes, more, (size,) * more if size else None):
            yield f"--set gpus={more}"
            break
    settings = [
        setting
        for setting in _memory_settings(config, count)
        if not (only and setting[0] == f"{only}.train")
    ]

    def smallest_sets(
        required: tuple[tuple[str, Any], ...], most: int
    ) -> Iterator[tuple[tuple[str, Any], ...]]:
        sets = (
            subset + required
            for n in range(most + 1 - len(required))
            for subset in itertools.combinations(settings, n)
        )
        return (
            changes for changes in sets if fits(_changed(config, changes), shapes, count, sizes)
        )

    found = list(itertools.islice(smallest_sets((), len(settings)), 2))
    found = [changes for changes in found if len(changes) == len(found[0])]
    if config.with_extractor and not only:
        most = len(found[0]) - 1 if found else len(settings) + 1
        found += itertools.islice(smallest_sets((("method", ACTOR_ALONE),), most), 1)
    yield from (" ".join(_option(key, value) for key, value in changes) for changes in found)


def _memory_settings(config: RunConfig, count: int) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of settings that save memory, the least harmful to learning first."""
    yield from LEARNERS[config.learner.kind].memory_settings(config.learner, count)
    yield from ENGINES[config.engine.kind].memory_settings(config.engine)
    if config.learner.micro_batch_tokens > 4096:
        yield "learner.micro_batch_tokens", 4096
    yield "actor.max_context_tokens", config.actor.max_context_tokens // 2
    if config.with_extractor:
        yield "extractor.max_context_tokens", config.extractor.max_context_tokens // 2
        if config.extractor.train:
            yield "extractor.train", False


def _changed(config: RunConfig, changes: Sequence[tuple[str, Any]]) -> RunConfig | None:
    """Return the config with `changes` applied; None if the settings then contradict each other."""
    settings = config.model_dump()
    for key, value in changes:
        put(settings, key, value)
    try:
        return run_config(settings)
    except ConfigError:
        return None


def _fits(
    config: RunConfig | None, shapes: Mapping[str, ModelShape], count: int,
    sizes: tuple[float, ...] | None, *, learners: bool, only: RoleName | None,
) -> bool:  # fmt: skip
    if config is None:
        return False
    requests = _requests(config, shapes, learners=learners, only=only)
    return not _place(config, requests, count, sizes)[1]


def _option(key: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else value
    return f"--method {value}" if key == "method" else f"--set {key}={text}"


# ── for people ────────────────────────────────────────────────────────────────────────────────────


def describe(plan: GpuPlan) -> str:
    """Return the plan as text: each role with its GPUs, then a table of the memory of each GPU."""
    size = f" of {gib_text(min(plan.sizes))} GiB" if plan.sizes else ""
    lines = [f"{counted(plan.count, 'GPU')}{size}, {plan.source}", _placement_rule(plan)]
    used = {gpu for placement in plan.placements for gpu in placement.gpus}
    for placement in plan.placements:
        lines.append(
            f"{placement.request.role:<19} {_numbers(placement.gpus):<8} "
            f"{placement.request.description}{_sharing(plan, placement)}"
        )
    if idle := sorted(set(range(plan.count)) - used):
        lines.append(f"{'idle':<19} {_numbers(idle):<8} {_use_of_idle(plan)}")
    if host_bytes := sum(placement.request.host_bytes for placement in plan.placements):
        lines.append(f"{'host memory':<19} {'':<8} {gib_text(host_bytes)} GiB for offloaded states")
    lines += ["", *_table(plan)]
    lines += [
        f"does not fit: {problem.key} = {problem.value}: {problem.reason}"
        for problem in plan.problems
    ]
    lines += [f"fits: {option}" for option in plan.alternatives]
    return "\n".join(lines)


def _use_of_idle(plan: GpuPlan) -> str:
    """Return the settings that use more GPUs. Torch engines and local learners have none."""
    settings = [
        setting
        for part, setting in (("engine", "engine.replicas"), ("learner", "learner.ranks"))
        if any(
            part in placement.request.role and not placement.request.first_gpu
            for placement in plan.placements
        )
    ]
    if settings:
        return f"increase {' or '.join(settings)} to use them"
    return "torch engines and local learners do not use them"


def _placement_rule(plan: GpuPlan) -> str:
    if not plan.placements:
        return "no part of the run uses a GPU"
    if all(placement.request.first_gpu for placement in plan.placements):
        return "all parts run in this process, on the first GPU"
    requested = f"engines and learners need {counted(plan.requested, 'GPU')}"
    if plan.requested <= plan.count:
        return f"{requested}: each has separate GPUs"
    return (
        f"{requested}: they share GPUs, placed from the largest to the smallest "
        "on the GPU with most free memory"
    )


def _sharing(plan: GpuPlan, placement: Placement) -> str:
    others = [
        other.request.role
        for other in plan.placements
        if other is not placement and set(other.gpus) & set(placement.gpus)
    ]
    share, cache = "", placement.request.vllm_cache
    if placement.fraction is not None and cache and cache.token_bytes:
        tokens = placement.memory.cache / cache.token_bytes
        share = f"; {placement.fraction:.2f} of a GPU, a cache of {tokens:,.0f} tokens each"
    return f"{share}; {'shared with ' + ', '.join(others) if others else 'not shared'}"


def _table(plan: GpuPlan) -> list[str]:
    names = [field.name for field in fields(Memory)]
    rows = [["GiB", "", *names, "total"]]
    for gpu in range(plan.count):
        on_gpu = [placement for placement in plan.placements if gpu in placement.gpus]
        for placement in on_gpu:
            parts = [getattr(placement.memory, name) for name in names]
            label = f"GPU {gpu}" if placement is on_gpu[0] else ""
            rows.append(
                [
                    label,
                    placement.request.role,
                    *(gib_text(part) if part else "–" for part in parts),
                    gib_text(placement.memory.total),
                ]
            )
        if on_gpu:
            most = f" of {gib_text(plan.sizes[gpu])}" if plan.sizes else ""
            used = gib_text(sum(placement.memory.total for placement in on_gpu))
            rows[-1][-1] += f"   GPU {gpu}: {used}{most}"
    widths = [max(len(row[i]) for row in rows) for i in range(len(names) + 2)]
    return ["  ".join([f"{a:<{widths[0]}}", f"{b:<{widths[1]}}",
                       *(f"{c:>{w}}" for c, w in zip(rest, widths[2:], strict=True)), f"{last}"])
            for a, b, *rest, last in rows]  # fmt: skip


def _numbers(gpus: Sequence[int]) -> str:
    run = len(gpus) > 1 and gpus[-1] - gpus[0] == len(gpus) - 1
    return f"GPU {gpus[0]}–{gpus[-1]}" if run else f"GPU {', '.join(map(str, gpus))}"
