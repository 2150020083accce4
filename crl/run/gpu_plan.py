"""Which GPUs every role of a run gets, what each GPU then holds, and what would fit where that does not. Arithmetic alone, no torch.

Roles: engine and learner of either model, the embedder, and at the end of a run the extractor as it was at the start, where lessons of
both are compared. Engines and learners have GPUs of their own where there are enough; else they are placed the most needful first, on what
then has most room, and share it. The others always share. What is left of a GPU becomes its vLLM engines' caches. What runs in this process
(the torch engine, the local learner) is on the first GPU.
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
"""Share of a GPU's memory that is planned with: the rest is lost between the allocator's blocks."""

LARGEST_FRACTION = 0.9
"""Share of a GPU's memory that a vLLM engine is given at most."""

FRACTIONS = (0.8, 0.5, 0.3)
"""What is tried in the place of an engine.memory_fraction that does not fit."""

MOST_GPUS = 64
"""Up to here it is tried how many GPUs would do."""

Role = Literal[
    "actor engine",
    "actor learner",
    "extractor engine",
    "extractor learner",
    "untrained extractor",
    "embedder",
]

SHARING: tuple[Role, ...] = ("untrained extractor", "embedder")
"""Roles that are no reason to give another one less."""


@dataclass(frozen=True)
class Need:
    """What a role asks for. gpus: how many; memory: on each of them, of a vLLM engine the least; vllm: it is one; grows: it takes what is
    left as well; first: it is on the first GPU; key: the setting that says how many GPUs; kv_bytes: of a token in its cache; host: bytes of
    the machine's memory; what: for people."""

    role: Role
    gpus: int
    memory: Memory
    what: str
    key: str = "gpus"
    vllm: bool = False
    grows: bool = False
    first: bool = False
    kv_bytes: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class Placement:
    """gpus: their numbers, from 0, in the order of the visible ones, a replica's side by side; memory: on each; fraction: a vLLM engine's
    share of a GPU's memory; None where the GPUs' size is unknown, and for others."""

    need: Need
    gpus: tuple[int, ...]
    memory: Memory
    fraction: float | None = None


@dataclass(frozen=True)
class Problem:
    """Why a plan does not fit: the setting it is about, in a ConfigError's terms."""

    key: str
    value: object
    reason: str


@dataclass(frozen=True)
class GpuPlan:
    """count: of GPUs; asked: how many engines and learners ask for; sizes: bytes of each, None where nothing tells; source: where count and
    sizes come from; alternatives: settings that would fit, where this does not."""

    count: int
    asked: int
    sizes: tuple[float, ...] | None
    source: str
    placements: tuple[Placement, ...]
    problems: tuple[Problem, ...]
    alternatives: tuple[str, ...] = ()

    def __getitem__(self, role: Role) -> Placement:
        """Raises `KeyError` for a role that is not on a GPU."""
        return {placement.need.role: placement for placement in self.placements}[role]

    def require_fit(self) -> None:
        """Raises `ConfigError` for an impossible plan, with what would fit."""
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


# ── making a plan ───────────────────────────────────────────────────────────────────────────────────────────────────


def gpu_plan(
    config: RunConfig, visible: Sequence[Gpu] | None = None, *, learners: bool = True
) -> GpuPlan | None:
    """None for a run without GPUs. visible: this machine's GPUs; learners: False where nothing is trained, as in an evaluation. Raises
    `ConfigError` for a model whose size cannot be told, or that cannot be served as the settings ask.

    A run of this process's parts alone, with no word about GPUs, takes them as they come: nothing of it is a problem, and with models
    whose size cannot be told there is no plan.
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
    """What a role has of this machine. gpus: as CUDA_VISIBLE_DEVICES names them, a replica's side by side; fraction: as a placement's."""

    gpus: tuple[str, ...] = ()
    fraction: float | None = None


def assigned_gpus(config: RunConfig, *, learners: bool = True) -> dict[str, Assigned]:
    """By role, what it has; of those that are on a GPU. learners: as in `gpu_plan`; without them fewer than the setting's may do.

    Raises `ConfigError` for a run that this machine's GPUs cannot serve.
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
    """What no number of GPUs would mend."""
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


