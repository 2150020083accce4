"""Supervised fine-tuning of actor or extractor on demonstrations: `crl sft`."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from crl.algo.batching import micro_batches
from crl.algo.losses import NextTokenLoss
from crl.config.schema import RunConfig
from crl.errors import ConfigError, CrlError
from crl.failures import reported
from crl.modeling.demonstrations import PlacedDemonstration, demonstrated_traces
from crl.modeling.files import copy_model_files
from crl.modeling.loading import first_line
from crl.modeling.tokens import ChatRenderer
from crl.planning.gpu_plan import assigned_gpus
from crl.protocols import Engine, Learner, Monitor
from crl.records.conversations import conversation, read_lines
from crl.records.shards import read_shard
from crl.run.models import (
    ModelRole,
    actor_model,
    extractor_model,
    open_role_engine,
    open_role_learner,
)
from crl.run.sync import sync_weights
from crl.seeds import generator
from crl.tiny.drills import demonstrations, drills_of, scaled
from crl.tiny.drills.drill import Part
from crl.types import (
    CURRENT_POLICY,
    Minibatch,
    RoleName,
    Segment,
    StepStats,
    TokenTrace,
    TrainSample,
    Trajectory,
)
from crl.wording import counted

LOG_EVERY = 10
"""Minimum number of updates whose metrics are averaged in one line."""

MAX_LINES = 200
"""Maximum number of lines with metrics of the training, apart from those that end an epoch."""

WARMUP_SHARE = 0.1
"""Default share of the updates over which the learning rate rises."""


@dataclass(frozen=True)
class SftSettings:
    """Settings of supervised fine-tuning. Raise `ConfigError` for a weight that is not finite."""

    role: RoleName = "actor"
    """Model that is trained."""
    epochs: int = 3
    """Maximum number of epochs."""
    batch_tokens: int = 4096
    """Maximum number of tokens of one optimizer update. A longer sample has its own update."""
    held_out: float = 0.1
    """Share of the places (goals) whose demonstrations are held out; 0 = none."""
    patience: int = 1
    """Number of epochs without a better held-out loss after which the training ends."""
    warmup: int | None = None
    """Number of updates over which the learning rate rises; None = a tenth of all updates."""
    decay: bool = False
    """True if the learning rate falls linearly to 0 over all updates after the warm-up."""
    context_weight: float = 0.0
    """Weight of the mean loss of the other tokens beside that of the demonstrator's tokens."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.context_weight):
            key, reason = "--context-weight", "is not a finite number"
            raise ConfigError(key, self.context_weight, reason, "Use a number from 0 on")


@dataclass(frozen=True)
class Source:
    """Source of demonstrations."""

    name: str
    """Name for error messages: the value of --from."""
    files: Mapping[int, Path] | Path | None
    """Recorded episodes, as returned by `episode_shards`, or a file of `conversations`.

    None = drills, or the episodes of scripted players, which have not been played yet.
    """
    lost: bool = False
    """True if lost episodes are demonstrations too."""
    drilled: Iterable[PlacedDemonstration] | None = None
    """Demonstrations of drills with their places, which are read once; None = another source."""


@dataclass(frozen=True)
class Demonstrated:
    """Demonstration as training samples."""

    place: str
    """Place of the demonstration. All demonstrations of a place are trained on, or held out."""
    traces: Sequence[TokenTrace]


@dataclass(frozen=True)
class SftResult:
    """Result of supervised fine-tuning. Losses are in nats per token of the demonstrator."""

    start: float | None
    """Held-out loss before the training; None without held-out demonstrations."""
    best: float | None
    """Held-out loss of the written model."""
    epoch: int
    """Epoch of the written model; 0 = the model as it was."""
    config: RunConfig
    """Config with the schedule of the learning rate."""


# ── demonstrations ────────────────────────────────────────────────────────────────────────────────


