"""Training speed of the learner on models of real sizes, and copy rates that limit a weight sync.

    python benchmarks/learner_throughput.py --out benchmarks/results/learner_throughput.json
    python benchmarks/learner_throughput.py --quick

The first command needs one GPU. The second command uses a tiny shape and runs anywhere.

Models have the shapes of Qwen2.5 0.5B, 1.5B and 7B and random weights, in bfloat16 on CUDA (float32
with --quick). A batch holds episodes with log-normal lengths. Most have a few hundred to a few
thousand tokens, some have 8192. About a third of the tokens was sampled, in turns.

* `crl`: a step of the learner as in `crl train` (clipped surrogate, one update), with packed
  sequences and log-probs computed in parts.
* `plain`: the model on padded rows in the order of the batch, with transformers' loss on the same
  tokens.

Both use micro-batches of the same size in tokens (for `plain` including padding), the same setting
of activation checkpointing, and the same AdamW on the same float32 master weights. tokens/s counts
the batch's tokens without padding. MFU is the number of floating-point operations that the batch
needs, divided by the seconds and by the rate of a large matrix product measured in the same run.
Needed operations are 6 per weight and token, 6 per head weight and trained token, and causal
attention. Repeated computation and padding do not count.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import write_results

from crl.algo import micro_batches
from crl.learners.master import MasterWeights
from crl.learners.step import Trainer, TrainSettings
from crl.methods.parts.training import SurrogateLoss
from crl.modeling.loading import InProcessWeights, checkpoint_activations, require_packing
from crl.types import Minibatch, TokenTrace, TrainSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 128,
             "vocab_size": 1024, "tie_word_embeddings": True},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "intermediate_size": 4864,
             "vocab_size": 151_936, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "intermediate_size": 8960,
             "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "intermediate_size": 18_944,
           "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip
CHECKPOINTED = {"tiny": False, "0.5B": False, "1.5B": True, "7B": True}
"""Use of activation checkpointing, by shape."""


@dataclass(frozen=True)
class Size:
    """Size of the measurements."""

    episodes: int
    """Episodes of one batch."""
    median: int
    """Median tokens of an episode."""
    max_tokens: int
    """Maximal tokens of an episode."""
    budget: int
    """Tokens of a micro-batch."""
    repetitions: int
    """Timed steps."""
    copy_mib: int
    """MiB of the copied tensors."""


FULL = Size(episodes=64, median=1200, max_tokens=8192, budget=16_384, repetitions=3, copy_mib=4096)
QUICK = Size(episodes=8, median=40, max_tokens=96, budget=192, repetitions=2, copy_mib=8)


# ── models and batches ────────────────────────────────────────────────────────────────────────────


def make_model(shape: str, size: Size, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with random weights, which are drawn on its device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=size.max_tokens, dtype=dtype)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            torch.manual_seed(0)
            return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def episodes(size: Size, vocabulary: int) -> Minibatch:
    """Return one batch of episodes with log-normal lengths.

    The turns of an episode have 40 to 160 context tokens and 20 to 80 sampled ones.
    """
    rng = random.Random(0)
    samples = []
    for _ in range(size.episodes):
        length = min(size.max_tokens, max(16, round(size.median * math.exp(rng.gauss(0, 0.8)))))
        mask: list[int] = []
        while len(mask) < length:
            mask += [0] * rng.randint(40, 160) + [1] * rng.randint(20, 80)
        mask = [*mask[: length - 8], *[1] * 8]
        ids = tuple(rng.randrange(vocabulary) for _ in mask)
        trace = TokenTrace(
            ids,
            tuple(mask),
            tuple(-math.log(vocabulary) * m for m in mask),
            tuple(m - 1 for m in mask),
        )
        samples.append(TrainSample(trace, rng.gauss(0, 1), 1 / size.episodes))
    return Minibatch(tuple(samples), sum(sum(s.trace.mask) for s in samples))


def needed_operations(shape: str, batch: Minibatch) -> float:
    """Return the floating-point operations of a forward and backward pass over the batch."""
    s = SHAPES[shape]
    h, heads = s["hidden_size"], s["num_attention_heads"]
    key_values = s["num_key_value_heads"] * (h // heads)
    layer = 2 * h * h + 2 * h * key_values + 3 * h * s["intermediate_size"]
    lengths = [len(sample.trace.ids) for sample in batch.samples]
    attention = 6 * s["num_hidden_layers"] * h * sum(n * n for n in lengths)
    return (
        6 * s["num_hidden_layers"] * layer * sum(lengths)
        + attention
        + 6 * h * s["vocab_size"] * batch.total_tokens
    )


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


def optimizer_of(model: PreTrainedModel) -> torch.optim.AdamW:
    masters = None if model.dtype == torch.float32 else MasterWeights(model)
    adamw = torch.optim.AdamW(
        masters.parameters if masters else model.parameters(),
        lr=1e-6,
        fused=model.device.type == "cuda",
    )
    if masters:
        masters.attach(adamw)
    return adamw


def crl_step(
    model: PreTrainedModel, batch: Minibatch, size: Size, checkpointing: bool
) -> Callable[[], object]:
    require_packing(model, Path("benchmark"))
    adamw = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda _: 1.0)
    settings = TrainSettings(1.0, size.budget, 1.0, activation_checkpointing=checkpointing)
    trainer = Trainer(model, adamw, schedule, SurrogateLoss(0.2, 0.2, "token"), settings)
    return lambda: trainer.step([batch], version=1)


def plain_step(
    model: PreTrainedModel, batch: Minibatch, size: Size, checkpointing: bool
) -> Callable[[], object]:
    if checkpointing:
        checkpoint_activations(model)
    adamw = optimizer_of(model)
    batches = consecutive_batches([len(s.trace.ids) for s in batch.samples], size.budget)

    def step() -> None:
        adamw.zero_grad(set_to_none=True)
        for indices in batches:
            rows = [batch.samples[i].trace for i in indices]
            width = max(len(row.ids) for row in rows)
            pad = [width - len(row.ids) for row in rows]
            ids = torch.tensor(
                [[*row.ids, *[0] * n] for row, n in zip(rows, pad, strict=True)],
                device=model.device,
            )
            attention_mask = torch.tensor(
                [[1] * len(row.ids) + [0] * n for row, n in zip(rows, pad, strict=True)],
                device=model.device,
            )
            loss_mask = torch.tensor(
                [[*row.mask, *[0] * n] for row, n in zip(rows, pad, strict=True)],
                device=model.device,
            )
            labels = ids.masked_fill(loss_mask == 0, -100)
            loss = model(
                input_ids=ids,
                attention_mask=attention_mask,
                labels=labels,
                use_cache=False,
                num_items_in_batch=batch.total_tokens,
            ).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(
            [p for group in adamw.param_groups for p in group["params"]], 1.0
        )
        adamw.step()

    return step


def consecutive_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return consecutive samples in micro-batches of at most `budget` tokens with padding."""
    batches: list[list[int]] = []
    for index, length in enumerate(lengths):
        batch_lengths = [lengths[i] for i in batches[-1]] if batches else []
        if batch_lengths and max(*batch_lengths, length) * (len(batch_lengths) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def measure(
    shape: str, name: str, size: Size, device: torch.device, peak_rate: float
) -> dict[str, Any]:
    """Return one row of the results. The row says so if a step does not fit in memory."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = episodes(size, SHAPES[shape]["vocab_size"])
    lengths = [len(s.trace.ids) for s in batch.samples]
    steps = {"crl": crl_step, "plain": plain_step}
    row: dict[str, Any] = {
        "shape": shape,
        "step": name,
        "tokens": sum(lengths),
        "trained_tokens": batch.total_tokens,
        "longest": max(lengths),
    }
    batches = (
        micro_batches(lengths, size.budget)
        if name == "crl"
        else consecutive_batches(lengths, size.budget)
    )
    read_tokens = sum(
        sum(lengths[i] for i in indices)
        if name == "crl"
        else len(indices) * max(lengths[i] for i in indices)
        for indices in batches
    )
    row |= {"micro_batches": len(batches), "read_tokens": read_tokens}
    try:
        model = make_model(shape, size, device, dtype)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        step = steps[name](model, batch, size, CHECKPOINTED[shape])
        step()  # warm-up; it also creates the optimizer's state
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [time_call(step, device) for _ in range(size.repetitions)]
    except torch.OutOfMemoryError:
        return {**row, "seconds": None, "out_of_memory": True}
    median = statistics.median(seconds)
    row |= {
        "seconds": seconds,
        "tokens_per_s": sum(lengths) / median,
        "mfu": needed_operations(shape, batch) / median / peak_rate,
    }
    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    if name == "crl":
        # Free the optimizer and the gradients: a learner of this size publishes to another GPU.
        step = None
        free_memory(device)
        # The time includes the checksum.
        row["snapshot_s"] = time_call(lambda: InProcessWeights.snapshot(model, 1), device)
    return row


def time_call(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ── rates of the machine ──────────────────────────────────────────────────────────────────────────


def product_rate(device: torch.device) -> float:
    """Return operations per second of a large matrix product, in the precision of training."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / statistics.median([time_call(lambda: a @ b, device) for _ in range(13)][3:])


def copy_rates(size: Size, device: torch.device) -> dict[str, float]:
    """Return GB/s of copies of a large tensor, and of a safetensors file in shared memory.

    Every copied byte counts once, although it is read and written.
    """
    from safetensors.torch import load_file, save_file

    count = size.copy_mib << 20
    host = torch.randint(256, (count,), dtype=torch.uint8)
    target = torch.empty_like(host)
    copies: dict[str, Callable[[], object]] = {"host to host": lambda: target.copy_(host)}
    if device.type == "cuda":
        pinned, on_device, other = (
            host.pin_memory(),
            host.to(device),
            torch.empty(count, dtype=torch.uint8, device=device),
        )
        copies |= {
            "host to device": lambda: on_device.copy_(host),
            "host (pinned) to device": lambda: on_device.copy_(pinned, non_blocking=True),
            "device to host": lambda: target.copy_(on_device),
            "device to host (pinned)": lambda: pinned.copy_(on_device, non_blocking=True),
            "device to device": lambda: other.copy_(on_device),
        }
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(".")
    file = folder / f"crl-copy-rates-{time.monotonic_ns()}.safetensors"
    copies |= {
        "write to shared memory": lambda: save_file({"x": host}, file),
        "read from shared memory": lambda: load_file(file)["x"].clone(),
    }
    try:
        return {
            name: count / 1e9 / statistics.median([time_call(copy, device) for _ in range(4)][1:])
            for name, copy in copies.items()
        }
    finally:
        file.unlink(missing_ok=True)


# ── output ────────────────────────────────────────────────────────────────────────────────────────


def format_row(row: dict[str, Any]) -> str:
    start = f"{row['shape']:<6}{row['step']:<7}"
    if row["seconds"] is None:
        return f"{start}  out of memory"
    peak = "–" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    padding = row["read_tokens"] / row["tokens"] - 1
    return (
        f"{start}{statistics.median(row['seconds']):>9.3f}{row['tokens_per_s']:>12,.0f}"
        f"{row['mfu']:>8.1%}{peak:>11}{padding:>10.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5B", "1.5B", "7B"])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use a tiny shape and short episodes, only to test that the benchmark works",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    size, shapes = (QUICK, ["tiny"]) if arguments.quick else (FULL, arguments.shapes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    peak_rate, copies = product_rate(device), copy_rates(size, device)
    print(f"{device.type}: a large matrix product runs at {peak_rate / 1e12:,.2f} TFLOP/s")
    for name, gigabytes in copies.items():
        print(f"{name:<26}{gigabytes:>9.2f} GB/s")
    print(
        f"\n{'shape':<6}{'step':<7}{'seconds':>9}{'tokens/s':>12}{'MFU':>8}"
        f"{'peak GiB':>11}{'padding':>10}"
    )
    rows: list[dict[str, Any]] = []
    results = {"product_tflops": peak_rate / 1e12, "copies_gb_per_s": copies, "rows": rows}
    for shape in shapes:
        for name in ("crl", "plain"):
            rows.append(measure(shape, name, size, device, peak_rate))
            free_memory(device)
            print(format_row(rows[-1]), flush=True)
            if arguments.out:  # after every row, so that a later failure loses no results
                write_results(arguments.out, results)


if __name__ == "__main__":
    main()
