"""Distillation of finished episodes into a new bank: `crl bank build`."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from crl.config.schema import RunConfig
from crl.errors import ConfigError
from crl.failures import reported
from crl.manager import DistilRequest, EpisodeId
from crl.monitor.run_dir import RunDir
from crl.planning import tasks
from crl.planning.gpu_plan import assigned_gpus
from crl.protocols import Monitor
from crl.records.conversations import FORMAT, conversation, is_text, read_lines
from crl.records.shards import read_shard
from crl.run.bank import bank_factory
from crl.run.models import extractor_model, open_role_engine
from crl.run.progress import embedding_progress
from crl.types import GUIDANCE_ORIGINS, Segment, Task
from crl.wording import counted

RUN_NAME = "build"
"""Name that marks the episodes in the bank."""

Requests = Sequence[DistilRequest]
"""Episodes that are distilled before the clock of the bank advances by a step."""


async def build(
    config: RunConfig, source: Mapping[int, Path] | Path, run: RunDir, monitor: Monitor
) -> Mapping[str, int]:
    """Distil episodes into the new bank of `run`. Return the metrics of the bank at the end.

    `source` is the recorded episodes of steps, as of `crl.records.reader.episode_shards`, or a file
    of `file_requests`. A merge of the bank follows each `extractor.merge_every` steps.

    Episodes with an error are left out. Requests for guided episodes contain neither the experience
    nor questions, because the experience belongs to another bank.
    """
    async with AsyncExitStack() as stack:
        with reported():  # the engine may be slow to close
            specs, gpus = tasks.specs(config), assigned_gpus(config, learners=False)
            role = extractor_model(config, monitor.note)
            engine = await open_role_engine(config, gpus, role, stack)
            progress = embedding_progress(monitor)
            factory = await bank_factory(config, specs, gpus, progress, stack)
            manager = await factory.open(run.bank, engine, stack)
            batches = (
                file_requests(source, frozenset(config.tasks))
                if isinstance(source, Path)
                else recorded_requests(source)
            )
            every = config.extractor.merge_every
            for step, requests in enumerate(batches, start=1):
                await asyncio.gather(*map(manager.submit, requests))
                manager.advance(step)
                await manager.drain()
                if every and step % every == 0:
                    await manager.merge()
                monitor.log(step, "bank", await manager.stats())
            return await manager.stats()


def recorded_requests(shards: Mapping[int, Path]) -> Iterator[Requests]:
    """Yield the requests of each recorded step. Raise `ConfigError` for a damaged file."""
    for path in shards.values():
        episodes = (t for t in read_shard(path) if t.error is None)
        requests = (DistilRequest.from_trajectory(RUN_NAME, t) for t in episodes)
        yield [
            replace(
                request,
                segments=tuple(s for s in request.segments if s.origin not in GUIDANCE_ORIGINS),
                shown=(),
            )
            for request in requests
        ]


def file_requests(file: Path, names: frozenset[str], batch: int = 64) -> Iterator[Requests]:
    """Yield the requests of a JSON lines file of episodes, `batch` at a time.

    A line is {"task": "…", "goal": "…", "success": true, "messages": [{"role": …, "content": …}]}.
    `names`: tasks that may occur. The messages of the assistant are the agent's.

    Raise `ConfigError` with the number of a line that is invalid.
    """
    requests: list[DistilRequest] = []
    for number, (place, value) in enumerate(read_lines(file)):
        fields = value if isinstance(value, dict) else {}
        name, goal, success = (fields.get(key) for key in ("task", "goal", "success"))
        if not is_text(goal) or not isinstance(success, bool):
            reason = "has no text as goal, or no true or false as success"
            example = f'{{"task": "…", "goal": "…", "success": true, {FORMAT[1:]}'
            raise ConfigError("--from", place, reason, f"Write {example} in each line")
        if not isinstance(name, str) or name not in names:
            reason = f"is of the task {name!r}, which --tasks does not name"
            raise ConfigError("--from", place, reason, f"Use one of: {', '.join(sorted(names))}")
        requests.append(
            DistilRequest(
                EpisodeId(RUN_NAME, 0, number, 0),
                Task(name, number, "train", goal),
                (Segment("user", goal, "task"), *conversation(value, place)),
                success=success,
                truncated=False,
            )
        )
        if len(requests) == batch:
            yield requests
            requests = []
    if requests:
        yield requests


def built(config: RunConfig, run: RunDir, stats: Mapping[str, int]) -> str:
    """Return the lines that end the output of the command. `stats` are those of the bank."""
    command = ["crl", "train", "--tasks", ",".join(config.tasks)]
    if config.preset != RunConfig.model_fields["preset"].default:
        command += ["--preset", config.preset]
    command += ["--set", f"bank.init={run.bank}"]
    entries, dead, path = stats["bank/size"], stats["queue/dead"], shlex.quote(str(run.path))
    failed = (
        f"warning: {counted(dead, 'episode')} could not be distilled; the reasons: "
        f"crl bank dead {path}\n"
        if dead
        else ""
    )
    if not entries:
        return (
            f"{failed}warning: no experience in the new bank: {run.bank}\n"
            f"  refused answers of the extractor: crl bank stats {path}"
        )
    return (
        f"{failed}{counted(entries, 'experience')} in the new bank: {run.bank}\n"
        f"  look at it:   crl bank ls {path}\n"
        f"  start a run:  {shlex.join(command)}\n"
        "  keep the bank unchanged: add --set bank.frozen=true"
    )
