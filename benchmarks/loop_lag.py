"""Lag of the event loop while a run works on large batches.

    python benchmarks/loop_lag.py --out benchmarks/results/loop_lag.json

A step has 384 episodes of 8,000 tokens and 20 turns, half of them guided. While each part of a
step's work runs, a coroutine sleeps 5 ms again and again; the lag is the time by which it wakes up
late. The parts run as in a run. The reference is the same work on the event loop itself. `idle` is
the lag without work, which is that of the machine.

* records: the episodes are written to the disk
* metrics: metrics of the step's episodes
* minibatches: advantages and minibatches of the actor's training step
* samples: the samples are pickled for the ranks of a DeepSpeed learner
* prompt: a first prompt of 65,000 tokens is rendered
* checkpoint: the manifest of a run of 1,000 steps with 48 groups each is written
* bank: the experiences of all episodes are credited, and the episodes are queued for distillation
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import measure_lags, quantiles, write_results
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from crl.algo.training_batch import training_batch
from crl.config.load import load
from crl.embedders.hash import HashEmbedder
from crl.engines.scripted import ScriptedEngine
from crl.evaluation.metrics import rollout_metrics
from crl.learners.deepspeed import frame
from crl.manager import ExperienceManager, ManagerSettings, Prompts
from crl.methods.parts.distilling import FullDistilPrompt
from crl.methods.parts.merging import FullMergePrompt
from crl.methods.parts.training import SplitAdvantage, actor_role
from crl.modeling.tokens import ChatRenderer, Conversation
from crl.prompts import prompt
from crl.protocols import Rerender
from crl.records.shards import write_shard
from crl.rollout.crediting import credit_and_submit
from crl.run.checkpoint import write_manifest
from crl.run.main import frozen_heap, short_thread_turns
from crl.types import (
    Activity,
    EpisodeAddress,
    ExperienceUse,
    Guidance,
    Outcome,
    Segment,
    Task,
    TokenTrace,
    Trajectory,
)

EPISODES, TOKENS, TURNS = 384, 8_000, 20
LONG_PROMPT_TOKENS = 65_000
STEPS, GROUPS, GAP = 1_000, 48, ("webshop", "find me trail mix, fair trade, non gmo", 0.25)
"""Steps, groups of a step, and the record of a group in the manifest of a checkpoint."""

Work = Callable[[], Awaitable[object]]


def episode(number: int, draws: random.Random, tokens: int) -> Trajectory:
    """Return an episode with random tokens. Half of the tokens of each turn are sampled."""
    turn = tokens // TURNS
    mask = tuple(int(i % turn >= turn // 2) for i in range(tokens))
    trace = TokenTrace(
        tuple(draws.randrange(150_000) for _ in range(tokens)),
        mask,
        tuple(-draws.random() if sampled else 0.0 for sampled in mask),
        tuple(7 if sampled else -1 for sampled in mask),
    )
    words = [f"{draws.randrange(10_000):x}" for _ in range(tokens)]
    texts = [" ".join(words[start : start + turn // 2]) for start in range(0, tokens, turn // 2)]
    segments = tuple(
        Segment("assistant", text, "policy") if i % 2 else Segment("user", text, "env")
        for i, text in enumerate(texts)
    )
    group, member = divmod(number, 8)
    guided = member < 4
    use = ExperienceUse(f"run/0/{group}/0#0", 1, f"run/0/{group}/0", "start")
    won = draws.random() < 0.5
    return Trajectory(
        Task("webshop", group, "train", f"goal {group}"),
        EpisodeAddress(6, group, member),
        "guided" if guided else "free",
        segments,
        (trace,),
        Outcome({"outcome": float(won)}, success=won),
        Activity((0.0,) * TURNS, sampled_tokens=sum(mask)),
        Guidance((use,), ("Read the page.",)) if guided else Guidance(),
    )


def chat_renderer(draws: random.Random) -> tuple[ChatRenderer, Callable[[int], str]]:
    """Return a renderer with a tokenizer of 4,000 tokens, and a function that returns n words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draws.choices(letters, k=draws.randint(2, 9))) for _ in range(5_000)]

    def text(count: int) -> str:
        return " ".join(draws.choices(words, k=count))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text(1_000) for _ in range(30)],
        trainers.BpeTrainer(
            vocab_size=4_000,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    return ChatRenderer(fast, [1]), text


class NoRerender(Rerender):
    """Rerenderer of a method that trains on unchanged prompts."""

    def without(self, *_: Any, **__: Any) -> Sequence[TokenTrace]:
        raise NotImplementedError


def computations(
    folder: Path, batch: Sequence[Trajectory], prompt_tokens: int
) -> dict[str, Callable[[], object]]:
    """Return the computations that a run makes in threads, by the name of the part."""
    role = actor_role(load(["room"]).actor, SplitAdvantage("std"))
    renderer, text = chat_renderer(random.Random(1))
    words = prompt_tokens * 1_000 // len(renderer.encode(text(1_000)))
    long_text, rerender = text(words), NoRerender()

    def minibatches() -> object:
        return training_batch(role, rerender, batch, count=4, rng=random.Random(0))

    def long_prompt() -> object:
        conversation = Conversation(renderer)
        conversation.add([Segment("user", long_text, "env")])
        assert conversation.is_long, "a run renders it in a thread"
        return conversation.prompt()

    steps = STEPS * len(batch) // EPISODES
    manifest = {"state": {"diagnostics": {"gaps": [[GAP] * GROUPS] * steps}}}
    (folder / "7").mkdir()
    return {
        "records": partial(write_shard, folder / "episodes", 7, batch),
        "metrics": partial(rollout_metrics, batch, 7),
        "minibatches": minibatches,
        "samples": partial(frame, [t.traces for t in batch]),
        "prompt": long_prompt,
        "checkpoint": partial(write_manifest, folder / "7", manifest),
    }


async def credit(path: Path, batch: Sequence[Trajectory]) -> dict[str, float]:
    """Measure how the episodes of a step are credited and queued in a new bank."""
    renderer, _ = chat_renderer(random.Random(1))
    prompts = Prompts(
        FullDistilPrompt(prompt("distil"), renderer, 8_000), FullMergePrompt(prompt("merge"))
    )

    manager = await ExperienceManager.open(
        path, ScriptedEngine(renderer, str), HashEmbedder(), renderer, prompts,
        ManagerSettings(), seed=0,
    )  # fmt: skip
    try:
        return await measure(partial(credit_and_submit, manager, "run", batch, batch))
    finally:
        await manager.aclose()


async def on_loop(compute: Callable[[], object]) -> None:
    compute()


async def measure(work: Work) -> dict[str, float]:
    """Return the duration of the work and the lag while it runs, in milliseconds."""
    async with measure_lags() as lags:
        await asyncio.sleep(0.05)
        lags.clear()
        begin = time.perf_counter()
        await work()
        seconds = time.perf_counter() - begin
        await asyncio.sleep(0.02)  # the lag of the work's end
    return {"ms": 1_000 * seconds, **quantiles(lags, (50, 99, 100))}


async def measure_parts(
    folder: Path, episodes: int, tokens: int, repetitions: int
) -> list[dict[str, Any]]:
    draws = random.Random(0)
    batch = [episode(number, draws, tokens) for number in range(episodes)]
    prompt_tokens = LONG_PROMPT_TOKENS * tokens // TOKENS
    work: dict[str, tuple[Work, Work | None]] = {
        "idle": (partial(asyncio.sleep, 1.0), None),
        **{
            name: (partial(asyncio.to_thread, compute), partial(on_loop, compute))
            for name, compute in computations(folder, batch, prompt_tokens).items()
        },
    }
    rows = []
    for name, (in_run, reference) in work.items():
        runs = [await measure(in_run) for _ in range(repetitions)]
        references = [await measure(reference) for _ in range(repetitions)] if reference else []
        rows.append(row(name, runs, references))
        print_row(rows[-1])
    banks = [await credit(folder / f"{number}.sqlite", batch) for number in range(repetitions)]
    rows.append(row("bank", banks, []))
    print_row(rows[-1])
    return rows


def row(
    name: str, runs: Sequence[dict[str, float]], references: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Return the medians over the repetitions, and the ratio of the largest lags."""
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    lag = statistics.median(run["max"] for run in references) if references else None
    ratio = medians["max"] / lag if lag else None
    return {"part": name, **medians, "on_loop": lag, "ratio": ratio}


def print_row(row: dict[str, Any]) -> None:
    numbers = (row[name] for name in ("ms", "p50", "p99", "max", "on_loop", "ratio"))
    cells = ("–" if number is None else f"{number:,.2f}" for number in numbers)
    print(f"{row['part']:<12}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and short episodes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    episodes, tokens = (16, 400) if arguments.quick else (EPISODES, TOKENS)
    heads = ("ms", "lag p50", "p99", "max", "on the loop", "ratio")
    print(f"{'part':<12}" + "".join(f"{head:>12}" for head in heads))
    with tempfile.TemporaryDirectory() as folder, frozen_heap(), short_thread_turns():
        rows = asyncio.run(measure_parts(Path(folder), episodes, tokens, arguments.repetitions))
    if arguments.out:
        write_results(arguments.out, {"episodes": episodes, "tokens": tokens, "rows": rows})


if __name__ == "__main__":
    main()
