"""Live runs under random faults, compared with undisturbed runs.

    PYTHONPATH=.:tests unshare --map-root-user --mount \\
        python -m support.fault_soak DIR SECONDS SEED [STACK]

The program needs a mount namespace of its own. It mounts a small tmpfs as the disk of the disturbed
runs, and another one as /dev/shm. STACK is `local` (torch engine, local learner, games in worker
processes), `deepspeed` (two ranks per model) or `vllm`.

First, undisturbed runs with different seeds are trained, unless DIR has them from an earlier call.
The time until their first step sets the intervals between faults. Then runs with the same settings
are trained under faults, one after the other, until faults were injected for SECONDS. A soak of
at least ten minutes goes on until every kind was injected, for four times SECONDS at most.
The last run is then completed without faults. After each end of a process, `crl resume` continues
the run. A fault is one of:

* `kill`: SIGKILL of the run. It may also hit the start, a resume, an evaluation or a checkpoint.
* `part`: SIGKILL of a worker process of environments, of a rank, or of a vLLM engine.
* `interrupt`, `terminate`: SIGINT, SIGTERM. `twice`: a second SIGINT up to a second later.
* `disk`: a file fills the disk for some seconds.

`is_expected` has the exit codes that a run may end with. The program prints a report in JSON: see
`Report`.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from crl.monitor.run_dir import RunDir
from crl.run.checkpoint import complete_steps
from support.complementary_runs import address, log, rows
from support.live_runs import kill_all, mark, processes, start, temporary_files, wait_for_end
from support.paths import python_environment
from support.whole_runs import episodes, metrics
from support.worker_rooms import SETTING

GROUPS, MEMBERS = 4, 8
SETS = {
    "local": (SETTING, "rollout.env_processes=3"),
    "deepspeed": ("learner.kind=deepspeed", "learner.ranks=2", "learner.device=cpu"),
    "vllm": ("engine.kind=vllm",),
}
"""Settings of the stacks."""
STEPS = {"local": 40, "deepspeed": 30, "vllm": 30}
UNDISTURBED = {"local": 4, "deepspeed": 3, "vllm": 3}
"""Number of undisturbed runs."""
PARTS = {
    "local": "crl.envs.hosting.worker", "deepspeed": "deepspeed_worker", "vllm": "EngineCore",
}  # fmt: skip
"""Words in the command lines of the processes that the fault `part` kills."""
CAUSES = {
    "disk": r"disk|No space left on device",
    "local": r"worker", "deepspeed": r"rank", "vllm": r"[Ee]ngine",
}  # fmt: skip
"""Words of an error that names the full disk or, by stack, the killed part."""
SIGNALS = {
    "kill": signal.SIGKILL, "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT, "twice": signal.SIGINT,
}  # fmt: skip
"""Signals that are sent to the run."""
FAULTS = ("kill", "kill", "part", "part", "interrupt", "terminate", "twice", "disk", "disk")
DISK_BYTES = 64 << 20
PENDING = "SELECT COUNT(*) FROM requests WHERE state IN ('pending', 'leased')"
END_S = {"local": 30.0, "deepspeed": 30.0, "vllm": 120.0}
"""Seconds in which the processes of a run must end after the run itself, by stack.

