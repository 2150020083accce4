"""GPU plan of a run: GPUs of each role, memory of each GPU, alternatives if it does not fit.

The plan is computed from model sizes and settings alone. It needs no torch.

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
from typing import Any, Literal

from crl.config.layers import put
from crl.config.models import model_shape
from crl.config.schema import RunConfig
from crl.config.shapes import KNOWN, ModelShape, require_context, require_divisible
from crl.config.validate import validated
from crl.embedders import encoder_folder
from crl.errors import ConfigError
from crl.run.gpu_memory import (
    GIB,
    Memory,
    embedder_memory,
    host_memory,
    learner_memory,
    number_bytes,
    state_memory,
    torch_engine_memory,
    vllm_memory,
)
from crl.run.gpus import Gpu, visible_gpus

USABLE = 0.95
"""Share of a GPU's memory that a plan may use. The allocator loses the rest between its blocks."""

LARGEST_FRACTION = 0.9
"""Largest share of a GPU's memory that a vLLM engine gets."""

FRACTIONS = (0.8, 0.5, 0.3)
"""Alternatives that are tried for an engine.memory_fraction that does not fit."""

MOST_GPUS = 64
"""Largest number of GPUs that is tried as an alternative."""

GpuUser = Literal[
    "actor engine",
    "actor learner",
    "extractor engine",
    "extractor learner",
    "untrained extractor",
    "embedder",
]

SHARING: tuple[GpuUser, ...] = ("untrained extractor", "embedder")
"""Roles that always share a GPU: they do not reduce the number of GPUs of other roles."""


@dataclass(frozen=True)
class GpuRequest:
    """GPUs and the memory that a role asks for."""

    role: GpuUser
    gpus: int
    """Number of GPUs."""
    memory: Memory
    """Memory on each of these GPUs; for a vLLM engine the minimum."""
    what: str
    """Description for people."""
    key: str = "gpus"
    """Config key that sets the number of GPUs."""
    vllm: bool = False
    """True for a vLLM engine."""
    grows: bool = False
    """True if the role also takes the free memory of its GPUs."""
    first: bool = False
    """True if the role must be on the first GPU."""
    kv_bytes: float = 0.0
    """Bytes of one token in the cache, on each GPU."""
    host: float = 0.0
    """Bytes of the machine's memory."""


@dataclass(frozen=True)
class Placement:
    """Role on its GPUs."""

    need: GpuRequest
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
    asked: int
    """Number of GPUs that the roles ask for (see `_asked`)."""
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
        return {placement.need.role: placement for placement in self.placements}[role]

    def require_fit(self) -> None:
        """Raise `ConfigError` if the plan does not fit. The error names the alternatives."""
        if self.problems:
            key, value, reason = (
                self.problems[0].key,
                self.problems[0].value,
                self.problems[0].reason,
            )
            would = "; or ".join(self.alternatives)
            remedy = (
                f"What would fit: {would}"
                if would
                else "No change of settings was found that would fit: use smaller models"
            )
            raise ConfigError(key, value, reason, remedy)


# ── making a plan ─────────────────────────────────────────────────────────────────────────────────


def gpu_plan(
    config: RunConfig, visible: Sequence[Gpu] | None = None, *, learners: bool = True
) -> GpuPlan | None:
    """Return the GPU plan of a run; None for a run without GPUs.

    `visible` holds this machine's GPUs; None: ask nvidia-smi. `learners` is False if nothing is
    trained, as in an evaluation. Raise `ConfigError` if the size of a model is unknown, or if a
    model cannot be served with these settings.

    A run with all parts in this process and without the setting `gpus` is not checked: its plan has
    no problems. If the size of one of its models is unknown, the result is None instead of an
    error.
    """
    visible = visible_gpus() if visible is None else visible
    count = len(visible) if config.gpus is None else config.gpus
    if not count:
        return None
    unasked = (
        config.gpus is None
        and config.engine.kind == "torch"
        and config.learner.kind == "local"
        and config.embedder.kind == "local"
    )
    try:
        shapes = _shapes(config)
    except ConfigError:
        if unasked:
            return None
        raise
    _require_served(config, shapes)
    sizes, source = _sizes(config, count, visible)
    needs = _needs(config, shapes, learners=learners)
    placements, problems = _place(config, needs, count, sizes)
    if unasked:
        problems = []
    alternatives = (
        tuple(_alternatives(config, shapes, count, sizes, learners=learners)) if problems else ()
    )
    return GpuPlan(
        count, _asked(needs), sizes, source, tuple(placements), tuple(problems), alternatives
    )


