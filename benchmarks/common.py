"""What the benchmarks share: the record of where numbers come from, and means over seeds."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's t at 97.5 %, by number of seeds."""


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """The raw numbers as JSON, with the machine and the commit that they come from."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    machine = {"system": platform.system(), "processor": processor(), "cpus": os.cpu_count(), "python": platform.python_version()}
    path.write_text(json.dumps({"machine": machine, "commit": commit, **results}, indent=1) + "\n", "utf-8")


def processor() -> str:
    """The processor's name, as Linux tells it; elsewhere its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def mean_and_interval(values: Sequence[float | None]) -> str:
    """mean ± half the 95 % interval over seeds; a dash where nothing is known."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    if len(known) not in T_975:
        return f"{statistics.fmean(known):.3f}"
    return f"{statistics.fmean(known):.3f} ± {T_975[len(known)] * statistics.stdev(known) / math.sqrt(len(known)):.3f}"