A process of vLLM that is starting notices the end only after its imports.
"""
ALL_KINDS_S = 600.0
"""Minimum duration in seconds of a soak that injects every kind of fault."""
TIMEOUT_S = 900.0
"""Seconds without an end of the process after which a run counts as hanging."""


@dataclass
class Report:
    """Results of the program."""

    seconds: float = 0.0
    """Time in which faults were injected."""
    faults: dict[str, int] = field(default_factory=dict)
    """Number of injected faults by kind."""
    exits: dict[str, int] = field(default_factory=dict)
    """Number of ends of processes, by fault and exit code."""
    resumes: int = 0
    problems: list[str] = field(default_factory=list)
    """Everything that must not happen, such as lost episodes or leaked resources."""
    undisturbed: list[dict[str, float]] = field(default_factory=list)
    """Success of the undisturbed runs; see `success`."""
    disturbed: list[dict[str, float]] = field(default_factory=list)
    """Success of the disturbed runs."""


class Soak:
    """Disturbed and undisturbed runs of one stack."""

    def __init__(self, folder: Path, seconds: float, seed: int, stack: str) -> None:
        self.folder, self.limit, self.stack = folder, seconds, stack
        self.random, self.report = random.Random(seed), Report()
        self.disk = folder / "disk"
        # A path of a socket has at most 107 bytes, so that the folder of a test would be too long.
        self.temporary = Path(tempfile.mkdtemp(prefix="soak-"))
        self.start_s = 0.0
        """Longest time until the first step of an undisturbed run, in seconds."""
        self.next_faults: list[str] = []
        """Faults that are injected next, the last one first. All of FAULTS occur equally often."""
        self.left_by_killed: set[Path] = set()
        """Temporary files of killed runs."""
        self.faults: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()
        self._output_path = folder / "output.txt"
        self.output = self._output_path.open("a", encoding="utf-8")

    def run(self) -> Report:
        self.disk.mkdir(exist_ok=True)
        mount(self.disk, DISK_BYTES)
        mount(Path("/dev/shm"), 1 << 30)
        for seed in range(UNDISTURBED[self.stack]):
            run = self.folder / f"undisturbed-{seed}"
            if not run.exists():
                self._undisturbed(run, seed)
            self.start_s = max(self.start_s, metrics(run, "train")[0]["time"])
            self.report.undisturbed.append(success(run))
        number = 0
        while self._injecting:
            self._disturb(self.disk / "run", number % UNDISTURBED[self.stack])
            shutil.move(self.disk / "run", self.folder / f"disturbed-{number}")
            number += 1
        if missing := self._missing:
            self._problems([f"faults that were never injected: {sorted(missing)}"])
        self.report.faults, self.report.exits = dict(self.faults), dict(self.exits)
        return self.report

    @property
    def _injecting(self) -> bool:
        """True until SECONDS have passed; four times SECONDS while kinds of faults are missing."""
        return self.report.seconds < self.limit * (4 if self._missing else 1)

    @property
    def _missing(self) -> set[str]:
        """Kinds of faults that a soak of ten minutes has not injected yet."""
        return {*FAULTS} - self.faults.keys() if self.limit >= ALL_KINDS_S else set()

    def _undisturbed(self, run: Path, seed: int) -> None:
        process = self._start(self._train(run, seed), name := mark())
        if code := process.wait():
            raise RuntimeError(f"an undisturbed run ended with exit code {code}")
        self._check_end(name, "undisturbed", code)

    def _disturb(self, run: Path, seed: int) -> None:
        """Train a run under faults to its last step, and check its files."""
        arguments, code = self._train(run, seed), -1
        while code:
            if has_checkpoint(run):
                arguments = ["resume", str(run), "--plain"]
                self.report.resumes += 1
            elif run.exists():
                shutil.rmtree(run)  # as the message says: train again
            code, expected = self._disturb_process(arguments, run)
            if code == 2 or not (expected or self._injecting):
                break  # the signal came after the last checkpoint, or the run cannot go on
        self._problems(f"{run.name} {seed}: {text}" for text in check(run, self.stack))
        self.report.disturbed.append(success(run))

    def _disturb_process(self, arguments: list[str], run: Path) -> tuple[int, bool]:
        """Start a process and inject faults. Return its exit code, and whether it is expected."""
        name, printed = mark(), self._output_path.stat().st_size
        process = self._start(arguments, name)
        begun = time.monotonic()
        disturbed = self._injecting
        faults = self._inject(process, name) if disturbed else []
        code = self._wait(process, name)
        if disturbed:
            self.report.seconds += time.monotonic() - begun
        fault = faults[-1] if faults else "none"
        self.exits[f"{fault}: {code}"] += 1
        print(
            f"{time.ctime()} {fault}: exit code {code}, {trained(run)} steps",
            flush=True,
            file=sys.stderr,
        )
        self._check_end(name, fault, code)
        output = self._output_path.read_bytes()[printed:].decode("utf-8", "replace")
        if not (expected := is_expected(code, faults, output, self.stack)):
            self._problems([f"exit code {code} after {faults}: {last_line(output)}"])
        return code, expected

    def _inject(self, process: subprocess.Popen[str], name: str) -> list[str]:
        """Inject faults until one of them ends the process, or its last step is trained.

        Return the faults in order.
        """
        faults: list[str] = []
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.random.uniform(0, 2 * self.start_s))
            if process.poll() is not None:
                return faults
            self.next_faults = self.next_faults or self.random.sample(FAULTS, len(FAULTS))
            fault = self.next_faults[-1]
            if fault == "part" and not self._kill_part(name):
                continue
            self.next_faults.pop()
            self.faults[fault] += 1
            faults.append(fault)
            if fault == "disk":
                self._fill_disk()
            elif fault in SIGNALS:
                process.send_signal(SIGNALS[fault])
                if fault == "twice":
                    time.sleep(self.random.random())
                    process.send_signal(signal.SIGINT)
                return faults

    def _kill_part(self, name: str) -> bool:
        """Kill a part of the run. Return False if the run has none at the moment."""
        found = list(processes(name, PARTS[self.stack]))
        with suppress(ProcessLookupError):
            if found:
                os.kill(self.random.choice(found), signal.SIGKILL)
                return True
        return False

    def _fill_disk(self) -> None:
        ballast = self.disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        time.sleep(self.random.uniform(0, self.start_s))
        ballast.unlink()

    def _start(self, arguments: list[str], name: str) -> subprocess.Popen[str]:
        return start(arguments, name, self.temporary, self.output)

    def _train(self, run: Path, seed: int) -> list[str]:
        sets = (
            *SETS[self.stack], f"rollout.groups={GROUPS}", f"rollout.group_size={MEMBERS}",
            "extractor.batch=8", "run.checkpoint_every=2", "eval.probe_every=0",
            "tasks.room.stream.places=8", "tasks.room.stream.permanent=4",
            "tasks.room.eval.seen=128", "tasks.room.eval.unseen=128",
            "tasks.room.eval.online_places=4",
        )  # fmt: skip
        options = [part for setting in sets for part in ("--set", setting)]
        steps = str(STEPS[self.stack])
        start = ["train", "--tasks", "room", "--plain", "--steps", steps, "--seed", str(seed)]
        return [*start, "--run-dir", str(run), *options]

    def _wait(self, process: subprocess.Popen[str], name: str) -> int:
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            line = last_line(self._output_path.read_text("utf-8", "replace"))
            self._problems([f"the run hangs: {line}"])
            kill_all(name)
            return process.wait()

    def _check_end(self, name: str, fault: str, code: int) -> None:
        """Check that nothing is left of a run whose process has ended with an exit code.

        The files of a run that was killed may stay until the next run that is completed.
        """
        if left := wait_for_end(name, END_S[self.stack]):
            self._problems([f"processes left after {fault}: {left}"])
            kill_all(name)
        folders = (self.temporary, Path("/dev/shm"))
        files = {path for folder in folders for path in temporary_files(folder)}
        if code < 0:
            self.left_by_killed |= files
        else:
            allowed = self.left_by_killed if code else set()
            self._problems(f"left after {fault}: {path}" for path in sorted(files - allowed))

    def _problems(self, texts: Iterable[str]) -> None:
        """Add problems to the report, and print each at once."""
        for text in texts:
            print(text, flush=True, file=sys.stderr)
            self.report.problems.append(text)


def is_expected(code: int, faults: Sequence[str], output: str, stack: str) -> bool:
    """Return whether a run may end with the exit code `code` after `faults`, in this order.

    `output` is the output of the process. `check` finds a run that ended with 0 too early.
    """
    line, last = last_line(output), faults[-1] if faults else "none"
    stopped = last in ("interrupt", "terminate", "twice")
    if code == 1:
        causes = [
            CAUSES[stack if fault == "part" else fault] for fault in {*faults} & {"part", "disk"}
        ]
        return line.startswith("error: ") and any(re.search(words, line) for words in causes)
    if code == 2:
        return "the run has completed" in line
    if code == 130:
        return stopped
    if code < 0:
        # Before its first line, a run does not handle signals.
        unhandled = stopped and not re.search("^run ", output, re.MULTILINE)
        return -code == SIGNALS.get(last) and (last == "kill" or unhandled)
    return code == 0


def last_line(output: str) -> str:
    return (output.strip().splitlines() or [""])[-1]


def mount(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)


def has_checkpoint(run: Path) -> bool:
    """Return whether a run has a complete checkpoint, or one that was being replaced."""
    replaced = (run / "checkpoints").glob(".*.old/manifest.json")
    return bool(complete_steps(run / "checkpoints") or list(replaced))


def trained(run: Path) -> int:
    """Return the number of trained steps of a run that may have been killed."""
    path = RunDir(run).metrics
    return path.read_text("utf-8").count('"kind": "train"') if path.exists() else 0


def check(run: Path, stack: str) -> list[str]:
    """Return what is wrong with the files of a finished run: lost or doubled lines and episodes."""
    problems: list[str] = []

    def expect(name: str, found: Any, expected: Any) -> None:
        if found != expected:
            problems.append(f"{name}: {found!r} instead of {expected!r}")

    steps, played = STEPS[stack], episodes(run)
    addresses = Counter(address(t) for t in played)
    expect("train steps", [m["step"] for m in metrics(run, "train")], [*range(1, steps + 1)])
    expect("episodes", len(played), steps * GROUPS * MEMBERS)
    expect("episodes played twice", [a for a, n in addresses.items() if n > 1], [])
    submitted = Counter(origin for origin, _ in log(run / "bank.sqlite", "submit"))
    valid = Counter(address(t) for t in played if not t["error"])
    expect("lost by the bank", sorted(valid - submitted), [])
    expect("doubled in the bank", sorted(submitted - valid), [])
    pending = rows(run / "bank.sqlite", PENDING)
    expect("episodes that wait for distillation", pending, [(0,)])
    for name in ("total/env_turns", "total/sampled_tokens/actor", "actor/version"):
        values = [m[name] for m in metrics(run, "train") if name in m]
        expect(f"{name} that decreased", [b for a, b in pairwise(values) if b < a], [])
    stale = [m["staleness/max"] for m in metrics(run, "train") if m["staleness/max"] > 1]
    expect("staleness above its bound", stale, [])
    expect("evaluations", [m["step"] for m in metrics(run, "eval")], [0, steps])
    expect("temporary files", [p.name for p in run.glob("checkpoints/.*")], [])
    return problems


def success(run: Path) -> dict[str, float]:
    """Return the success of a finished run.

    `eval`: mean of the final evaluation over its splits and conditions. `train`: mean of the last
    half of the training steps.
    """
    final = metrics(run, "eval")[-1]
    rates = [
        value for name, value in final.items()
        if name.startswith("eval/room/") and "/success/" in name and name.count("/") == 4
    ]  # fmt: skip
    played = [t for t in episodes(run) if not t["error"]]
    last = max(t["step"] for t in played)
    return {
        "eval": fmean(rates),
        "train": fmean(t["success"] for t in played if t["step"] > last / 2),
    }


def fault_soak(folder: Path, seconds: float, stack: str) -> Report:
    """Run this program in a mount namespace of its own and return its report."""
    namespace = ["unshare", "--map-root-user", "--mount"]
    command = [sys.executable, "-m", "support.fault_soak", str(folder), str(seconds), "0", stack]
    done = subprocess.run(
        [*namespace, *command],
        env=python_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Report(**json.loads(done.stdout))


def can_mount() -> bool:
    """Return whether this user may mount a tmpfs in a namespace."""
    command = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def assert_as_undisturbed(report: Report) -> None:
    """Check that nothing was lost, doubled or left, and that the disturbed runs learned as well.

    The mean success of the disturbed runs lies within [min − s, max + s] of the undisturbed ones. s
    is the range max − min. This is about three standard deviations to each side for four seeds.
    """
    assert report.problems == []
    assert report.resumes > 0
    for kind in ("eval", "train"):
        rates = [run[kind] for run in report.undisturbed]
        low, high = min(rates), max(rates)
        mean = fmean(run[kind] for run in report.disturbed)
        assert 2 * low - high <= mean <= 2 * high - low, report


def main() -> None:
    # A background job of a shell ignores SIGINT, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, seconds, seed, *stack = sys.argv[1:]
    soak = Soak(Path(folder), float(seconds), int(seed), *(stack or ["local"]))
    try:
        print(json.dumps(asdict(soak.run())))
    finally:
        shutil.rmtree(soak.temporary)


if __name__ == "__main__":
    main()
