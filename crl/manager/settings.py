"""Settings of the experience manager, and the prompts for the extractor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from crl.config.schema import AskSection, BankSection, ExtractorSection, RetrievalSection
from crl.manager.distillation.distil import NoteReader, PromptWriter
from crl.manager.distillation.merge import MergePromptWriter
from crl.manager.distillation.refine import RefinePromptWriter
from crl.manager.keys import StateKey
from crl.manager.records import ApplyRules

Progress = Callable[[int, str], AbstractContextManager[Callable[[int], object]]]
"""Progress display for the embedding of a bank. It is called with the number of experiences, and
with the embedders before and now, or "" for a bank without vectors.

Inside the context, the returned function is called with the number of experiences that have just
been embedded.
"""


@contextmanager
def no_progress(total: int, change: str) -> Iterator[Callable[[int], object]]:
    """Provide a `Progress` that displays nothing."""
    yield lambda done: None


@dataclass(frozen=True, slots=True)
class Prompts:
    """Writers of the prompts for the model that writes the bank, and the form of its answers."""

    distil: PromptWriter
    """Writer of prompts about an episode."""
    merge: MergePromptWriter
    """Writer of prompts about a chunk of the bank."""
    refine: RefinePromptWriter | None = None
    """Writer of prompts for the question of an agent. None: agents do not ask."""
    notes: bool = False
    """True if the answer about an episode is the text of one experience, not operations."""
    state: StateKey | None = None
    """State of its episode by which an experience is found (EMPO² §4.2); None: by its own text."""
    read_note: NoteReader | None = None
    """Reader of a note in an answer; None: the whole answer is the text."""
    guidance: bool = True
    """False if the prompt about an episode has none of the experiences that guided it."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings of the queue of episodes that wait for distillation."""

    bounded: bool = False
    """True if `bank.queue_size` limits the queue.

    Requests of a full queue wait for the background task `ExperienceManager.run`. Without it, they
    would wait forever.
    """
    attempts: int = 5
    """Failed attempts at a distillation after which its request is dead."""
    backoff: float = 1.0
    """Seconds of pause after the first failed attempt. Each further failure doubles the pause."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.backoff < 0:
            raise ValueError(
                f"invalid settings: attempts must be at least 1 and backoff at least 0: {self}"
            )


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """Settings of the experience manager: sections of the configuration, and facts about the run.

    The properties combine several settings.
    """

    bank: BankSection = field(default_factory=BankSection)
    retrieval: RetrievalSection = field(default_factory=RetrievalSection)
    extractor: ExtractorSection = field(default_factory=ExtractorSection)
    ask: AskSection = field(default_factory=AskSection)
    queue: QueueSettings = QueueSettings()
    credit_window_steps: int = 8
    """Actor steps for which a superseded experience may still earn credit after its last retrieval.

    The value must be at least the maximum staleness of an episode.
    """
    centred: bool = True
    """True if the mean reward of a batch is subtracted from the rewards.

    Rewards that are relative to the success of the same group without experience need no centring.
    """
    deterministic: bool = False
    """True if results must not depend on timing.

    All requests of `drain` then reach the engine at the same moment. They have no timeout. Large
    banks are searched exactly.
    """

    def __post_init__(self) -> None:
        if self.credit_window_steps < 0:
            raise ValueError(f"credit_window_steps must not be negative: {self}")

    @property
    def concurrency(self) -> int:
        """Maximum number of extractor answers about episodes and merges in progress.

        A deterministic run has no limit. With a limit, the next request would depend on the answer
        that came first. Agents that ask are never limited.
        """
        return sys.maxsize if self.deterministic else self.extractor.concurrency

    @property
    def answer_timeout(self) -> float | None:
        """Maximum seconds for one answer about an episode or a merge. None: no limit."""
        return None if self.deterministic else self.extractor.answer_timeout

    @property
    def ask_timeout(self) -> float | None:
        """Seconds after which an agent that asks receives the retrieved experience unchanged.

        None: no limit.
        """
        return None if self.deterministic else self.ask.timeout

    @property
    def queue_size(self) -> int | None:
        """Maximum number of requests that wait or are in progress. None: no limit."""
        return self.bank.queue_size if self.queue.bounded else None

    @property
    def asks_for_votes(self) -> bool:
        """True if the extractor is asked for votes on experiences."""
        return self.bank.evict_votes is not None

    @property
    def goals_in_keys(self) -> bool:
        """True if the goal is a part of an entry's key."""
        return self.bank.key_text_weight is not None

    @property
    def rules(self) -> ApplyRules:
        """Rules for applying answers of the extractor to the bank.

        A frozen bank has no bounds. Without training, malformed answers are not stored for a
        training step that never happens.
        """
        bank, trained = self.bank, self.extractor.train and not self.bank.frozen
        return ApplyRules(
            malformed_reward=self.extractor.malformed_reward if trained else None,
            max_per_goal=None if bank.frozen else bank.max_per_goal,
            max_entries=None if bank.frozen else bank.max_entries,
            evict=bank.evict,
            evict_votes=bank.evict_votes,
            scope=bank.scope,
        )
