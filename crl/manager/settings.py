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
from crl.manager.records import Evict
from crl.manager.refine import RefinePromptWriter
from crl.manager.retrieval import RetrievalSettings

Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]
"""Shows a piece of work of so many parts; inside, it is told of each few that are done."""


@contextmanager
def unseen(total: int) -> Iterator[Callable[[int], object]]:
    """`Progress` that nobody looks at."""
    yield lambda done: None


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the extractor is asked: about an episode, about a chunk of the bank, and by an agent (None: agents do not ask)."""

    distil: PromptWriter
    merge: MergePromptWriter
    refine: RefinePromptWriter | None = None


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """scope: entries guide their own task alone, or any. queue_size: requests that may wait or be in work, None = any number;
    overflow: what `submit` does at that bound. concurrency: answers of the extractor to episodes and merges that are waited for at the
    same time; agents that ask do not wait for these. ask_deadline: seconds after which such an agent gets what was found as it is, None =
    it waits for any time. lease:
    seconds that one may take, None = any; attempts: at a distillation until it is dead, with a pause of `backoff` seconds after the
    first one that failed and twice as long after each further one. keep_steps: actor steps for which a superseded experience may still
    earn credit after it was last returned; at least the staleness of an episode. cap, size: active entries of one goal and of the whole
    bank, None = any number; evict: which go then. vote_out: net down votes at which an entry goes, None = no votes are asked for.
    duplicate: cosine of the texts from which on an add says what an active entry says already, None = none is left out. merge_tokens:
    tokens of the entries in one chunk of a merge. threaded: prompts of the extractor are written and its answers read on a thread, so
    that the event loop goes on; otherwise what `drain` asks reaches the engine at the same moment.
    """

    scope: Scope = "task"
    queue_size: int | None = None
    overflow: Literal["wait", "refuse"] = "wait"
    concurrency: int = 32
    ask_deadline: float | None = None
    lease: float | None = None
    attempts: int = 5
    backoff: float = 1.0
    keep_steps: int = 8
    cap: int | None = None
    size: int | None = None
    evict: Evict = "fifo"
    vote_out: int | None = None
    duplicate: float | None = None
    merge_tokens: int = 4096
    threaded: bool = False
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)
    distil: DistilSettings = field(default_factory=DistilSettings)
    credit: CreditSettings = field(default_factory=CreditSettings)

    def __post_init__(self) -> None:
        counts = [self.concurrency, self.attempts, self.merge_tokens]
        counts += [
            n for n in (self.queue_size, self.cap, self.size, self.vote_out) if n is not None
        ]
        seconds = [n for n in (self.lease, self.ask_deadline) if n is not None]
        if (
            min(counts) < 1
            or self.keep_steps < 0
            or min(seconds, default=1) <= 0
            or self.backoff < 0
        ):
            raise ValueError(f"bad manager settings: {self}")