@dataclass(frozen=True)
class Assigned:
    """GPUs of this machine that are assigned to a role."""

    gpus: tuple[str, ...] = ()
    """UUIDs, usable in CUDA_VISIBLE_DEVICES. GPUs of one replica are adjacent."""
    fraction: float | None = None
    """As in `Placement`."""


def assigned_gpus(config: RunConfig, *, learners: bool = True) -> dict[str, Assigned]:
    """Return the assigned GPUs by role, for the roles that are on a GPU.

    `learners` is as in `gpu_plan`. Without learners, a machine may have fewer GPUs than the setting
    `gpus`. Raise `ConfigError` if the run does not fit on this machine's GPUs.
    """
    visible = visible_gpus()
    if config.gpus is not None and config.gpus > len(visible):
        if learners or not visible:
            remedy = (
                f"Choose at most {len(visible)}, or look at crl doctor and CUDA_VISIBLE_DEVICES"
            )
            raise ConfigError(
                "gpus", config.gpus, f"this machine shows {_count(len(visible), 'GPU')}", remedy
            )
        config = config.model_copy(update={"gpus": len(visible)})
    plan = gpu_plan(config, visible, learners=learners)
    if plan is None:
        return {}
    plan.require_fit()
    return {
        p.need.role: Assigned(tuple(visible[gpu].uuid for gpu in p.gpus), p.fraction)
        for p in plan.placements
    }


def _sizes(
    config: RunConfig, count: int, visible: Sequence[Gpu]
) -> tuple[tuple[float, ...] | None, str]:
    if len(visible) >= count:
        names = ", ".join(sorted({gpu.name for gpu in visible[:count]}))
        return tuple(float(gpu.memory) for gpu in visible[:count]), f"{names} of this machine"
    here = f"this machine shows {_count(len(visible), 'GPU') if visible else 'none'}"
    if config.gpu_memory is None:
        return None, f"of unknown memory (gpu_memory is unset); {here}"
    return (config.gpu_memory * GIB,) * count, f"by gpu_memory; {here}"


def _shapes(config: RunConfig) -> dict[str, ModelShape]:
    shapes = {"actor": model_shape(config.actor.model)}
    if config.with_experience:
        shapes["extractor"] = model_shape(config.extractor.model, "extractor.model")
        if config.embedder.model != "hash" and not config.embedder.is_url:
            shapes["embedder"] = _encoder_shape(config.embedder.model)
    return shapes


def _require_served(config: RunConfig, shapes: Mapping[str, ModelShape]) -> None:
    """Raise `ConfigError` for a model that cannot be served, however many GPUs there are."""
    for model in (role for role in ("actor", "extractor") if role in shapes):
        require_context(
            model, _section(config, model).max_context_tokens, shapes[model].max_context
        )
        if config.engine.kind == "vllm":
            require_divisible(model, config.engine.tensor_parallel, shapes[model].heads)


def _encoder_shape(model: str) -> ModelShape:
    return model_shape(
        model if model in KNOWN else str(encoder_folder(Path(model))), "embedder.model"
    )


def _needs(
    config: RunConfig, shapes: Mapping[str, ModelShape], *, learners: bool
) -> list[GpuRequest]:
    trained = {
        "actor": learners,
        "extractor": learners and config.extractor.train and not config.bank.frozen,
    }
    needs = []
    for model in ("actor", "extractor") if config.with_experience else ("actor",):
        if config.engine.kind == "vllm" or config.engine.device != "cpu":
            needs.append(_engine(config, model, shapes[model]))
        if trained[model] and config.learner.device != "cpu":
            needs.append(_learner(config, model, shapes[model]))
    if _lessons_compared(config) and (
        config.engine.kind == "vllm" or config.engine.device != "cpu"
    ):
        needs.append(_untrained(config, _engine(config, "extractor", shapes["extractor"])))
    embedder = config.embedder
    if config.with_experience and "embedder" in shapes and embedder.device != "cpu":
        local = embedder.kind == "local"
        what = f"""{_billions(shapes["embedder"])}, {
            "in this process" if local else "vLLM pooling engine, small: where there is most room"
        }"""
        needs.append(
            GpuRequest(
                "embedder",
                1,
                embedder_memory(shapes["embedder"], vllm=not local),
                what,
                vllm=not local,
                first=local,
            )
        )
    return needs


