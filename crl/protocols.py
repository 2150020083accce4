"""The contracts between the rooms. Parts are built from these and never see the loop that wires them.

A *method* (`crl/methods`) fills the extension points of the second half; plain RL is an all-free `RolloutPlanner`, not an `if`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from crl.types import (
    NO_RECORD,
    Completion,
    Experience,
    ExperienceUse,
    Minibatch,
    Observation,
    RolloutPlan,
    Sampling,
    Segment,
    StepResult,
    StepStats,
    Task,
    TokenTrace,
    TrackRecord,
    Trajectory,
)

if TYPE_CHECKING:
    import torch

State = dict[str, Any]
"""JSON-serialisable state of one part; what `state()` returns `load_state()` takes back."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Names, dtypes and shapes of published tensors, in sending order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class PublishHandle(Protocol):
    """Weights on their way to an engine, which takes them by `update_weights`."""

    @property
    def version(self) -> int: ...
    @property
    def checksum(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def manifest(self) -> WeightManifest: ...

    def discard(self) -> None:
        """Gives up what was kept for receivers, once they have it or never will."""
        ...


class Engine(Protocol):
    """Generates with one model at one policy version."""

    @property
    def version(self) -> int: ...
    @property
    def busy(self) -> float:
        """Seconds of compute so far."""
        ...

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None, rng: int | None = None) -> Completion:
        """Samples one completion of `ids`. `rng` seeds this request's private generator; `session` names its conversation.

        Raises `RolloutError` when this request cannot be served, `TransientError` when it may be another time, `EngineError` when
        the engine is gone.
        """
        ...

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """log p(ids[i] | ids[:i]) at temperature 1 for i ≥ 1: one value fewer than ids."""
        ...

    async def update_weights(self, handle: PublishHandle) -> None:
        """Swaps weights between decode steps, when no request is decoding, however long those in flight take to end; from then on a
        transfer between processes has a deadline. Raises `EngineError` where it overruns that or another checksum arrives, and the
        sender's `LearnerError`.
        """
        ...

    async def health(self) -> None:
        """Raises `EngineError` when the engine can no longer serve."""
        ...

    async def aclose(self) -> None: ...


class Learner(Protocol):
    """Owns one model's trained weights and its optimizer. One `step` is one batch: one update per minibatch."""

    async def step(self, minibatches: Sequence[Minibatch]) -> StepStats: ...
    async def publish(self) -> PublishHandle: ...
    async def save(self, directory: Path) -> None:
        """Writes the model in Hugging Face format, and the optimizer's state beside it."""
        ...

    async def load(self, directory: Path) -> None: ...
    async def watch(self) -> None:
        """Never returns. Raises `LearnerError` when the learner is lost, also while nothing is asked of it."""
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...
    async def aclose(self) -> None: ...


class Environment(Protocol):
    """One text game at a time. Errors become `RolloutError`s of kind env at the host's boundary."""

    async def reset(self, task: Task) -> Observation: ...
    async def step(self, text: str) -> StepResult: ...
    async def aclose(self) -> None: ...


class EnvironmentPool(Protocol):
    """Lends environments to episodes; a lent one is private until it is given back."""

    async def acquire(self, task: Task) -> Environment: ...
    async def release(self, environment: Environment) -> None: ...
    async def aclose(self) -> None: ...


class Embedder(Protocol):
    name: str
    dim: int

    async def embed(self, texts: Sequence[str]) -> Any:
        """float32 [len(texts), dim], unit norm."""
        ...


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved experience: its text, the use that the episode must record, and the goal of the episode that taught it."""

    text: str
    use: ExperienceUse
    goal: str = ""
    record: TrackRecord = NO_RECORD
    """Record of the entry at the time of the search."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """asked: which question of its episode it is, from 1; 0 = the search at the start."""

    query: str
    task: Task
    group: int
    member: int
    asked: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """What an agent asks in the middle of an episode (search_and_ask, CRL §3.2.2).

    name: the episode's address and the question's number, unique within the run; query: in the agent's words, may be empty; segments:
    the episode so far, the question included.
    """

    name: str
    task: Task
    query: str
    segments: tuple[Segment, ...]


class Retriever(Protocol):
    async def search(self, requests: Sequence[SearchRequest]) -> Sequence[Hit | None]:
        """At the start of episodes, or for a question within one: the best experience for each, or None."""
        ...

    async def refine(self, question: Question, hit: Hit) -> Hit:
        """What was found, fitted to the situation of the agent that asks; `hit` itself where it is not."""
        ...


# ── the extension points that a method assembles ────────────────────────────────────────────────────────────────────


class TaskSource(Protocol):
    """Where the next groups come from. `observe` sees train trajectories only."""

    def draw(self, n: int) -> Sequence[Task]: ...
    def observe(self, trajectories: Sequence[Trajectory]) -> None: ...
    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


class RolloutPlanner(Protocol):
    def plan(self, task: Task, members: int, step: int) -> Sequence[RolloutPlan]:
        """One plan per member of a group of `step`: its condition, and with it what it may see."""
        ...


@dataclass(frozen=True, slots=True)
class Response:
    """A parsed completion: the text that goes to the environment, and whatever else was found in it. query: what the agent asks, where
    it calls search_and_ask; the action is then what the text is without such a tool."""

    action: str
    extras: Mapping[str, str]
    query: str | None = None


class Distiller(Protocol):
    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Which of a batch's finished trajectories are distilled into experience."""
        ...


