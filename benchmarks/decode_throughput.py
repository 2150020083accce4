"""Decoding speed of the torch engine, compared with transformers' `generate`.

    python benchmarks/decode_throughput.py --out benchmarks/results/decode_throughput.json

The numbers are sampled tokens per CPU-second. Requests imitate those of
`crl train --tasks room,webshop,alfworld`, of which 7,618 were measured. 128 episodes run at a time,
in groups of 8 with a common first prompt. An episode has many turns. Its prompt grows from 40
tokens to 100 (room), 600 (webshop) or 400 (alfworld). Each turn samples 2 to 12 tokens, and the
environment answers after a pause. The extractor's requests run at the same time and have one turn:
45 prompt tokens and 13 sampled tokens. All tokens are random and are not used.

Three patterns are measured:

* `mixture`: both kinds; requests arrive when their environments answer;
* `distil`: only requests with one turn;
* `long`: 128 prompts of 40 tokens, 64 sampled tokens each.

`generate` receives the same prompts in left-padded batches of one turn, and decodes until a batch's
longest answer is complete. It has no cache between turns.

CPU-seconds are process time of all threads, so other work on the machine has little influence. The
numbers are medians over repetitions that alternate between engine and `generate`. `per busy second`
uses the wall seconds of the engine's passes instead.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import sampling_config, write_results

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from crl.engines.torch import TorchEngine

GROUP = 8
"""Episodes with a common first prompt."""

VOCABULARY = 768
"""Tokens of the tiny models' vocabulary."""


@dataclass(frozen=True)
class Turn:
    """Request of a session."""

    new: list[int]
    """Prompt tokens that follow the tokens of the session's last turn."""
    tokens: int
    """Tokens to sample."""


@dataclass(frozen=True)
class Session:
    """Requests of one conversation. Each prompt continues the previous turn."""

    turns: tuple[Turn, ...]


def random_tokens(count: int, rng: random.Random) -> list[int]:
    """Return random tokens."""
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def episode(kind: str, group: int, rng: random.Random) -> Session:
    """Return an episode like those of the tiny actor. A group's first prompts are equal."""
    turns, new, tokens = {
        "room": (rng.randint(3, 8), (14, 20), (2, 3)),
        "webshop": (rng.randint(4, 11), (30, 70), (4, 12)),
        "alfworld": (rng.randint(10, 14), (15, 25), (5, 8)),
    }[kind]
    shared = random.Random(group)
    first = Turn(random_tokens(shared.randint(31, 56), shared), rng.randint(*tokens))
    return Session(
        (
            first,
            *(
                Turn(random_tokens(rng.randint(*new), rng), rng.randint(*tokens))
                for _ in range(turns - 1)
            ),
        )
    )


