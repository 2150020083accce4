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
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from common import write_results
from learner_throughput import FULL, QUICK, SHAPES, free_memory, make_model

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


async def measure(shape: str, quick: bool) -> list[dict[str, Any]]:
    """Return one row for each part."""
    import torch

    from crl.config.load import load
    from crl.methods.parts.training import SurrogateLoss
    from crl.modeling.loading import resolve_device
    from crl.planning.gpu_plan import assigned_gpus, gpu_plan
    from crl.run.models import actor_model, open_role_engine, open_role_learner
    from crl.types import Minibatch, Sampling, TokenTrace, TrainSample

    device = resolve_device("auto")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, QUICK if quick else FULL, device, torch.bfloat16).save_pretrained(folder)
        free_memory(device)
        preset = "cpu" if quick else "gpu1"
        config = load(["room"], preset=preset, sets=settings(Path(folder), quick))
        plan = gpu_plan(config)
        planned: Mapping[str, float] = (
            {p.request.role: p.memory.total for p in plan.placements} if plan else {}
        )

        async def measured(part: str, role: str | None, work: Work) -> None:
            rows.append({"shape": shape, "part": part, "planned_bytes": planned.get(role or "")})
            rows[-1] |= await usage(work, device)

        gpus, role, context = assigned_gpus(config), actor_model(config), config.actor
        vocabulary = SHAPES[shape]["vocab_size"]
        async with AsyncExitStack() as stack:

            async def serve() -> None:
                nonlocal engine
                engine = await open_role_engine(config, gpus, role, stack, trained=True)
                never = (vocabulary - 1,)
                length = context.max_context_tokens - ANSWER
                draws = torch.Generator().manual_seed(0)
                prompts = torch.randint(
                    vocabulary - 1, (config.engine.max_batch, length), generator=draws
                ).tolist()
                await asyncio.gather(
                    *(
                        engine.generate(tuple(p), Sampling(ANSWER, never), rng=i)
                        for i, p in enumerate(prompts)
                    )
                )

            async def train() -> None:
                nonlocal learner
                loss = SurrogateLoss(0.2, 0.2, "token")
                learner = await open_role_learner(config, gpus, role, loss, stack)
                length = context.max_context_tokens
                mask = (0,) * (length - ANSWER) + (1,) * ANSWER
                traces = [
                    TokenTrace(
                        tuple((17 * i + k) % vocabulary for i in range(length)),
                        mask,
                        tuple(-1.0 * m for m in mask),
                        tuple(m - 1 for m in mask),
                    )
                    for k in range(2)
                ]
                samples = tuple(TrainSample(t, 1.0 - 2 * k, 0.5) for k, t in enumerate(traces))
                await learner.step([Minibatch(samples, 2 * ANSWER)])

            async def sync() -> None:
                await engine.update_weights(await learner.publish())

            engine: Any = None
            learner: Any = None
            await measured("engine", "actor engine", serve)
            await measured("learner", "actor learner", train)
            await measured("sync", None, sync)
            begin = time.perf_counter()
            handle = await learner.publish()
            published = time.perf_counter()
            await engine.update_weights(handle)
            loaded = time.perf_counter()
            size = sum(p.numel() * p.element_size() for p in learner.model.parameters())
            rows[-1] |= {
                "weights_bytes": size,
                "publish_s": published - begin,
                "load_s": loaded - published,
            }
    return rows


async def usage(work: Work, device: Any) -> dict[str, float | None]:
    """Do the work. Return its peak of allocated bytes and the bytes in use, None without a GPU."""
    import torch

    from crl.monitor.resources import GIB, resource_metrics

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
