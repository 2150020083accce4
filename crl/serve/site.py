"""Runs below a directory, and the rendering of pages about them."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, PackageLoader
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from crl.errors import ConfigError
from crl.monitor.run_dir import RunDir
from crl.report.document import environment
from crl.serve.addresses import address
from crl.serve.cache import Cache
from crl.serve.meaning import MeaningSearch
from crl.wording import duration

RUN_FILES = ("config.json", "bank.sqlite")
"""Files of which every run has at least one."""

FILES = frozenset(
    {"config.json", "bank.sqlite", "bank.sqlite-wal", "bank.sqlite-shm", "metrics.jsonl", "log.txt",
     "progress.json", "episodes", ".lock"}
)  # fmt: skip
"""Files of a run that the server reads."""

MAX_RUNS = 1000
"""Maximum number of runs of a site."""

MAX_FOLDERS = 10_000
"""Maximum number of directories in which runs are looked for."""

MAX_LEVELS = 6
"""Maximum depth below the root at which runs are looked for."""

MAX_VALUES = 2000
"""Maximum number of small values that are kept, such as parts of pages."""

MAX_RECORDS = 24
"""Maximum number of runs and banks whose content is kept."""

RESCAN_S = 1.0
"""Seconds for which the list of runs is kept."""


@dataclass(frozen=True)
class FoundRun:
    """Run below the root of a site."""

    id: str
    """Name in addresses: letters, digits, '.', '_' and '-'."""
    name: str
    """Path relative to the root; the name of the root itself."""
    dir: RunDir
    foreign: str = ""
    """File of the run that is a link out of the root; empty = none."""

    @property
    def is_bank(self) -> bool:
        """True for a bank without a run: there is no config.json."""
        return not os.path.isfile(self.dir.config)


class Site:
    """Directory whose runs are shown.

    `root`: a run directory, or a directory with runs below it. `write`: allow pages that change a
    bank. Raise `ConfigError` if `root` is not a directory.
    """

    def __init__(self, root: Path, *, write: bool = False) -> None:
        if not root.is_dir():
            reason = "is not a directory"
            raise ConfigError("path", str(root), reason, "Give a run, or a directory with runs")
        self.root = root.resolve()
        self.write = write
        self.csrf = secrets.token_urlsafe(32)
        """Token of this process in forms that change something."""
        self.cache = Cache(MAX_VALUES)
        """Small values."""
        self.records = Cache(MAX_RECORDS)
        """Runs with all their metrics, and experiences of banks."""
        self.environment = environment()
        self.environment.filters["duration"] = duration
        own = PackageLoader("crl.serve")
        self.environment.loader = ChoiceLoader([own, PackageLoader("crl.report")])
        self.environment.globals["address"] = address
        self.meaning = MeaningSearch()
        """Search of banks by meaning; nothing is loaded before the first search."""
        self._found: Mapping[str, FoundRun] = {}
        self._scanned = -RESCAN_S
        self._lock = threading.Lock()

    def runs(self) -> list[FoundRun]:
        """Return the runs of the site, sorted by name."""
        return list(self._runs().values())

    def run(self, request: Request) -> RunDir:
        """Return the run that the path of a request names. Raise `HTTPException` 404 otherwise."""
        return self.found(request.path_params["run"]).dir

    def found(self, id: str) -> FoundRun:
        """Return the run with an id.

        Raise `HTTPException` 404 if there is none, and 403 if its files are not read.
        """
        run = self.listed(id)
        if refusal := self.refusal(run):
            raise HTTPException(403, refusal)
        return run

    def listed(self, id: str) -> FoundRun:
        """Return the run with an id, also if its files are not read.

        Raise `HTTPException` 404 if there is none.
        """
        run = self._runs().get(id)
        if run is None:
            raise HTTPException(404, "There is no such run.")
        return run

    def refusal(self, run: FoundRun) -> str:
        """Return the reason why the files of a run are not read; empty if they are."""
        folder = run.dir.episodes
        foreign = run.foreign or self.cache.get(
            ("links", folder), [folder], lambda: foreign_link(folder, self.root)
        )
        if not foreign:
            return ""
        return f"This run is not shown: {foreign} is a link that leads out of {self.root}."

    def render(self, request: Request, template: str, **context: Any) -> HTMLResponse:
        """Return a page. In pages of a run, the template gets it as `run`, a `FoundRun`."""
        if "run" not in context:
            id = request.path_params.get("run")
            context["run"] = None if id is None else self.found(id)
        text = self.fragment(template, path=request.scope["path"], site=self, **context)
        return HTMLResponse(text.encode("utf-8", "backslashreplace"))

    def fragment(self, template: str, **context: Any) -> Markup:
        """Return a part of a page."""
        return Markup(self.environment.get_template(template).render(**context))

    def _runs(self) -> Mapping[str, FoundRun]:
        with self._lock:
            if time.monotonic() - self._scanned >= RESCAN_S:
                self._found = _by_id(self.root, find_runs(self.root))
                self._scanned = time.monotonic()
            return self._found


def find_runs(root: Path) -> list[Path]:
    """Return the run directories at and below `root`, sorted; at most `MAX_RUNS`.

    Nothing is looked for inside a run or a hidden directory. Links to directories are not followed.
    """
    found = []
    for number, folder in enumerate(_folders(root, MAX_LEVELS)):
        if number >= MAX_FOLDERS or len(found) >= MAX_RUNS:
            break
        if _is_run(folder):
            found.append(folder)
    return found


def _folders(folder: Path, levels: int) -> Iterator[Path]:
    yield folder
    if levels and not _is_run(folder):
        try:
            with os.scandir(folder) as entries:
                below = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:  # it was removed meanwhile, or may not be read
            return
        for name in sorted(below):
            if not name.startswith("."):
                yield from _folders(folder / name, levels - 1)


def _is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in RUN_FILES)  # no error without permission


def foreign_link(folder: Path, root: Path, names: Collection[str] | None = None) -> str:
    """Return the name of a link in `folder` that leads out of `root`; empty if there is none.

    `names`: names of the files that matter; None = all.
    """
    try:
        with os.scandir(folder) as entries:
            links = [
                entry.name for entry in entries
                if entry.is_symlink() and (names is None or entry.name in names)
            ]  # fmt: skip
    except OSError:  # it does not exist, or may not be read
        return ""
    outside = (name for name in links if not (folder / name).resolve().is_relative_to(root))
    return next(outside, "")


def _by_id(root: Path, paths: Sequence[Path]) -> dict[str, FoundRun]:
    runs: dict[str, FoundRun] = {}
    for path in paths:
        name = str(path.relative_to(root)) if path != root else root.name or "run"
        id = run_id(name)
        while id in runs:  # another run has this id as its name
            id += "-"
        runs[id] = FoundRun(id, name, RunDir(path), foreign_link(path, root, FILES))
    return runs


def run_id(name: str) -> str:
    """Return the id of a run in addresses.

    Characters of its relative path outside [A-Za-z0-9._-] become "-". Six digits of a hash then
    keep ids apart.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    if plain == name:
        return name
    return f"{plain}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:6]}"