def recorded_demonstrations(
    config: RunConfig, renderer: ChatRenderer, shards: Mapping[int, Path], *, lost: bool,
    note: Callable[[str], None],
) -> list[Demonstrated]:  # fmt: skip
    """Return recorded episodes as demonstrations, with tokens of the model that is trained.

    Episodes with an error are left out, and lost ones too unless `lost` is true. So are those with
    a control token of the model in a reply, and `note` is called with their number. Turns in
    overtime are not trained.
    """
    episodes = [
        t
        for path in shards.values()
        for t in read_shard(path)
        if t.error is None and (lost or t.success)
    ]
    plain = [t for t in episodes if not renderer.control_token(_replies(t.segments))]
    if left_out := len(episodes) - len(plain):
        note(
            f"{counted(left_out, 'episode')} left out: a reply contains a control token of the "
            "model, which would be trained as one"
        )
    return [Demonstrated(t.task.goal, _traces(config, renderer, t)) for t in plain]


def _replies(segments: Iterable[Segment]) -> str:
    """Return the texts of the policy, one after the other."""
    return "".join(segment.text for segment in segments if segment.origin == "policy")


def _traces(
    config: RunConfig, renderer: ChatRenderer, trajectory: Trajectory
) -> tuple[TokenTrace, ...]:
    task = config.tasks.get(trajectory.task.name)
    questions = sum(segment.origin == "tool_call" for segment in trajectory.segments)
    return demonstrated_traces(
        trajectory.segments,
        renderer,
        window=task.window if task else None,
        turns=trajectory.turns + questions,
    )


def conversations(file: Path, renderer: ChatRenderer) -> list[Demonstrated]:
    """Return the conversations of a JSON lines file as demonstrations.

    A line is {"messages": [{"role": "user", "content": "…"}, …]}. The messages of the assistant are
    trained. The first message of the user is the place.

    Raise `ConfigError` with the number of a line that is invalid, that the chat template of the
    model refuses, or whose answers contain a control token.
    """
    found: list[Demonstrated] = []
    for line, value in read_lines(file):
        segments = conversation(value, line)
        if token := renderer.control_token(_replies(segments)):
            reason = f"an answer contains the control token {token!r} of the model"
            raise ConfigError("--from", line, reason, "Remove it: the chat template adds it")
        try:
            traces = demonstrated_traces(segments, renderer)
        except Exception as error:  # a template raises errors of many types
            reason = (
                "the chat template of the model refuses the conversation "
                f"({type(error).__name__}: {first_line(error)})"
            )
            remedy = "Correct the line, or choose another model"
            raise ConfigError("--from", line, reason, remedy) from error
        goal = next((s.text for s in segments if s.role == "user"), "")
        found.append(Demonstrated(goal, traces))
    return found


def drilled(config: RunConfig, role: RoleName, n: int) -> Iterator[PlacedDemonstration]:
    """Return about `n` demonstrations of the drills that the settings of a run need.

    Each has its place. They are made when they are read.

    Raise `ConfigError` if a task has no drills of the role, or they have another rendering.
    """
    enabled: dict[Part, bool] = {
        "episode": True,
        "ask": config.ask.enabled,
        "critic": config.critic.enabled,
        "merge": config.extractor.merge_every > 0,
    }
    drills = drills_of(
        role,
        {task.env for task in config.tasks.values()},
        [part for part, used in enabled.items() if used],
    )
    known = {drill.env for drill in drills}
    for name, task in config.tasks.items():
        if task.env not in known:
            reason = f"has no drills of the {role}"
            raise ConfigError("--tasks", name, reason, "Choose other tasks, or another --from")
        if task.rendering != "compact":
            reason = "is not the rendering of the drills"
            remedy = "Add --set actor.profile=compact, or use another --from"
            raise ConfigError(f"tasks.{name}.rendering", task.rendering, reason, remedy)
    if (profile := config.profile(role)) != "compact":
        reason = "is not the profile of the drills"
        remedy = f"Add --set {role}.profile=compact, or use another --from"
        raise ConfigError(f"{role}.profile", profile, reason, remedy)
    return demonstrations(scaled(drills, n), config.run.seed)