def _needs(config: RunConfig, shapes: Mapping[str, ModelShape], *, learners: bool) -> list[Need]:
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
        what = f"{_billions(shapes['embedder'])}, {'in this process' if local else 'vLLM pooling engine, small: where there is most room'}"
        needs.append(
            Need(
                "embedder",
                1,
                embedder_memory(shapes["embedder"], vllm=not local),
                what,
                vllm=not local,
                first=local,
            )
        )
    return needs


def _engine(config: RunConfig, model: str, shape: ModelShape) -> Need:
    engine, tokens = config.engine, _section(config, model).max_context_tokens
    role: Role = "actor engine" if model == "actor" else "extractor engine"
    if engine.kind == "torch":
        memory = torch_engine_memory(
            shape, engine.max_batch, tokens, number_bytes(shape, config.learner)
        )
        what = f"{_billions(shape)}, torch, in this process: rows for {engine.max_batch} sequences of {tokens:,} tokens"
        return Need(role, 1, memory, what, first=True)
    width, number = engine.tensor_parallel, number_bytes(shape, config.learner)
    memory, kv = (
        vllm_memory(shape, width, tokens, number),
        shape.kv_bytes(number) / min(width, shape.kv_heads),
    )
    what = (
        f"{_billions(shape)}, vLLM, {_count(engine.replicas, 'replica')} of {_count(width, 'GPU')}"
    )
    gpus = engine.replicas * width
    return Need(role, gpus, memory, what, key="engine.replicas", vllm=True, grows=True, kv_bytes=kv)


def _lessons_compared(config: RunConfig) -> bool:
    """Whether the extractor that the run starts with is asked again at the end (crl.run.online)."""
    return (
        config.with_experience
        and not config.bank.frozen
        and any(task.eval.online for task in config.tasks.values())
    )


def _untrained(config: RunConfig, engine: Need) -> Need:
    """One replica like the extractor's, with the least cache."""
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


def _learner(config: RunConfig, model: str, shape: ModelShape) -> Need:
    learner, section = config.learner, _section(config, model)
    role: Role = "actor learner" if model == "actor" else "extractor learner"
    tokens = max(learner.micro_batch_tokens, section.max_context_tokens)
    memory = learner_memory(shape, learner, tokens, reference=bool(section.kl_coef))
    states = f"{_gib(state_memory(shape, learner))} GiB of states"
    if learner.kind == "local":
        return Need(
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
    what = f"{_billions(shape)}, DeepSpeed ZeRO-{learner.zero}, {_count(learner.ranks, 'rank')}: {states}{away}; {tokens:,} tokens at a time"
    return Need(role, learner.ranks, memory, what, key="learner.ranks", host=host)


def _section(config: RunConfig, model: str) -> Any:
    return config.actor if model == "actor" else config.extractor


# ── placing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _place(
    config: RunConfig, needs: Sequence[Need], count: int, sizes: tuple[float, ...] | None
) -> tuple[list[Placement], list[Problem]]:  # fmt: skip
    """In the order of `needs`. A role that asks for more GPUs than there are is a problem, and is not placed."""
    loads, growing, chosen = [0.0] * count, [False] * count, {}
    problems = [_too_many(config, need, count) for need in needs if need.gpus > count]
    crowded = _asked(needs) > count

    def place_in_line(need: Need) -> tuple[bool, bool, float]:
        return not need.first, need.role in SHARING, -need.memory.total if crowded else 0.0

    for need in sorted((need for need in needs if need.gpus <= count), key=place_in_line):
        aside = (
            need.role == "untrained extractor"
        )  # beside learners, which rest then, and not in the place of a cache
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


def _asked(needs: Sequence[Need]) -> int:
    """By engines and learners, those of this process on one; other roles always share."""
    return any(need.first for need in needs) + sum(
        need.gpus for need in needs if not need.first and need.role not in SHARING
    )