class ContextProvider(Protocol):
    """Writes the prompts of an episode and reads its completions."""

    def query_observes(self, task: Task) -> bool:
        """Whether the query depends on the first observation."""
        ...

    def query(self, task: Task, observation: Observation | None) -> str:
        """What an experience for this episode is searched by. observation: the first one; may be None where the query does not observe."""
        ...

    def opening(self, task: Task, observation: Observation, experience: Hit | None, *, asks: int = 0) -> Sequence[Segment]:
        """asks: questions that the agent may ask; with 0 it is told of no tool."""
        ...

    def following(self, result: StepResult) -> Sequence[Segment]: ...
    def parse(self, task: Task, completion: str) -> Response: ...

    def asked(self, task: Task, query: str) -> str:
        """What an experience for a question is searched by."""
        ...

    def reply(self, task: Task, found: Hit | None) -> Sequence[Segment]:
        """What the agent is told that asked."""
        ...


class RewardShaper(Protocol):
    def shape(self, trajectory: Trajectory) -> Mapping[str, float]:
        """Named reward channels, with the whole trajectory in view; their sum is the training reward."""
        ...


class AdvantageTerm(Protocol):
    def __call__(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """One advantage per trajectory [n]; a method's terms are summed."""
        ...


class TrainView(Protocol):
    def __call__(self, trajectory: Trajectory) -> Sequence[TokenTrace]:
        """The samples that the trainer sees of a trajectory; empty: it is not trained."""
        ...


class Loss(Protocol):
    def __call__(
        self,
        logp: torch.Tensor,
        old_logp: torch.Tensor,
        advantage: torch.Tensor,
        mask: torch.Tensor,
        *,
        weights: torch.Tensor,
        total_tokens: int,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of one micro-batch: summed over the micro-batches of a minibatch it is the minibatch's loss.

        logp, old_logp, mask: [b, t]; advantage: [b] or [b, t]; weights: [b] of the whole minibatch's; total_tokens: its
        trained tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Role:
    """One trained model of a method: how its samples come about, and the loss. A method without roles trains nothing.

    distillation: weight of the next-token loss on each trajectory's answers after the prompts of an
    unguided episode; 0: no such sample. None: of no trajectory.
    """

    name: str
    terms: tuple[AdvantageTerm, ...]
    view: TrainView
    loss: Loss
    distillation: AdvantageTerm | None = None


@dataclass(frozen=True, slots=True)
class ExtractorRole:
    """The extractor as a trained model: `batch` credit units make a step. Its samples and their advantages (CRL eq. 3, 7) are
    the ExperienceManager's."""

    loss: Loss
    batch: int


@dataclass(frozen=True, slots=True)
class Method:
    """What a method is made of. `crl/methods/NAME.py` builds it from the run's config.

    distiller: None = a run without experience; no extractor is loaded and there is no bank. extractor: None = it is not trained.
    """

    planner: RolloutPlanner
    context: ContextProvider
    shaper: RewardShaper
    actor: Role
    distiller: Distiller | None = None
    extractor: ExtractorRole | None = None


class Monitor(Protocol):
    """Where figures and trajectories go. Every line is flushed when the call returns."""

    def log(self, step: int, kind: str, figures: Mapping[str, float | int | str | None]) -> None: ...
    def trajectories(self, trajectories: Sequence[Trajectory]) -> None: ...
    def experiences(self, experiences: Sequence[Experience]) -> None:
        """Entries of the bank with their counters, those that guided an episode last first; called once a step."""
        ...

    def note(self, text: str) -> None:
        """A line for people: the log and the screen."""
        ...

    def close(self) -> None: ...
