"""How the manager is set up, and what it asks the extractor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

from crl.manager.bank import Scope
from crl.manager.credit import CreditSettings
from crl.manager.distil import DistilSettings, PromptWriter
from crl.manager.merge import MergePromptWriter
from crl.manager.retrieval import RetrievalSettings

Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]
"""Shows a piece of work of so many parts; inside, it is told of each few that are done."""


@contextmanager
def unseen(total: int) -> Iterator[Callable[[int], object]]:
    """`Progress` that nobody looks at."""
    yield lambda done: None


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the extractor is asked: about an episode, and about a chunk of the bank."""

    distil: PromptWriter
    merge: MergePromptWriter


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """scope: entries guide their own task alone, or any. queue_size: requests that may wait or be in work, None = any number;
    overflow: what `submit` does at that bound. concurrency: answers of the extractor that are waited for at the same time. lease:
    seconds that one may take, None = any; attempts: at a distillation until it is dead, with a pause of `backoff` seconds after the
    first one that failed and twice as long after each further one. keep_steps: actor steps for which a superseded experience may still
    earn credit after it was last returned; at least the staleness of an episode. cap: active entries of one goal, None = any number;
    the oldest goes, or with `retrieval.choice = "credit"` the one of the lowest credit. merge_tokens: tokens of the entries in one
    chunk of a merge.
    """

    scope: Scope = "task"
    queue_size: int | None = None
    overflow: Literal["wait", "refuse"] = "wait"
    concurrency: int = 32
    lease: float | None = None
    attempts: int = 5
    backoff: float = 1.0
    keep_steps: int = 8
    cap: int | None = None
    merge_tokens: int = 4096
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)
    distil: DistilSettings = field(default_factory=DistilSettings)
    credit: CreditSettings = field(default_factory=CreditSettings)

    def __post_init__(self) -> None:
        counts = [n for n in (self.concurrency, self.attempts, self.queue_size, self.cap, self.merge_tokens) if n is not None]
        if min(counts) < 1 or self.keep_steps < 0 or (self.lease is not None and self.lease <= 0) or self.backoff < 0:
            raise ValueError(f"bad manager settings: {self}")