def mixture(seed: int = 0) -> list[Session]:
    """Return the 128 episodes of a step and the same number of distillations."""
    rng = random.Random(seed)
    kinds = ("room", "webshop", "alfworld")
    episodes = [episode(kinds[i // GROUP % 3], i // GROUP, rng) for i in range(128)]
    return episodes + distil(128, rng)


def distil(count: int, rng: random.Random) -> list[Session]:
    """Return requests like those of an extractor."""
    return [
        Session((Turn(random_tokens(rng.randint(32, 60), rng), rng.randint(6, 20)),))
        for _ in range(count)
    ]


def long(count: int, rng: random.Random) -> list[Session]:
    """Return requests with one turn and long answers."""
    return [Session((Turn(random_tokens(40, rng), 64),)) for _ in range(count)]


PATTERNS = {
    "mixture": mixture,
    "distil": lambda: distil(256, random.Random(0)),
    "long": lambda: long(128, random.Random(0)),
}


def sampled_tokens(sessions: Sequence[Session]) -> int:
    """Return the number of tokens that the sessions sample."""
    return sum(turn.tokens for session in sessions for turn in session.turns)


async def run_engine(engine: TorchEngine, sessions: Sequence[Session], pause: float) -> None:
    """Play all sessions at the same time. After a turn, a session pauses like an environment."""
    from crl.types import Sampling

    no_stop = (VOCABULARY,)

    async def play(number: int, session: Session) -> None:
        rng = random.Random(number)
        prompt: list[int] = []
        for i, turn in enumerate(session.turns):
            prompt += turn.new
            completion = await engine.generate(
                prompt, Sampling(turn.tokens, no_stop), session=str(number), rng=number * 100 + i
            )
            prompt += completion.ids
            await asyncio.sleep(pause * rng.random() * 2)

    await asyncio.gather(*(play(i, session) for i, session in enumerate(sessions)))


def run_generate(model: PreTrainedModel, sessions: Sequence[Session]) -> None:
    """Send the same requests to `generate`, one batch per turn."""
    import torch

    prompts: list[list[int]] = [[] for _ in sessions]
    for turn in range(max(len(session.turns) for session in sessions)):
        rows = [i for i, session in enumerate(sessions) if turn < len(session.turns)]
        for batch in (rows[begin : begin + 128] for begin in range(0, len(rows), 128)):
            for i in batch:
                prompts[i] += sessions[i].turns[turn].new
            width, tokens = (
                max(len(prompts[i]) for i in batch),
                max(sessions[i].turns[turn].tokens for i in batch),
            )
            padded = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in batch])
            mask = torch.tensor(
                [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch]
            )
            with torch.inference_mode():
                outputs = model.generate(  # pyright: ignore[reportCallIssue]
                    padded, attention_mask=mask, generation_config=sampling_config(tokens)
                )
            for i, row in zip(batch, outputs[:, width:].tolist(), strict=True):
                prompts[i] += row[: sessions[i].turns[turn].tokens]


def load_actor(kv_heads: int | None) -> PreTrainedModel:
    """Return the bundled actor, or random weights of its shape with `kv_heads` key-value heads."""
    import torch

    from crl.config import resolve_model
    from crl.modeling.loading import load_model

    model = load_model(resolve_model("tiny-actor"), torch.device("cpu"))
    if kv_heads is None:
        return model
    model.config.num_key_value_heads = kv_heads
    torch.manual_seed(0)
    return type(model)(model.config).eval()


async def measure(
    pattern: str, repetitions: int, pause: float, kv_heads: int | None, with_generate: bool
) -> dict[str, float]:
    """Return sampled tokens per CPU-second of engine and `generate`, and their ratio."""
    import torch

    from crl.engines.torch import TorchEngine

    torch.set_num_threads(1)
    sessions = PATTERNS[pattern]()
    model = load_actor(kv_heads)
    engine = TorchEngine(load_actor(kv_heads), max_batch=256, max_context=1024)
    rates: dict[str, list[float]] = {"engine": [], "generate": []}
    busy = engine.busy_s
    for repetition in range(repetitions + 1):
        for name in rates if with_generate else ("engine",):
            begin = time.process_time()
            if name == "engine":
                await run_engine(engine, sessions, pause)
            else:
                run_generate(model, sessions)
            if repetition:  # the first repetition is a warm-up
                rates[name].append(sampled_tokens(sessions) / (time.process_time() - begin))
        if not repetition:
            busy = engine.busy_s
    await engine.aclose()
    medians = {name: statistics.median(values) for name, values in rates.items() if values}
    medians["per busy second"] = sampled_tokens(sessions) * repetitions / (engine.busy_s - busy)
    if with_generate:
        medians["ratio"] = medians["engine"] / medians["generate"]
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--pause", type=float, default=0.02, help="mean seconds until an environment answers"
    )
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument(
        "--kv-heads",
        type=int,
        help="use random weights with this number of key-value heads, not the bundled weights",
    )
    parser.add_argument("--no-generate", action="store_true", help="measure only the engine")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = {}
    for pattern in arguments.patterns.split(","):
        medians = asyncio.run(
            measure(
                pattern,
                arguments.repetitions,
                arguments.pause,
                arguments.kv_heads,
                not arguments.no_generate,
            )
        )
        results[pattern] = medians
        values = "  ".join(
            f"{name} {value:,.2f}" if name == "ratio" else f"{name} {value:,.0f}"
            for name, value in medians.items()
        )
        print(f"{pattern:<8} {values}", flush=True)
    if arguments.out:
        write_results(arguments.out, results)


if __name__ == "__main__":
    main()