def _engine(config: RunConfig, model: str, shape: ModelShape) -> GpuRequest:
    engine, tokens = config.engine, _section(config, model).max_context_tokens
    role: GpuUser = "actor engine" if model == "actor" else "extractor engine"
    if engine.kind == "torch":
        memory = torch_engine_memory(
            shape, engine.max_batch, tokens, number_bytes(shape, config.learner)
        )
        what = (
            f"{_billions(shape)}, torch, in this process: "
            f"rows for {engine.max_batch} sequences of {tokens:,} tokens"
        )
        return GpuRequest(role, 1, memory, what, first=True)
    width, number = engine.tensor_parallel, number_bytes(shape, config.learner)
    memory, kv = (
        vllm_memory(shape, width, tokens, number),
        shape.kv_bytes(number) / min(width, shape.kv_heads),
    )
    what = (
        f"{_billions(shape)}, vLLM, {_count(engine.replicas, 'replica')} of {_count(width, 'GPU')}"
    )
    gpus = engine.replicas * width
    return GpuRequest(
        role, gpus, memory, what, key="engine.replicas", vllm=True, grows=True, kv_bytes=kv
    )


def _lessons_compared(config: RunConfig) -> bool:
    """Return whether the run uses its untrained extractor at the end (see `crl.run.online`)."""
    return (
        config.with_experience
        and not config.bank.frozen
        and any(task.eval.online for task in config.tasks.values())
    )


def _untrained(config: RunConfig, engine: GpuRequest) -> GpuRequest:
    """Return the untrained extractor's need: one replica of `engine` with the minimum cache."""
    what = f"{engine.what.partition(',')[0]}, as at the start, for a comparison after the last step"
    gpus = config.engine.tensor_parallel if engine.vllm else 1
    return replace(
        engine,
        role="untrained extractor",
        gpus=gpus,
        what=what,
        key="engine.tensor_parallel",
        grows=False,
    )


def _learner(config: RunConfig, model: str, shape: ModelShape) -> GpuRequest:
    learner, section = config.learner, _section(config, model)
    role: GpuUser = "actor learner" if model == "actor" else "extractor learner"
    tokens = max(learner.micro_batch_tokens, section.max_context_tokens)
    memory = learner_memory(shape, learner, tokens, reference=bool(section.kl_coef))
    states = f"{_gib(state_memory(shape, learner))} GiB of states"
    if learner.kind == "local":
        return GpuRequest(
            role,
            1,
            memory,
            f"{_billions(shape)}, in this process: {states}; {tokens:,} tokens at a time",
            first=True,
        )
    away = (
        f", {_gib(host)} of them in the machine's memory"
        if (host := host_memory(shape, learner))
        else ""
    )
    what = (
        f"{_billions(shape)}, DeepSpeed ZeRO-{learner.zero}, {_count(learner.ranks, 'rank')}: "
        f"{states}{away}; {tokens:,} tokens at a time"
    )
    return GpuRequest(role, learner.ranks, memory, what, key="learner.ranks", host=host)


def _section(config: RunConfig, model: str) -> Any:
    return config.actor if model == "actor" else config.extractor


# ── placing ───────────────────────────────────────────────────────────────────────────────────────


