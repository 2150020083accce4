"""Shared parts of the benchmarks: training runs, result files, means over seeds."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crl.intervals import Mean

if TYPE_CHECKING:
    from transformers import GenerationConfig


def set_options(settings: Iterable[str]) -> list[str]:
    """Return settings KEY=VALUE as options --set."""
    return [word for setting in settings for word in ("--set", setting)]


def train_command(options: Sequence[str], run: Path) -> list[str] | None:
    """Return the arguments of crl that train a run as `crl train OPTIONS` to its end.

    They continue a run that was interrupted after its first checkpoint, also in its last
    evaluation. None: the run is finished. Other remains of a run are deleted.
    """
    if not list(run.glob("checkpoints/*/manifest.json")):
        shutil.rmtree(run, ignore_errors=True)
        return ["train", *options, "--run-dir", str(run), "--plain"]
    summary = run / "summary.json"
    if summary.exists() and not json.loads(summary.read_text("utf-8"))["interrupted"]:
        return None
    return ["resume", str(run), "--plain"]


def train_run(options: Sequence[str], run: Path) -> list[dict[str, Any]]:
    """Train a run to its end, as `train_command`, and return the run's metrics."""
    if command := train_command(options, run):
        print(" ".join(["crl", *command]), file=sys.stderr)
        subprocess.run(
            [sys.executable, "-m", "crl", *command], check=True, stdout=subprocess.DEVNULL
        )
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def without_evaluations(task: str) -> list[str]:
    """Return the settings of a run of a task that has no evaluations and no advice probe."""
    parts = ("seen", "unseen", "online_places", "probe_places")
    return ["eval.probe_every=0", *(f"tasks.{task}.eval.{part}=0" for part in parts)]


def sampling_config(tokens: int) -> GenerationConfig:
    """Return the options of transformers' `generate` that sample exactly `tokens` tokens."""
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write the raw numbers as JSON, with the machine and the commit that produced them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), "commit": commit(), **results}, indent=1) + "\n"
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(text, "utf-8")
    temporary.rename(path)


def saved_rows(path: Path | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run. End the process if it had other settings."""
    if path is None or not path.exists():
        return []
    saved = json.loads(path.read_text("utf-8"))
    if saved["settings"] != settings:
        sys.exit(f"{path} has results of other settings: {saved['settings']}. Give another --out.")
    return saved["rows"]


def machine() -> dict[str, Any]:
    """Return the machine and the versions of its software."""
    return {
        "system": platform.system(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **accelerator(),
    }


def commit() -> str | None:
    """Return the commit of the working tree, or None for a copy without history.

    It ends in -dirty if tracked files differ from the commit.
    """
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return result.stdout.strip() if result.returncode == 0 else None


def accelerator() -> dict[str, str]:
    """Return the GPU and its software versions, empty without torch or without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def write_plot(
    plot: Callable[[Sequence[Mapping[str, Any]], Path], None],
    rows: Sequence[Mapping[str, Any]],
    results: Path,
) -> None:
    """Draw the rows into a file beside the results. Print a message if matplotlib is missing."""
    try:
        plot(rows, results.with_suffix(".png"))
    except ImportError:
        print("no plot: matplotlib is not installed")


def processor() -> str:
    """Return the processor's name on Linux, elsewhere its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def mean_and_interval(values: Sequence[float | None], digits: int = 3) -> str:
    """Return "mean ± half the 95 % interval" over seeds.

    Return a dash if no value is known. If only some values are known, their number is appended.
    """
    present = [value for value in values if value is not None]
    if not present:
        return "–"
    interval = half_interval(present)
    count_note = f" (n {len(present)})" if len(present) < len(values) else ""
    return (
        f"{statistics.fmean(present):.{digits}f}"
        + (f" ± {interval:.{digits}f}" if interval is not None else "")
        + count_note
    )


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the 95 % interval of the mean of independent values; None for fewer than two."""
    return Mean.of(values).half_width if len(values) > 1 else None


LAG_SLEEP_S = 0.005
"""Seconds that the probe of the event loop's lag sleeps."""


@asynccontextmanager
async def measure_lags() -> AsyncIterator[list[float]]:
    """Measure the lag of this event loop in seconds while the block runs."""
    lags: list[float] = []

    async def probe() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(LAG_SLEEP_S)
            lags.append(time.perf_counter() - begin - LAG_SLEEP_S)

    task = asyncio.create_task(probe())
    try:
        yield lags
    finally:
        task.cancel()


def quantiles(seconds: Sequence[float], percents: Sequence[int]) -> dict[str, float]:
    """Return quantiles in milliseconds by name; empty without values."""
    names = {100: "max"}
    return (
        {names.get(q, f"p{q}"): 1000 * float(np.percentile(seconds, q)) for q in percents}
        if seconds
        else {}
    )