def _too_many(config: RunConfig, need: Need, count: int) -> Problem:
    section, _, name = need.key.partition(".")
    reason = f"the {need.role} asks for {_count(need.gpus, 'GPU')}, and there {'is' if count == 1 else 'are'} {count}"
    return Problem(need.key, getattr(getattr(config, section), name), reason)


def _sized(
    config: RunConfig, placed: Sequence[Placement], sizes: Sequence[float]
) -> tuple[list[Placement], list[Problem]]:
    """Engines grown into what is left; and what does not fit."""
    problems = []
    for gpu, size in enumerate(sizes):
        here = [placement for placement in placed if gpu in placement.gpus]
        wanted = sum(_least(config, placement, size) for placement in here)
        if wanted > USABLE * size:
            parts = ", ".join(
                f"{placement.need.role} {_gib(_least(config, placement, size))}"
                for placement in here
            )
            reason = f"GPU {gpu} would hold {_gib(wanted)} GiB of {_gib(USABLE * size)} usable ones ({parts})"
            problems.append(Problem("gpus", len(sizes), reason))
            break  # the others are much the same
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
            reason = f"the {placement.need.role} needs {_gib(placement.memory.total)} of {_gib(size)} GiB with room for one whole sequence"
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
    """What each vLLM engine on a GPU may take beside its least: equal parts of what is left."""
    here = [placement for placement in placed if gpu in placement.gpus]
    left = USABLE * size - sum(_least(config, placement, size) for placement in here)
    return left / sum(placement.need.grows for placement in here)


def _shared_transfer(
    config: RunConfig, chosen: Mapping[Role, tuple[int, ...]]
) -> Iterator[Problem]:
    pairs: tuple[tuple[Role, Role], ...] = (
        ("actor engine", "actor learner"),
        ("extractor engine", "extractor learner"),
    )
    for engine, learner in pairs:
        shared = set(chosen.get(engine, ())) & set(chosen.get(learner, ()))
        if shared and config.engine.kind == "vllm" and config.engine.transfer == "nccl":
            reason = f"NCCL sends between different GPUs, and {engine} and {learner} share GPU {min(shared)}"
            yield Problem("engine.transfer", "nccl", reason)


# ── what would fit ──────────────────────────────────────────────────────────────────────────────────────────────────


def _alternatives(
    config: RunConfig, shapes: Mapping[str, ModelShape], count: int, sizes: tuple[float, ...] | None, *, learners: bool
) -> Iterator[str]:  # fmt: skip
    """More GPUs of the size; the fewest changes that fit and keep the method, the cheapest of them first, at most two; another method."""
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
    """Settings that save memory, those first that cost least of what is learnt."""
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
    """None where the settings contradict each other."""
    settings = config.model_dump()
    for key, value in changes:
        put(settings, key, value)
    try:
        return validated(RunConfig, settings)
    except ConfigError:
        return None


def _fits(
    config: RunConfig | None, shapes: Mapping[str, ModelShape], count: int, sizes: tuple[float, ...] | None, *, learners: bool
) -> bool:  # fmt: skip
    return (
        config is not None
        and not _place(config, _needs(config, shapes, learners=learners), count, sizes)[1]
    )


def _option(key: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else value
    return f"--method {value}" if key == "method" else f"--set {key}={text}"


# ── for people ──────────────────────────────────────────────────────────────────────────────────────────────────────


def describe(plan: GpuPlan) -> str:
    """Roles with their GPUs and why, then a table of what each GPU holds."""
    size = f" of {_gib(min(plan.sizes))} GiB" if plan.sizes else ""
    lines = [f"{_count(plan.count, 'GPU')}{size}, {plan.source}", _rule(plan)]
    used = {gpu for placement in plan.placements for gpu in placement.gpus}
    for placement in plan.placements:
        lines.append(
            f"{placement.need.role:<18} {_numbers(placement.gpus):<8} {placement.need.what}{_why(plan, placement)}"
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
    return ["  ".join([f"{a:<{widths[0]}}", f"{b:<{widths[1]}}", *(f"{c:>{w}}" for c, w in zip(rest, widths[2:], strict=True)), f"{last}"])
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
