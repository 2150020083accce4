"""Sampling speed of the engines for one model, compared with transformers' `generate`.

    python benchmarks/engine_speed.py --model smollm2 --out benchmarks/results/engine_speed.json

--precision bfloat16 is meant for a GPU.

1, 8, 32 and 64 requests arrive together. Eight of them, a group, have the same prompt, and the
prompts of all groups begin alike, as with the same instructions. Sampling is at temperature 1, and
every answer has the same length. All prompt tokens are random and are not used.

* torch: the engine in this process.
* vllm: the engine in its own processes, if vLLM is installed.
* generate: `generate` of transformers with all requests as one batch.

Without a GPU, the numbers are sampled tokens per CPU-second, so other work on the machine has
little influence. CPU-seconds are those of all threads of this process and of the processes that it
has started. With a GPU, all engines use it, and the numbers are tokens per second. They are medians
over repetitions that alternate between the engines, each with new prompts. The start of an engine
and a first repetition are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
from common import sampling_config, write_results

GROUP = 8
"""Requests with the same prompt."""

Prompts = Sequence[list[int]]
Sampler = Callable[[Prompts], Awaitable[None]]
"""Function that samples an answer for each prompt."""


def prompts_of(
    requests: int, common: int, own: int, vocabulary: int, rng: random.Random
) -> Prompts:
    """Return the prompts: `common` equal tokens, then `own` tokens that each group shares."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    start = tokens(common)
    groups = [start + tokens(own) for _ in range(-(-requests // GROUP))]
    return [groups[i // GROUP] for i in range(requests)]


def cpu_seconds() -> float:
    """Return the CPU-seconds of this process and of all processes under it."""
    process = psutil.Process()
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


async def open_engine(
    kind: str, arguments: argparse.Namespace, context: int, stack: AsyncExitStack
) -> Sampler:
    """Start an engine as `crl train` does. Return its sampler of answers."""
    from crl.config.load import load
    from crl.planning.gpu_plan import assigned_gpus
    from crl.run.models import actor_model, open_role_engine
    from crl.types import Sampling

    tokens = arguments.tokens
    sets = [
        f"actor.model={arguments.model}", f"actor.max_context_tokens={context}",
        f"engine.kind={kind}", f"engine.max_batch={max(arguments.requests)}", "engine.threads=1",
        f"tasks.room.max_response_tokens={tokens}", f"learner.precision={arguments.precision}",
        "method=grpo",
    ]  # fmt: skip
    config = load(["room"], sets=sets)
    engine = await open_role_engine(config, assigned_gpus(config), actor_model(config), stack)

    async def sample(prompts: Prompts) -> None:
        never = (2**31 - 1,)  # no token ends an answer
        answers = await asyncio.gather(
            *(engine.generate(p, Sampling(tokens, never), rng=i) for i, p in enumerate(prompts))
        )
        assert all(len(answer.ids) == tokens for answer in answers)

    return sample


def open_generate(arguments: argparse.Namespace) -> Sampler:
    """Load the model into transformers. Return its sampler of answers."""
    import torch

    from crl.config import resolve_model
    from crl.modeling.loading import load_model, resolve_device

    device, dtype = resolve_device("auto"), getattr(torch, arguments.precision)
    loaded = load_model(resolve_model(arguments.model), device, dtype)
    config = sampling_config(arguments.tokens)

    async def sample(prompts: Prompts) -> None:
        batch = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            loaded.generate(  # pyright: ignore[reportCallIssue]
                batch, attention_mask=torch.ones_like(batch), generation_config=config
            ).cpu()  # waits for the GPU

    return sample


async def measure(arguments: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """Return one row for each engine and number of requests."""
    import torch

    from crl.config import resolve_model
    from crl.modeling.loading import load_tokenizer

    torch.set_num_threads(1)
    clock = time.perf_counter if torch.cuda.is_available() else cpu_seconds
    vocabulary = len(load_tokenizer(resolve_model(arguments.model), "actor.model"))
    tokens, context = arguments.tokens, arguments.common + arguments.own + arguments.tokens
    rates: dict[tuple[str, int], list[float]] = {}
    async with AsyncExitStack() as stack:
        samplers = {
            kind: await open_engine(kind, arguments, context + 8, stack)
            for kind in arguments.engines
        } | {"generate": open_generate(arguments)}
        for repetition in range(arguments.repetitions + 1):
            for requests in arguments.requests:
                rng = random.Random(f"{repetition} {requests}")
                prompts = prompts_of(requests, arguments.common, arguments.own, vocabulary, rng)
                for kind, sample in samplers.items():
                    begin = clock()
                    await sample(prompts)
                    rate = requests * tokens / (clock() - begin)
                    if repetition:
                        rates.setdefault((kind, requests), []).append(rate)
    return [
        {
            "engine": kind,
            "requests": requests,
            "seconds": "seconds" if clock is time.perf_counter else "CPU-seconds",
            "tokens_per_s": statistics.median(values),
            "ratio": statistics.median(values) / statistics.median(rates["generate", requests]),
            "repetitions": len(values),
        }
        for (kind, requests), values in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--engines", nargs="*", choices=["torch", "vllm"])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--common", type=int, default=200, help="first tokens of every prompt")
    parser.add_argument("--own", type=int, default=40, help="further tokens of a group's prompt")
    parser.add_argument("--tokens", type=int, default=32, help="sampled tokens of a request")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny run, which tests the benchmark")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.engines is None:
        arguments.engines = ["torch", "vllm"] if find_spec("vllm") else ["torch"]
    if arguments.quick:
        arguments.model, arguments.requests, arguments.repetitions = "tiny-actor", [1, 16], 1
        arguments.engines = ["torch"]
    rows = asyncio.run(measure(arguments))
    per = str(rows[0]["seconds"])[:-1]
    print(f"| requests | engine | tokens per {per} | ratio to generate |\n|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row["requests"]):
        print(
            f"| {row['requests']} | {row['engine']} | {row['tokens_per_s']:.1f} "
            f"| {row['ratio']:.2f} |"
        )
    if arguments.out:
        names = ("model", "precision", "common", "own", "tokens")
        settings = {name: getattr(arguments, name) for name in names}
        write_results(arguments.out, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
