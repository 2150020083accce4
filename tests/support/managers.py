"""Helpers for the manager's tests.

They provide requests, scripted extractors that answer like language models, and an embedder of
words.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crl.engines.scripted import ScriptedEngine
from crl.manager import (
    Distilled,
    DistilRequest,
    EpisodeId,
    ExperienceManager,
    ManagerSettings,
    Prompts,
)
from crl.manager.records import Entry, Generation, Write
from crl.protocols import Engine, Hit, Monitor, SearchRequest
from crl.types import Completion, Experience, ExperienceUse, Sampling, Segment, Task
from support.doors import TASK, renderer
from support.paths import GOLDEN

GOAL = "Find the exit of the azure cellar."


class WordEmbedder:
    """Embedder that maps a bag of words to 64 hashed directions, with unit norm.

    Texts with the same words have the same vector.
    """

    name, dim = "words", 64

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.calls.append(list(texts))
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                vector[zlib.crc32(word.encode()) % self.dim] += 1
            vector /= np.linalg.norm(vector) or 1
        return vectors


def task(name: str = "room", goal: str = GOAL) -> Task:
    return Task(name, 7, "train", goal, {"lgen": 3})


def hit(
    uid: str, version: int = 1, text: str = "Go west.", generation: str = "", goal: str = ""
) -> Hit:
    return Hit(text, ExperienceUse(uid, version, generation or uid.split("#")[0], "start"), goal)


def request(
    step: int = 0,
    group: int = 0,
    member: int = 0,
    *,
    note: str = "",
    of: Task | None = None,
    **changes: Any,
) -> DistilRequest:
    """Return a distillation request.

    `note` is the last word of the episode. The scripted extractor chooses its answer by this word.
    """
    segments = (
        Segment("user", "at 2 3", "env"),
        Segment("assistant", f"east {note}".strip(), "policy"),
    )
    fields = {"success": True, "truncated": False, "shown": (), **changes}
    return DistilRequest(EpisodeId("run", step, group, member), of or task(), segments, **fields)


def distilled(
    *texts: str, returned: int = 0, informative: bool = False, task_name: str = "doors"
) -> Distilled:
    """Return a distilled episode of the game of doors, with one new experience per text."""
    distil_request = request(of=replace(TASK, name=task_name), note="*" if informative else "")
    generation = Generation(distil_request.id, 0, (1,), Completion((2,), (-1.0,), (0,), "stop"), 0)
    writes = tuple(
        Write(op, text, (0, 1), np.zeros(2, np.float32)) for op, text in enumerate(texts)
    )
    return Distilled(distil_request, generation, writes, returned, {})


def write_prompt(request: DistilRequest) -> list[Segment]:
    """Return a prompt with the parts of a real one: goal, outcome, shown experiences, trace."""
    shown = "\n".join(f"{i}. {hit.text}" for i, hit in enumerate(request.shown, start=1))
    trace = "\n".join(segment.text for segment in request.segments)
    outcome = "success" if request.success else "failure"
    return [
        Segment("user", f"{request.id}\n{request.task.goal}\n{outcome}\n{shown}\n{trace}", "task")
    ]


def write_merge(entries: Sequence[Entry]) -> list[Segment]:
    return [
        Segment(
            "user",
            "merge\n" + "\n".join(f"{i}. {entry.text}" for i, entry in enumerate(entries, start=1)),
            "task",
        )
    ]


PROMPTS = Prompts(write_prompt, write_merge)


def answering(answer: Callable[[str], str]) -> ScriptedEngine:
    return ScriptedEngine(renderer(), answer)


class NoteEngine(ScriptedEngine):
    """Engine that answers an episode by its last word, and a merge with `merging`.

    The log-prob of each token is −1 − the version of the engine.
    """

    def __init__(self, answers: Mapping[str, str], version: int = 0) -> None:
        super().__init__(renderer(), self._reply)
        self.version, self.answers, self.merging = version, answers, "[]"

    def _reply(self, prompt: str) -> str:
        return (
            self.merging
            if "user\nmerge\n" in prompt
            else self.answers[prompt.split("<|im_end|>")[-2].split()[-1]]
        )

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        sampled = await super().generate(ids, sampling, **options)
        return replace(sampled, logprobs=(-1.0 - self.version,) * len(sampled.ids))


def add(*texts: str) -> str:
    return json.dumps([{"op": "add", "text": text} for text in texts])


def update(text: str, target: int = 1) -> str:
    return json.dumps([{"op": "update", "target": target, "text": text}])


RETURN = '[{"op": "return"}]'


async def open_manager(
    path: Path, engine: Engine, settings: ManagerSettings | None = None, **parts: Any
) -> ExperienceManager:
    embedder = parts.pop("embedder", None) or WordEmbedder()
    return await ExperienceManager.open(
        path,
        engine,
        embedder,
        renderer(),
        parts.pop("prompts", PROMPTS),
        settings or ManagerSettings(),
        seed=0,
        **parts,
    )


def search(
    query: str = GOAL, *, name: str = "room", group: int = 0, member: int = 0
) -> SearchRequest:
    return SearchRequest(query, task(name), group, member)


class RecordingMonitor(Monitor):
    """`Monitor` that stores the metrics and the experiences that it receives."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, dict[str, Any]]] = []
        self.newest: list[list[Experience]] = []

    def log(self, step: int, kind: str, metrics: Mapping[str, float | int | str | None]) -> None:
        self.lines.append((step, kind, dict(metrics)))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [metrics for _, known, metrics in self.lines if known == kind]

    def experiences(self, experiences: Sequence[Experience]) -> None:
        self.newest.append(list(experiences))


def bank_of_version_1(path: Path) -> Path:
    """Write a bank of format version 1, as an earlier crl left it. Return its path.

    It has four entries, two open requests and a dead request.
    """
    return _golden_bank(path, 1)


def bank_of_version_2(path: Path) -> Path:
    """Write a bank of format version 2, as an earlier crl left it. Return its path.

    It has four entries, an open request, a dead request, and a snapshot (13) after which one unit
    was credited.
    """
    return _golden_bank(path, 2)


def bank_of_version_3(path: Path) -> Path:
    """Write a bank of format version 3, as an earlier crl left it. Return its path.

    It is the bank of version 2 some steps later, with a vote, and a snapshot (22) after which an
    entry was credited.
    """
    return _golden_bank(path, 3)


def bank_of_version_4(path: Path) -> Path:
    """Write a bank of format version 4, as an earlier crl left it. Return its path.

    It is the bank of version 3 with a lift, and a snapshot (25) after which an entry was trained.
    """
    return _golden_bank(path, 4)


def bank_of_version_5(path: Path) -> Path:
    """Write a bank of format version 5, as an earlier crl left it. Return its path.

    It is the bank of version 4 after its upgrade.
    """
    return _golden_bank(path, 5)


def bank_of_version_6(path: Path) -> Path:
    """Write a bank of format version 6, as an earlier crl left it. Return its path.

    It is the bank of version 5 after its upgrade.
    """
    return _golden_bank(path, 6)


def _golden_bank(path: Path, version: int) -> Path:
    with closing(sqlite3.connect(path)) as db:
        db.executescript((GOLDEN / f"bank_v{version}.sql").read_text("utf-8"))
    return path


def dump(path: Path) -> list[str]:
    """Return the whole content of a bank as SQL statements."""
    with closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def logged(path: Path, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (origin, data) of every operation of this kind, in order."""
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT origin, data FROM log WHERE kind = ? ORDER BY seq", (kind,))
        return [(origin, json.loads(data)) for origin, data in rows]