def _place(
    config: RunConfig, needs: Sequence[GpuRequest], count: int, sizes: tuple[float, ...] | None
) -> tuple[list[Placement], list[Problem]]:  # fmt: skip
    """Return the placements, in the order of `needs`, and the problems.

    A role that asks for more GPUs than there are is a problem and is not placed.
    """
    loads, growing, chosen = [0.0] * count, [False] * count, {}
    problems = [_too_many(config, need, count) for need in needs if need.gpus > count]
    crowded = _asked(needs) > count

    def place_in_line(need: GpuRequest) -> tuple[bool, bool, float]:
        return not need.first, need.role in SHARING, -need.memory.total if crowded else 0.0

    for need in sorted((need for need in needs if need.gpus <= count), key=place_in_line):
        # The untrained extractor prefers GPUs of learners, which are idle when it runs. On a GPU of
        # an engine it would reduce the cache.
        aside = need.role == "untrained extractor"
        freest = sorted(range(count), key=lambda gpu: (aside and growing[gpu], loads[gpu], gpu))
        gpus = tuple(sorted(range(1) if need.first else freest[: need.gpus]))
        chosen[need.role] = gpus
        for gpu in gpus:
            loads[gpu] += need.memory.total
            growing[gpu] |= need.grows
    placed = [
        Placement(need, chosen[need.role], need.memory) for need in needs if need.role in chosen
    ]
    if sizes:
        placed, refused = _sized(config, placed, sizes)
        problems += refused
    return placed, problems + list(_shared_transfer(config, chosen))


def _asked(needs: Sequence[GpuRequest]) -> int:
    """Return the number of GPUs that the roles ask for.

    Parts of this process together ask for one GPU. Of the others, the roles in `SHARING` ask for
    none.
    """
    return any(need.first for need in needs) + sum(
        need.gpus for need in needs if not need.first and need.role not in SHARING
    )


def _too_many(config: RunConfig, need: GpuRequest, count: int) -> Problem:
    section, _, name = need.key.partition(".")
    reason = (
        f"the {need.role} asks for {_count(need.gpus, 'GPU')}, "
        f"and there {'is' if count == 1 else 'are'} {count}"
    )
    return Problem(need.key, getattr(getattr(config, section), name), reason)


def _sized(
    config: RunConfig, placed: Sequence[Placement], sizes: Sequence[float]
) -> tuple[list[Placement], list[Problem]]:
    """Return the placements with free memory given to growing engines, and the problems.

    If a GPU would be too full, the placements are returned unchanged.
    """
    problems = []
    for gpu, size in enumerate(sizes):
        here = [placement for placement in placed if gpu in placement.gpus]
        wanted = sum(_least(config, placement, size) for placement in here)
        if wanted > USABLE * size:
            parts = ", ".join(
                f"{placement.need.role} {_gib(_least(config, placement, size))}"
                for placement in here
            )
            reason = (
                f"GPU {gpu} would hold {_gib(wanted)} GiB of {_gib(USABLE * size)} usable ones "
                f"({parts})"
            )
            problems.append(Problem("gpus", len(sizes), reason))
            break  # other GPUs usually have the same problem
    if problems:
        return list(placed), problems
    grown = []
    for placement in placed:
        size = min(sizes[gpu] for gpu in placement.gpus)
        if not placement.need.grows:
            grown.append(
                replace(
                    placement,
                    fraction=placement.memory.total / size if placement.need.vllm else None,
                )
            )
            continue
        share = min(_share(config, placed, gpu, sizes[gpu]) for gpu in placement.gpus)
        fraction = config.engine.memory_fraction or min(
            LARGEST_FRACTION, (placement.memory.total + share) / size
        )
        more = fraction * size - placement.memory.total
        if more < 0:
            reason = (
                f"the {placement.need.role} needs {_gib(placement.memory.total)} of {_gib(size)} "
                "GiB with room for one whole sequence"
            )
            problems.append(Problem("engine.memory_fraction", fraction, reason))
        grown.append(
            replace(
                placement,
                memory=replace(placement.memory, cache=placement.memory.cache + more),
                fraction=fraction,
            )
        )
    return grown, problems


def _least(config: RunConfig, placement: Placement, size: float) -> float:
    if placement.need.grows and config.engine.memory_fraction:
        return config.engine.memory_fraction * size
    return placement.memory.total


def _share(config: RunConfig, placed: Sequence[Placement], gpu: int, size: float) -> float:
    """Return the bytes that each growing engine on a GPU may take above its minimum.

    The free memory is divided equally among these engines.
    """
    here = [placement for placement in placed if gpu in placement.gpus]
    left = USABLE * size - sum(_least(config, placement, size) for placement in here)
    return left / sum(placement.need.grows for placement in here)


