"""Memory of an actor's engine and learner on one GPU, compared with the GPU plan.

    python benchmarks/gpu_memory.py --out benchmarks/results/h100/gpu_memory.json

The settings are those of `crl train --preset gpu1 --method grpo --tasks room`. Models have the
shapes of Qwen2.5 and random weights. Each part has the largest work that the settings allow:

* engine: requests that fill `engine.max_batch` and `actor.max_context_tokens`.
* learner: a step on two sequences that fill `actor.max_context_tokens`. One micro-batch holds one.
* sync: the learner publishes its weights, and the engine loads them.

*plan* is the memory that the GPU plan expects of a part. *allocated* is the peak of torch's
allocator during the work, minus what other parts hold. *in use* is what NVML, and so nvidia-smi,
shows of the whole GPU after the work; it includes the CUDA context and freed blocks that torch
keeps. The rate of a sync is the size of the weights per second of both calls.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import write_results
from learner_throughput import FULL, QUICK, SHAPES, free_memory, make_model

from crl.config import RunConfig
from crl.config.load import load
from crl.methods.parts.training import SurrogateLoss
from crl.modeling.loading import resolve_device
from crl.monitor.resources import GIB, resource_metrics
from crl.planning.gpu_plan import assigned_gpus, gpu_plan
from crl.run.models import ModelRole, actor_model, open_role_engine, open_role_learner
from crl.types import Minibatch, Sampling, TokenTrace, TrainSample

Work = Callable[[], Awaitable[None]]

ANSWER = 8
"""Sampled tokens of a request, and trained tokens of a sequence."""


def settings(model: Path, quick: bool) -> list[str]:
    """Return the options --set of the measured run."""
    sets = [f"actor.model={model}", "method=grpo", "actor.profile=full"]
    sets += [f"tasks.room.max_response_tokens={ANSWER}"]
    if quick:
        sets += ["actor.max_context_tokens=96", "engine.max_batch=4", "learner.precision=bfloat16"]
    return sets


@dataclass
class Parts:
    """Actor's engine and learner, which are opened by their first work."""

    config: RunConfig
    role: ModelRole
    vocabulary: int
    stack: AsyncExitStack
    engine: Any = None
    learner: Any = None

    async def serve(self) -> None:
        """Open the engine, and fill its rows."""
        self.engine = await open_role_engine(
            self.config, assigned_gpus(self.config), self.role, self.stack, trained=True
        )
        shape = self.config.engine.max_batch, self.config.actor.max_context_tokens - ANSWER
        draws = torch.Generator().manual_seed(0)
        prompts = torch.randint(self.vocabulary - 1, shape, generator=draws).tolist()
        never = (self.vocabulary - 1,)
        await asyncio.gather(
            *(
                self.engine.generate(tuple(prompt), Sampling(ANSWER, never), rng=i)
                for i, prompt in enumerate(prompts)
            )
        )

    async def train(self) -> None:
        """Open the learner, and train on two of the longest sequences."""
        loss = SurrogateLoss(0.2, 0.2, "token")
        self.learner = await open_role_learner(
            self.config, assigned_gpus(self.config), self.role, loss, self.stack
        )
        length = self.config.actor.max_context_tokens
        mask = (0,) * (length - ANSWER) + (1,) * ANSWER
        logprobs, versions = tuple(-1.0 * m for m in mask), tuple(m - 1 for m in mask)
        samples = []
        for first, advantage in enumerate((1.0, -1.0)):
            ids = tuple((17 * i + first) % self.vocabulary for i in range(length))
            samples.append(TrainSample(TokenTrace(ids, mask, logprobs, versions), advantage, 0.5))
        await self.learner.step([Minibatch(tuple(samples), 2 * ANSWER)])

    async def sync(self) -> None:
        """Send the learner's weights to the engine."""
        await self.engine.update_weights(await self.learner.publish())

    async def timed_sync(self) -> dict[str, float]:
        """Send the weights again. Return their bytes and the seconds of both calls."""
        begin = time.perf_counter()
        handle = await self.learner.publish()
        published = time.perf_counter()
        await self.engine.update_weights(handle)
        loaded = time.perf_counter()
        return {
            "weights_bytes": sum(
                p.numel() * p.element_size() for p in self.learner.model.parameters()
            ),
            "publish_s": published - begin,
            "load_s": loaded - published,
        }


async def measure(shape: str, quick: bool) -> list[dict[str, Any]]:
    """Return one row for each part."""
    device = resolve_device("auto")
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, QUICK if quick else FULL, device, torch.bfloat16).save_pretrained(folder)
        free_memory(device)
        preset = "cpu" if quick else "gpu1"
        config = load(["room"], preset=preset, sets=settings(Path(folder), quick))
        plan = gpu_plan(config)
        planned = {p.request.role: p.memory.total for p in plan.placements} if plan else {}
        async with AsyncExitStack() as stack:
            parts = Parts(config, actor_model(config), SHAPES[shape]["vocab_size"], stack)
            works = {"engine": parts.serve, "learner": parts.train, "sync": parts.sync}
            rows = [
                {
                    "shape": shape,
                    "part": part,
                    "planned_bytes": planned.get(f"actor {part}"),
                    **await usage(work, device),
                }
                for part, work in works.items()
            ]
            rows[-1] |= await parts.timed_sync()
    return rows


async def usage(work: Work, device: torch.device) -> dict[str, float | None]:
    """Do the work. Return its peak of allocated bytes and the bytes in use, None without a GPU."""
    if device.type != "cuda":
        await work()
        return {"allocated_bytes": None, "in_use_bytes": None}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    await work()
    torch.cuda.synchronize()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated() - before,
        "in_use_bytes": resource_metrics()["perf/gpu/0/memory_gib"] * GIB,
    }


def gib(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**30:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5B", "1.5B"])
    parser.add_argument("--quick", action="store_true", help="tiny run, which tests the benchmark")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| shape | part | plan GiB | allocated GiB | in use GiB | sync GB/s |")
    print("|---|---|---|---|---|---|")
    for shape in ["tiny"] if arguments.quick else arguments.shapes:
        for row in asyncio.run(measure(shape, arguments.quick)):
            rows.append(row)
            rate = "–"
            if "weights_bytes" in row:
                rate = f"{row['weights_bytes'] / 1e9 / (row['publish_s'] + row['load_s']):.2f}"
            cells = [gib(row[f"{name}_bytes"]) for name in ("planned", "allocated", "in_use")]
            print(f"| {shape} | {row['part']} | {' | '.join(cells)} | {rate} |", flush=True)
        if arguments.out:
            write_results(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