# ── training ──────────────────────────────────────────────────────────────────────────────────────


async def fine_tune(
    config: RunConfig, source: Source, target: Path, monitor: Monitor, settings: SftSettings
) -> SftResult:  # fmt: skip
    """Train a model on demonstrations and write it to the new directory `target`.

    Scripted players must have played already. The loss is the mean over the demonstrator's tokens.
    The model with the lowest held-out loss is written; without held-out demonstrations, that of the
    last epoch.

    Raise `ConfigError` if there are too few demonstrations.
    """
    async with AsyncExitStack() as stack:
        with reported():  # the learner may be slow to close
            return await _fine_tune(config, source, target, monitor, settings, stack)


async def _fine_tune(
    config: RunConfig, source: Source, target: Path, monitor: Monitor, settings: SftSettings,
    stack: AsyncExitStack,
) -> SftResult:  # fmt: skip
    role = (actor_model if settings.role == "actor" else extractor_model)(config, monitor.note)
    found = await asyncio.to_thread(_demonstrations, config, role, source, monitor)
    draws = generator(config.run.seed, "sft")
    trained, held_out = _split(found, settings.held_out, draws)
    samples = [trace for demonstration in trained for trace in demonstration.traces]
    monitor.note(
        f"{counted(len(trained), 'demonstration')} with {sum(len(t.ids) for t in samples):,} "
        f"tokens; {counted(len(held_out), 'demonstration')} held out"
    )
    # All epochs now, because the warm-up depends on the number of updates.
    epochs = [_batches(samples, settings.batch_tokens, draws) for _ in range(settings.epochs)]
    config = _with_schedule(config, settings, sum(map(len, epochs)), monitor)
    role = replace(role, section=getattr(config, role.name))
    gpus = assigned_gpus(config, only=settings.role)
    learner = await open_role_learner(config, gpus, role, NextTokenLoss(), stack)
    engine = await open_role_engine(config, gpus, role, stack, trained=True) if held_out else None
    start = best = await _held_out_loss(engine, held_out)
    result, worse, updates = SftResult(start, start, 0, config), 0, 0
    log_every = max(LOG_EVERY, math.ceil(sum(map(len, epochs)) / MAX_LINES))
    for epoch, batches in enumerate(epochs, start=1):
        minibatches = (minibatch(batch, settings.context_weight) for batch in batches)
        skipped = await _train_epoch(learner, minibatches, updates, monitor, log_every)
        if skipped > len(batches) / 2:
            raise CrlError(
                f"{skipped} of {counted(len(batches), 'update')} of epoch {epoch} were skipped, "
                "because the loss or the gradient was not finite. Use a lower --learning-rate."
            )
        updates += len(batches)
        if engine:
            await sync_weights(learner, engine)
        loss = await _held_out_loss(engine, held_out)
        if loss is not None:
            monitor.log(updates, "sft", {"sft/epoch": epoch, "sft/held_out_nll": loss})
        if loss is None or best is None or loss < best:
            best, worse, result = loss, 0, SftResult(start, loss, epoch, config)
            await _write(learner, role, target)
        elif (worse := worse + 1) >= settings.patience:
            break
    if not result.epoch:
        raise CrlError(
            f"no epoch has a lower held-out loss than the model before ({start:.3f} nats per "
            "token). Use another --learning-rate, or more demonstrations."
        )
    return result


