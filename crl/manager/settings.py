"""Settings of the experience manager, and the prompts for the extractor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

from crl.manager.credit import CreditSettings
from crl.manager.distillation.distil import DistilSettings, PromptWriter
from crl.manager.distillation.merge import MergePromptWriter
from crl.manager.distillation.refine import RefinePromptWriter
from crl.manager.records import EvictionOrder
from crl.manager.retrieval.choice import RetrievalSettings
from crl.manager.retrieval.entries import Scope

Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]
"""Progress display for a job. It is called with the number of parts of the job.

Inside the context, the job calls the returned function with the number of parts that it has just
completed.
"""


@contextmanager
def no_progress(total: int) -> Iterator[Callable[[int], object]]:
    """Provide a `Progress` that displays nothing."""
    yield lambda done: None


@dataclass(frozen=True, slots=True)
class Prompts:
    """Writers of the extractor's prompts."""

    distil: PromptWriter
    """Writer of prompts about an episode."""
    merge: MergePromptWriter
    """Writer of prompts about a chunk of the bank."""
    refine: RefinePromptWriter | None = None
    """Writer of prompts for the question of an agent. None: agents do not ask."""


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """Settings of the experience manager."""

    scope: Scope = "task"
    """Tasks that an entry may guide: only its own ("task"), or any ("shared")."""
    queue_size: int | None = None
    """Maximum number of requests that wait or are in progress. None: no limit."""
    overflow: Literal["wait", "refuse"] = "wait"
    """Behaviour of `submit` if the queue is full: wait for space, or refuse the request."""
    concurrency: int = 32
    """Maximum number of extractor answers about episodes and merges in progress.

    Agents that ask are not limited by this setting.
    """
    ask_timeout: float | None = None
    """Seconds after which an agent that asks receives the retrieved experience unchanged.

    None: no limit.
    """
    answer_timeout: float | None = None
    """Maximum seconds for one answer about an episode or a merge. None: no limit."""
    attempts: int = 5
    """Failed attempts at a distillation after which its request is dead."""
    backoff: float = 1.0
    """Seconds of pause after the first failed attempt. Each further failure doubles the pause."""
    credit_window_steps: int = 8
    """Actor steps for which a superseded experience may still earn credit after its last retrieval.

    The value must be at least the maximum staleness of an episode.
    """
    max_per_goal: int | None = None
    """Maximum number of active entries with the same task and goal. None: no limit."""
    max_entries: int | None = None
    """Maximum number of active entries in the bank. None: no limit."""
    evict: EvictionOrder = "fifo"
    """Eviction policy for entries over `max_per_goal` or `max_entries`."""
    evict_votes: int | None = None
    """Net down votes at which an entry is evicted. None: the extractor is not asked for votes."""
    duplicate_similarity: float | None = None
    """Cosine similarity of the texts at or above which an add is dropped as a duplicate.

    An add is compared with active entries and with earlier adds of the same answer. None: no add is
    dropped.
    """
    merge_tokens: int = 4096
    """Maximum tokens of the entries in one chunk of a merge. A larger single entry is allowed."""
    threaded: bool = False
    """Rendering of prompts and parsing of answers on a thread, so the event loop is not blocked.

    If False, all requests of `drain` reach the engine at the same moment.
    """
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)
    distil: DistilSettings = field(default_factory=DistilSettings)
    credit: CreditSettings = field(default_factory=CreditSettings)

    def __post_init__(self) -> None:
        counts = [self.concurrency, self.attempts, self.merge_tokens]
        bounds = (self.queue_size, self.max_per_goal, self.max_entries, self.evict_votes)
        counts += [n for n in bounds if n is not None]
        seconds = [n for n in (self.answer_timeout, self.ask_timeout) if n is not None]
        if (
            min(counts) < 1
            or self.credit_window_steps < 0
            or min(seconds, default=1) <= 0
            or self.backoff < 0
        ):
            raise ValueError(
                "invalid manager settings: counts must be at least 1, time limits above 0, and "
                f"backoff and credit_window_steps at least 0: {self}"
            )