def _shared_transfer(
    config: RunConfig, chosen: Mapping[GpuUser, tuple[int, ...]]
) -> Iterator[Problem]:
    pairs: tuple[tuple[GpuUser, GpuUser], ...] = (
        ("actor engine", "actor learner"),
        ("extractor engine", "extractor learner"),
    )
    for engine, learner in pairs:
        shared = set(chosen.get(engine, ())) & set(chosen.get(learner, ()))
        if shared and config.engine.kind == "vllm" and config.engine.transfer == "nccl":
            reason = (
                f"NCCL sends between different GPUs, and {engine} and {learner} "
                f"share GPU {min(shared)}"
            )
            yield Problem("engine.transfer", "nccl", reason)


# ── alternatives that fit ─────────────────────────────────────────────────────────────────────────


def _alternatives(
    config: RunConfig, shapes: Mapping[str, ModelShape], count: int,
    sizes: tuple[float, ...] | None, *, learners: bool,
) -> Iterator[str]:  # fmt: skip
    """Yield command-line options with which the plan would fit.

    First the smallest larger number of GPUs. Then at most two smallest sets of changed settings
    that keep the method, the cheapest set first. Last the method grpo, if it takes fewer changes
    than those.
    """
    size = min(sizes) if sizes else None
    fits = partial(_fits, learners=learners)
    for more in range(count + 1, MOST_GPUS + 1):
        if fits(config, shapes, more, (size,) * more if size else None):
            yield f"--set gpus={more}"
            break
    knobs = list(_knobs(config, count))

    def fewest(
        must: tuple[tuple[str, Any], ...], most: int
    ) -> Iterator[tuple[tuple[str, Any], ...]]:
        sets = (
            some + must
            for n in range(most + 1 - len(must))
            for some in itertools.combinations(knobs, n)
        )
        return (
            changes for changes in sets if fits(_changed(config, changes), shapes, count, sizes)
        )

    found = list(itertools.islice(fewest((), len(knobs)), 2))
    found = [changes for changes in found if len(changes) == len(found[0])]
    if config.with_experience:
        found += itertools.islice(
            fewest((("method", "grpo"),), len(found[0]) - 1 if found else len(knobs) + 1), 1
        )
    yield from (" ".join(_option(key, value) for key, value in changes) for changes in found)


