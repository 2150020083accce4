"""`pip install` with one line for each stage, for the targets of make.

    python tools/install.py --editable . --constraint constraints.txt

All arguments are passed on to pip. Its full output is in `install.log` of the environment. Warnings
are printed, except those without a meaning for users. If pip fails, its output is printed from the
first error on, and the exit code is pip's.

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

DOWNLOAD = re.compile(
    r"\s*(?:Downloading|Using cached) (\S+?)-(\d[^-\s]*?)(?:-\S+\.whl|(\.tar\.gz|\.zip))"
    r" \(([\d.]+) (\w+)\)"
)
"""Line on a package: name, version, suffix of a source distribution, size and unit."""

ERROR = re.compile(r"\s*(?:ERROR:|error:|× |Traceback )")
"""Start of pip's error messages, also of those of a build."""


class Stages:
    """Reader of pip's output, line by line."""

    def __init__(self) -> None:
        self._source = ""
        """Package whose source was downloaded last. pip runs its build script next."""

    def text(self, line: str) -> str | None:
        """Return the text to show for a line, or None for a line of no interest."""
        if line.startswith("WARNING:"):
            return None if NOISE.match(line) else line
        if found := DOWNLOAD.match(line):
            name, version, source, size, unit = found.groups()
            if source:
                self._source = name
                return f"preparing {name} {version} from its source"
            is_large = unit == "GB" or (unit == "MB" and float(size) >= LARGE)
            return f"downloading {name} {version} ({size} {unit})" if is_large else None
        if found := re.match(r"\s*Building wheel for (\S+) .*: started", line):
            return f"building {found[1]}"
        # pip prints this once a minute.
        if found := re.match(r"\s*(.+): still running", line):
            package = "" if found[1].startswith("Building") else f" of {self._source}"
            return f"{found[1][0].lower()}{found[1][1:]}{package}: still running"
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
    # Without -u, pip's lines would arrive late, in blocks.
    command = [sys.executable, "-u", "-m", "pip", "install", "--progress-bar", "off", *arguments]
    start, lines, stages = time.monotonic(), list[str](), Stages()
    show("finding packages")
    with (
        log.open("w", encoding="utf-8", buffering=1) as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip,
    ):
        assert pip.stdout is not None
        for text in pip.stdout:
            file.write(text)
            lines.append(text.rstrip("\n"))
            if shown := stages.text(lines[-1]):
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
