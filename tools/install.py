"""`pip install` with one line for each stage, for the targets of make.

    python tools/install.py --editable . --constraint constraints.txt

All arguments are passed on to pip. The full output of pip is in `install.log` of the environment.
Warnings are printed, except those without a meaning for users. If pip fails, its output is printed
from the first error on, and the exit code is pip's.

Only the standard library is imported, because nothing else is installed yet.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LARGE = 20
"""Size in MB at or above which the download of a package has its own line."""

NOISE = re.compile(
    r"WARNING: (?:Location .* is ignored|Running pip as the 'root' user)|\s*DEPRECATION:|\[notice\]"
)
"""Warnings of pip that need no action."""

ERROR = re.compile(r"\s*(?:ERROR:|error:|× |Traceback )")
"""Start of pip's error messages, also of those of a build."""


def stage(line: str) -> str | None:
    """Return the text to show for a line of pip's output, or None for a line of no interest."""
    if line.startswith("WARNING:"):
        return None if NOISE.match(line) else line
    if found := re.match(r"\s*Downloading (\S+?)-(\d[^-\s]*)\S* \(([\d.]+) (MB|GB)\)", line):
        name, version, size, unit = found.groups()
        is_large = unit == "GB" or float(size) >= LARGE
        return f"downloading {name} {version} ({size} {unit})" if is_large else None
    # pip prints "still running" once a minute.
    if found := re.match(r"\s*Building wheel for (\S+) .*: (started|still running)", line):
        return f"building {found[1]}{'' if found[2] == 'started' else ': still running'}"
    if line.startswith("Installing collected packages: "):
        return f"installing {line.count(',') + 1} packages"
    return None


def failure(lines: Iterable[str]) -> list[str]:
    """Return pip's output from the first error on, or all of it, without noise."""
    kept = [line for line in lines if not NOISE.match(line)]
    first = next((i for i, line in enumerate(kept) if ERROR.match(line)), 0)
    return kept[first:]


def install(arguments: list[str], log: Path, show: Callable[[str], None]) -> int:
    """Run `pip install` with the arguments. Return its exit code.

    `log`: file for the full output. `show` prints one line.
    """
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    start, lines = time.monotonic(), list[str]()
    show("finding packages")
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip,
    ):
        assert pip.stdout is not None
        for text in pip.stdout:
            file.write(text)
            lines.append(text.rstrip("\n"))
            if shown := stage(lines[-1]):
                show(f"{shown}  [{time.monotonic() - start:.0f} s]")
    if pip.returncode:
        for line in failure(lines):
            show(line)
        show(f"The installation failed. The full output of pip is in {log}")
    else:
        show(f"done  [{time.monotonic() - start:.0f} s]")
    return pip.returncode


def main() -> int:
    log = Path(sys.prefix) / "install.log"
    try:
        return install(sys.argv[1:], log, lambda line: print(f"  {line}", flush=True))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