def _knobs(config: RunConfig, count: int) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of settings that save memory, the least harmful to learning first."""
    engine, learner = config.engine, config.learner
    deepspeed, vllm = learner.kind == "deepspeed", engine.kind == "vllm"
    if vllm and engine.transfer == "nccl":
        yield "engine.transfer", "file"
    if not learner.activation_checkpointing:
        yield "learner.activation_checkpointing", True
    if deepspeed and learner.zero < 3:
        yield "learner.zero", 3
    if deepspeed and not learner.offload:
        yield "learner.offload", True
    if deepspeed and learner.ranks != count:
        yield "learner.ranks", count
    if vllm and engine.replicas > 1:
        yield "engine.replicas", 1
    if vllm and engine.memory_fraction:
        yield from (("engine.memory_fraction", fraction) for fraction in FRACTIONS)
    if not vllm and engine.max_batch > 8:
        yield "engine.max_batch", 8
    if learner.micro_batch_tokens > 4096:
        yield "learner.micro_batch_tokens", 4096
    yield "actor.max_context_tokens", config.actor.max_context_tokens // 2
    if config.with_experience:
        yield "extractor.max_context_tokens", config.extractor.max_context_tokens // 2
        if config.extractor.train:
            yield "extractor.train", False


def _changed(config: RunConfig, changes: Sequence[tuple[str, Any]]) -> RunConfig | None:
    """Return the config with `changes` applied; None if the settings then contradict each other."""
    settings = config.model_dump()
    for key, value in changes:
        put(settings, key, value)
    try:
        return validated(RunConfig, settings)
    except ConfigError:
        return None


def _fits(
    config: RunConfig | None, shapes: Mapping[str, ModelShape], count: int,
    sizes: tuple[float, ...] | None, *, learners: bool,
) -> bool:  # fmt: skip
    return (
        config is not None
        and not _place(config, _needs(config, shapes, learners=learners), count, sizes)[1]
    )


def _option(key: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else value
    return f"--method {value}" if key == "method" else f"--set {key}={text}"


# ── for people ────────────────────────────────────────────────────────────────────────────────────


def describe(plan: GpuPlan) -> str:
    """Return the plan as text: each role with its GPUs, then a table of the memory of each GPU."""
    size = f" of {_gib(min(plan.sizes))} GiB" if plan.sizes else ""
    lines = [f"{_count(plan.count, 'GPU')}{size}, {plan.source}", _rule(plan)]
    used = {gpu for placement in plan.placements for gpu in placement.gpus}
    for placement in plan.placements:
        lines.append(
            f"{placement.need.role:<18} {_numbers(placement.gpus):<8} "
            f"{placement.need.what}{_why(plan, placement)}"
        )
    if idle := sorted(set(range(plan.count)) - used):
        lines.append(
            f"{'idle':<18} {_numbers(idle):<8} raise engine.replicas or learner.ranks to use them"
        )
    if host := sum(placement.need.host for placement in plan.placements):
        lines.append(
            f"{'machine':<18} {'':<8} {_gib(host)} GiB of its memory hold what is offloaded"
        )
    lines += ["", *_table(plan)]
    lines += [
        f"does not fit: {problem.key} = {problem.value}: {problem.reason}"
        for problem in plan.problems
    ]
    lines += [f"would fit: {option}" for option in plan.alternatives]
    return "\n".join(lines)


def _rule(plan: GpuPlan) -> str:
    if all(placement.need.first for placement in plan.placements):
        return "all parts run in this process, on the first GPU"
    asked = f"engines and learners ask for {plan.asked}"
    if plan.asked <= plan.count:
        return f"{asked}: each gets GPUs of its own"
    return (
        f"{asked}: the most needful are placed first, each where there is most room then, and share"
    )


def _why(plan: GpuPlan, placement: Placement) -> str:
    others = [
        other.need.role
        for other in plan.placements
        if other is not placement and set(other.gpus) & set(placement.gpus)
    ]
    cache = ""
    if placement.fraction is not None and placement.need.kv_bytes:
        tokens = placement.memory.cache / placement.need.kv_bytes
        cache = f"; {placement.fraction:.2f} of a GPU, a cache of {tokens:,.0f} tokens each"
    return f"{cache}; {'shares with ' + ', '.join(others) if others else 'alone there'}"


def _table(plan: GpuPlan) -> list[str]:
    names = [field.name for field in fields(Memory)]
    rows = [["GiB", "", *names, "in all"]]
    for gpu in range(plan.count):
        here = [placement for placement in plan.placements if gpu in placement.gpus]
        for placement in here:
            parts = [getattr(placement.memory, name) for name in names]
            label = f"GPU {gpu}" if placement is here[0] else ""
            rows.append(
                [
                    label,
                    placement.need.role,
                    *(_gib(part) if part else "–" for part in parts),
                    _gib(placement.memory.total),
                ]
            )
        if here:
            most = f" of {_gib(plan.sizes[gpu])}" if plan.sizes else ""
            rows[-1][-1] += (
                f"   GPU {gpu}: {_gib(sum(placement.memory.total for placement in here))}{most}"
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(names) + 2)]
    return ["  ".join([f"{a:<{widths[0]}}", f"{b:<{widths[1]}}",
                       *(f"{c:>{w}}" for c, w in zip(rest, widths[2:], strict=True)), f"{last}"])
            for a, b, *rest, last in rows]  # fmt: skip


def _numbers(gpus: Sequence[int]) -> str:
    run = len(gpus) > 1 and gpus[-1] - gpus[0] == len(gpus) - 1
    return f"GPU {gpus[0]}–{gpus[-1]}" if run else f"GPU {', '.join(map(str, gpus))}"


def _billions(shape: ModelShape) -> str:
    return (
        f"{shape.parameters / 1e9:.1f} B"
        if shape.parameters >= 5e7
        else f"{shape.parameters / 1e6:.1f} M"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _count(n: int, one: str) -> str:
    return f"{n} {one}{'' if n == 1 else 's'}"