def _with_schedule(
    config: RunConfig, settings: SftSettings, updates: int, monitor: Monitor
) -> RunConfig:
    """Return the config with the learning rates of a training of at most `updates` updates.

    Raise `ConfigError` if the warm-up leaves no update for the decay.
    """
    warmup = settings.warmup
    if warmup is None:
        warmup = round(WARMUP_SHARE * updates)
    elif settings.decay and warmup >= updates:
        reason = f"leaves no update for --decay: there are at most {updates}"
        remedy = "Choose a smaller number, or leave out --decay"
        raise ConfigError(f"{settings.role}.optimizer.warmup_steps", warmup, reason, remedy)
    section = getattr(config, settings.role)
    monitor.note(
        f"at most {counted(updates, 'update')}; warm-up of {warmup}; "
        f"learning rate {section.optimizer.learning_rate:g}"
        + (", falling to 0" if settings.decay else "")
    )
    schedule = {"warmup_steps": warmup, "decay_steps": updates if settings.decay else 0}
    optimizer = section.optimizer.model_copy(update=schedule)
    return config.model_copy(
        update={settings.role: section.model_copy(update={"optimizer": optimizer})}
    )


async def _train_epoch(
    learner: Learner, minibatches: Iterable[Minibatch], updates: int, monitor: Monitor,
    log_every: int,
) -> int:  # fmt: skip
    """Make one update for each minibatch, and log the means over each `log_every` of them.

    `updates`: number of earlier updates, for the log. Return the number of skipped updates.
    """
    recent: list[StepStats] = []
    skipped = 0
    for minibatch in minibatches:
        recent.append(await learner.step([minibatch]))
        skipped += recent[-1].skipped
        updates += 1
        if len(recent) == log_every:
            monitor.log(updates, "sft", _metrics(recent))
            recent.clear()
    if recent:
        monitor.log(updates, "sft", _metrics(recent))
    return skipped


def _metrics(updates: Sequence[StepStats]) -> dict[str, float]:
    """Return the metrics of a line: means over the updates."""
    return {
        f"sft/{name}": fmean(stats.metrics[name] for stats in updates)
        for name in ("nll", "grad_norm", "learning_rate")
        if all(name in stats.metrics for stats in updates)
    } | {"sft/skipped_updates": sum(stats.skipped for stats in updates)}


async def _write(learner: Learner, initial: ModelRole, target: Path) -> None:
    """Write the model to `target` with the tokenizer of `initial`. It replaces an earlier one."""
    part = target.with_name(f".{target.name}.part")
    part.mkdir()
    write = await learner.prepare_save(part, optimizer=False)

    def finish() -> None:
        write()
        copy_model_files(initial.path, part, initial.section.profile)
        old = target.with_name(f".{target.name}.old")
        if target.exists():
            target.rename(old)  # a model is on the disk at any time
        part.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    await asyncio.to_thread(finish)


def _demonstrations(
    config: RunConfig, role: ModelRole, source: Source, monitor: Monitor
) -> list[Demonstrated]:
    """Return the demonstrations that fit into the context. Raise `ConfigError` if there is none."""
    is_conversations = isinstance(source.files, Path)
    renderer = role.renderer
    if source.drilled is not None:
        found = [
            Demonstrated(place, demonstrated_traces(segments, renderer))
            for place, segments in source.drilled
        ]
    elif isinstance(source.files, Path):
        found = conversations(source.files, renderer)
    else:
        assert source.files is not None
        found = recorded_demonstrations(
            config, renderer, source.files, lost=source.lost, note=monitor.note
        )
    if not found:
        reason, remedy = "no episode was won", "or --lost to train on lost episodes too"
        if is_conversations or source.lost:
            reason = "the file is empty" if is_conversations else "all episodes ended with an error"
            remedy = ""
        raise _nothing_found(source, reason, f"Give other demonstrations, {remedy}".rstrip(", "))
    # vLLM samples a token after a demonstration whose loss it computes.
    limit = role.section.max_context_tokens - (config.engine.kind == "vllm")
    fitting = [d for d in found if d.traces and all(len(t.ids) <= limit for t in d.traces)]
    if not fitting:
        reason = f"all {len(found)} have more than {limit:,} tokens"
        remedy = f"Give shorter ones, or raise {role.name}.max_context_tokens"
        raise _nothing_found(source, reason, remedy)
    if len(fitting) < len(found):
        monitor.note(
            f"{counted(len(found) - len(fitting), 'demonstration')} left out: more than {limit:,} "
            f"tokens ({role.name}.max_context_tokens)"
        )
    return fitting


def _nothing_found(source: Source, reason: str, remedy: str) -> ConfigError:
    return ConfigError("--from", source.name, f"has no demonstration to train on: {reason}", remedy)


def _split(
    demonstrations: Sequence[Demonstrated], share: float, draws: random.Random
) -> tuple[list[Demonstrated], list[Demonstrated]]:
    """Return the demonstrations that are trained on, and those of the places that are held out.

    With a share above 0 at least one place is held out. Raise `ConfigError` if none remains.
    """
    places = sorted({demonstration.place for demonstration in demonstrations})
    n_held_out = max(1, round(share * len(places))) if share else 0
    if n_held_out >= len(places):
        reason = (
            f"leaves nothing to train on: the demonstrations are of {counted(len(places), 'place')}"
        )
        raise ConfigError("--held-out", share, reason, "Use 0, or demonstrations of more places")
    held_out = set(draws.sample(places, n_held_out))
    parts: tuple[list[Demonstrated], list[Demonstrated]] = [], []
    for demonstration in demonstrations:
        parts[demonstration.place in held_out].append(demonstration)
    return parts


def _batches(
    samples: Sequence[TokenTrace], batch_tokens: int, draws: random.Random
) -> list[list[TokenTrace]]:
    """Return the batches of an epoch, in random order and with random samples."""
    order = draws.sample(range(len(samples)), len(samples))
    # Random offsets mix samples of neighbouring lengths.
    lengths = [len(samples[i].ids) + draws.randrange(16) for i in order]
    batches = micro_batches(lengths, batch_tokens)
    return [[samples[order[i]] for i in batch] for batch in draws.sample(batches, len(batches))]


def minibatch(traces: Sequence[TokenTrace], context_weight: float) -> Minibatch:
    """Return demonstrations as a minibatch for `NextTokenLoss`.

    Its loss is the mean over the demonstrator's tokens plus `context_weight` times the mean over
    the other tokens, except the first of each sample, which nothing predicts.
    """
    total = sum(sum(trace.mask) for trace in traces)
    if not context_weight:
        return Minibatch(tuple(TrainSample(trace, 1.0, 1.0) for trace in traces), total)
    others = sum(len(trace.ids) - 1 - sum(trace.mask[1:]) for trace in traces)
    weight = context_weight * total / max(others, 1)
    return Minibatch(tuple(_with_context(trace, weight) for trace in traces), total)


def _with_context(trace: TokenTrace, weight: float) -> TrainSample:
    """Return a sample of all tokens, in which those of the context have the given weight."""
    n = len(trace.ids)
    return TrainSample(
        TokenTrace(trace.ids, (0,) + (1,) * (n - 1), (0.0,) * n, (CURRENT_POLICY,) * n),
        tuple(1.0 if sampled else weight for sampled in trace.mask),
        1.0,
    )


async def _held_out_loss(engine: Engine | None, held_out: Sequence[Demonstrated]) -> float | None:
    """Return the mean negative log-likelihood of the demonstrators' tokens, in nats per token."""
    if engine is None:
        return None
    traces = [trace for demonstration in held_out for trace in demonstration.traces]
    scores = await asyncio.gather(*(engine.score(trace.ids) for trace in traces))
    total = sum(
        logp
        for trace, logps in zip(traces, scores, strict=True)
        for logp, mask in zip(logps, trace.mask[1:], strict=True)
        if mask
    )
    return -total / sum(sum(trace.mask) for trace in traces)
