"""Interfaces between packages.

Components receive objects with these interfaces. They never see the loop that wires them.

The second half defines the extension points, which a *method* (`crl/methods`) implements. Plain RL
is a `RolloutPlanner` that makes every member free; it is not a special case in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from crl.types import (
    CURRENT_POLICY,
    NO_RECORD,
    Completion,
    Experience,
    ExperienceUse,
    Minibatch,
    Observation,
    OldPolicy,
    Origin,
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

Metrics = Mapping[str, float | int | str | None]
"""Values of metrics by name; None for an undefined value."""

State = dict[str, Any]
"""JSON-serialisable state of one component. `load_state()` accepts the value of `state()`."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Names, dtypes and shapes of the published tensors, in the order in which they are sent."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class PublishHandle(Protocol):
    """Published weights of one policy version. An engine loads them in `update_weights`."""

    @property
    def version(self) -> int: ...
    @property
    def checksum(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def manifest(self) -> WeightManifest: ...

    def discard(self) -> None:
        """Free the resources that were held for receivers.

        Called when the receivers have loaded the weights or failed to load them.
        """
        ...


class Engine(Protocol):
    """Inference engine of one model at one policy version."""

    @property
    def version(self) -> int: ...
    @property
    def busy_s(self) -> float:
        """Seconds of compute so far."""
        ...

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        """Sample one completion of the prompt `ids`.

        `session` names the request's conversation. `rng` seeds the private random generator of the
        request. With truncated sampling, the completion has the kept set of every token.
        With a JSON schema, a completion that ends with a stop token matches the schema.

        Raise `RolloutError` if the request cannot be served, `TransientError` if a retry may
        succeed, and `EngineError` if the engine has failed.
        """
        ...

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Return log p(ids[i] | ids[:i]) at temperature 1 for i ≥ 1: one value fewer than `ids`."""
        ...

    async def update_weights(self, handle: PublishHandle) -> None:
        """Swap the weights when no request is decoding.

        The swap waits for the requests in flight without a time limit. After that, a transfer
        between processes has a timeout. Raise `EngineError` if the transfer exceeds the timeout or
        the checksum differs. A `LearnerError` of the sender is passed on.
        """
        ...

    async def health(self) -> None:
        """Raise `EngineError` if the engine can no longer serve requests."""
        ...

    def details(self) -> list[str]:
        """Return lines on unfinished work, for the report of a stall."""
        ...

    async def aclose(self) -> None: ...


class Learner(Protocol):
    """Owner of the trained weights of one model and of its optimizer.

    One `step` processes one batch: one optimizer update per minibatch.
    """

    async def step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        """Make one optimizer update per minibatch. Raise `LearnerError` if the learner fails."""
        ...

    async def publish(self) -> PublishHandle:
        """Return the current weights as a new policy version, for `Engine.update_weights`."""
        ...

    async def prepare_save(
        self, directory: Path, *, optimizer: bool = True
    ) -> Callable[[], None]:  # fmt: skip
        """Copy the model and the optimizer as they are now. Return a function that writes them.

        The function writes the model in Hugging Face format and the optimizer state to `directory`.
        It may be called in any thread, also while the next steps are being trained. If `optimizer`
        is false, only the model is copied and written.
        """
        ...

    async def load(self, directory: Path) -> None:
        """Load what `prepare_save` wrote to `directory`."""
        ...

    async def watch(self) -> None:
        """Raise `LearnerError` when the learner fails, even if it is idle; never return."""
        ...

    def details(self) -> list[str]:
        """Return lines on unfinished work, for the report of a stall."""
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...
    async def aclose(self) -> None: ...


class Environment(Protocol):
    """Text game of one episode at a time.

    The host converts errors to `RolloutError`s of kind `env`.
    """

    async def reset(self, task: Task) -> Observation:
        """Start the game of `task`, and return its first observation."""
        ...

    async def step(self, text: str) -> StepResult:
        """Execute an action, and return its result. An invalid action is no error."""
        ...

    async def aclose(self) -> None: ...


class EnvironmentPool(Protocol):
    """Pool of environments for episodes.

    An acquired environment is private to its episode until it is released.
    """

    async def acquire(self, task: Task) -> Environment: ...
    async def release(self, environment: Environment) -> None: ...
    async def aclose(self) -> None: ...


class Embedder(Protocol):
    """Map from texts to vectors, for searches in the bank."""

    name: str
    dim: int
    """Number of elements of a vector."""

    async def embed(self, texts: Sequence[str]) -> Any:
        """Return the embeddings: float32 [len(texts), dim], unit norm."""
        ...


@dataclass(frozen=True, slots=True)
class Hit:
    """Retrieved experience."""

    text: str
    """Text that the agent is shown."""
    use: ExperienceUse
    """Use that the episode must record."""
    goal: str = ""
    """Goal of the episode that the experience was distilled from."""
    record: TrackRecord = NO_RECORD
    """Record of the entry at the time of the search."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Search for one experience on behalf of one episode."""

    query: str
    task: Task
    group: int
    member: int
    question: int = 0
    """Number of the question within its episode, from 1; 0 if the agent has not asked."""
    turn: int = 0
    """Number of the turn before which the search takes place; 0 for the search at the start."""
    shown: tuple[str, ...] = ()
    """Uids of experiences that the episode has been shown.

    They are not returned again, and no others take their places.
    """


@dataclass(frozen=True, slots=True)
class Question:
    """Question of an agent during an episode (search_and_ask, CRL §3.2.2)."""

    name: str
    """Address of the episode and number of the question; unique within the run."""
    task: Task
    query: str
    """Question in the agent's words; may be empty."""
    segments: tuple[Segment, ...]
    """Conversation so far, including the question."""


class Retriever(Protocol):
    """Search for experiences in the bank, on behalf of episodes."""

    async def search(self, requests: Sequence[SearchRequest]) -> Sequence[Hit | None]:
        """Return the best experience for each request, or None where none is found.

        A request belongs to the start of an episode, to a later turn or to a question within an
        episode. Equal requests that follow each other get different experiences, the best first.
        """
        ...

    async def refine(self, question: Question, hit: Hit) -> Hit:
        """Return `hit` rewritten for the situation of the asking agent, or `hit` unchanged."""
        ...


class TaskSource(Protocol):
    """Source of the tasks of the next groups."""

    def draw(self, n: int) -> Sequence[Task]:
        """Return the next `n` tasks, one per group."""
        ...

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Observe finished train trajectories. Evaluation trajectories are never passed."""
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


class TurnSource(TaskSource, Protocol):
    """Task source in which the tasks of a run take turns."""

    def next_name(self) -> str:
        """Return the name of the task whose turn is next."""
        ...

    def skip(self) -> None:
        """End this turn without a draw from the task's stream."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """Note on a failed training episode of this run, as an entry of the bank."""

    uid: str
    """Uid of the entry."""
    address: tuple[int, int]
    """Step and group of the episode."""
    task: str
    """Name of the task."""
    goal: str
    """Goal of the task."""
    text: str
    """Text of the note (`crl.manager.failure_notes`)."""


class FailureLibrary(Protocol):
    """Failures of the training episodes of a run."""

    def new(self) -> Sequence[Failure]:
        """Return the failures that were not passed to `mark_retrieved`, the oldest first."""
        ...

    def mark_retrieved(self, failures: Sequence[Failure]) -> None:
        """Record that tasks were retrieved for these failures."""
        ...

    def modes(self) -> Mapping[str, int]:
        """Return the number of failures in the library by mode."""
        ...

    async def similar(
        self, failure: Failure, groups: Container[tuple[int, int]]
    ) -> Sequence[tuple[Failure, float]]:
        """Return other failures and the cosine of their notes with the failure's query.

        Only failures with an address (step, group) in `groups` count. The most similar is first.
        """
        ...

    async def tokens(self, prompt: Sequence[Segment]) -> int:
        """Return the number of tokens of a prompt for the model that writes the bank."""
        ...

    async def ask(self, name: str, prompt: Sequence[Segment]) -> str:
        """Return an answer of the model that writes the bank. `name` seeds its sampling.

        Raise `RolloutError` if there is no answer.
        """
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


class TaskReplay(TaskSource, Protocol):
    """Task source that also draws earlier training tasks again, because of failures.

    A checkpoint has two parts of its state. `state` is from before the draws of the first step that
    is not completed, since a resumed run draws this step again. `retrieval` has the tasks that were
    retrieved until the checkpoint.
    """

    async def retrieve(self, library: FailureLibrary) -> None:
        """Choose the tasks that the next draws repeat. `draw` may be called meanwhile."""
        ...

    def retrieval(self) -> State:
        """Return the results of the last retrievals."""
        ...

    def load_retrieval(self, state: State) -> None:
        """Load a result of `retrieval`. `load_state` comes first."""
        ...

    def take_metrics(self, library: FailureLibrary) -> Metrics:
        """Return the metrics since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """Line of metrics.jsonl."""

    step: int
    kind: str
    seconds: float | None
    """Seconds since the start of the run; None in a deterministic run."""
    metrics: Metrics


class Monitor:
    """Sink for metrics, notes and records. A subclass overrides the methods that it needs.

    Files are flushed before a call returns. Calls come on the thread of the event loop, so a call
    must not block for long. An exception ends the run if it comes from the run's own files. Other
    monitors are dropped after an exception.
    """

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        """Record metrics by name."""

    def trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        """Record finished trajectories."""

    def experiences(self, experiences: Sequence[Experience]) -> None:
        """Show bank entries with their counters, the most recently retrieved first.

        Called once per step.
        """

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of the `total` parts of a stage are finished.

        A stage is work that takes time, such as an evaluation. The first call begins it, and a call
        with `done` = `total` ends it.
        """

    def note(self, text: str) -> None:
        """Write a line for readers to the log and the screen."""

    def resumed(self, lines: Sequence[LoggedLine], seconds: float) -> None:
        """Show what a run logged before the checkpoint at which it is resumed.

        `seconds`: duration of the run until this checkpoint.
        """

    def close(self) -> None:
        """Release files and threads."""


# ── extension points that a method implements ─────────────────────────────────────────────────────


class RolloutPlanner(Protocol):
    """Choice of the members of a group that the bank guides."""

    def plan(self, task: Task, members: int, step: int) -> Sequence[RolloutPlan]:
        """Return one plan for each of the `members` of a group of `step`."""
        ...


@dataclass(frozen=True, slots=True)
class Response:
    """Parsed completion."""

    action: str
    """Text for the environment, parsed as if the tool did not exist even if `query` is set."""
    query: str | None = None
    """Question of a search_and_ask call; None if the agent does not ask."""


class DistillationFilter(Protocol):
    """Choice of the episodes that are distilled."""

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Return the finished trajectories of a batch that are distilled into experiences."""
        ...


class ContextProvider(Protocol):
    """Writer of an episode's prompts and parser of its completions."""

    def query_needs_observation(self, task: Task) -> bool:
        """Return whether the retrieval query depends on the first observation."""
        ...

    def query(self, task: Task, observation: Observation | None) -> str:
        """Return the retrieval query of an episode.

        `observation` is the first observation. It may be None if `query_needs_observation` is
        False.
        """
        ...

    def opening(
        self,
        task: Task,
        observation: Observation,
        experiences: Sequence[Hit],
        *,
        max_questions: int = 0,
    ) -> Sequence[Segment]:
        """Return the segments before the agent's first turn.

        `experiences` are those that guide the episode from its start. `max_questions` is the
        maximum number of questions that the agent may ask. If it is 0, the tool is not mentioned.
        """
        ...

    def feedback(self, result: StepResult) -> Sequence[Segment]:
        """Return the segments that report the result of an action."""
        ...

    def turn_query(self, task: Task, segments: Sequence[Segment]) -> str:
        """Return the retrieval query before a turn. `segments`: the conversation so far."""
        ...

    def advice(self, task: Task, experiences: Sequence[Hit]) -> Sequence[Segment]:
        """Return the segments of experiences that are found before a turn; empty without any."""
        ...

    def parse(self, task: Task, completion: str) -> Response:
        """Parse the text of a completion."""
        ...

    def question_query(self, task: Task, query: str) -> str:
        """Return the retrieval query for a question."""
        ...

    def reply(self, task: Task, found: Hit | None) -> Sequence[Segment]:
        """Return the segments that answer a question; `found` is None if nothing was found."""
        ...


class RewardShaper(Protocol):
    """Definition of the training reward of an episode."""

    def shape(self, trajectory: Trajectory) -> Mapping[str, float]:
        """Return the reward channels of a complete trajectory; their sum is the training reward."""
        ...


class IntrinsicReward(Protocol):
    """Reward for what an episode explored. It has a memory of earlier episodes."""

    async def add(self, batch: Sequence[Trajectory], embedder: Embedder) -> list[Trajectory]:
        """Return the trajectories of a step with a further reward channel, in the same order."""
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


@dataclass(frozen=True, slots=True)
class PerTurn:
    """Advantages by trajectory and turn."""

    values: Sequence[Sequence[float]]
    """Values of the `turns` of each trajectory.

    The value of a turn applies to all tokens that the policy sampled for it, those of questions
    included.
    """


@dataclass(frozen=True, slots=True)
class PerToken:
    """Advantages by trajectory and sampled token."""

    values: Sequence[Sequence[float]]
    """Values of the sampled tokens of each trajectory, in the order of its traces."""


class AdvantageTerm(Protocol):
    """Term of the actor's advantage. The terms of a method are summed."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> torch.Tensor | PerTurn | PerToken:
        """Return one finite advantage per trajectory, [n], or one per turn or per sampled token.

        No trajectory has an error.
        """
        ...


class Rerender(Protocol):
    """Rendering of a trajectory with other prompts than those of the rollout."""

    def without(
        self, trajectory: Trajectory, origins: Set[Origin], *, version: OldPolicy = CURRENT_POLICY
    ) -> Sequence[TokenTrace]:
        """Return the sampled completions after prompts that lack the segments of `origins`.

        The ids of sampled tokens are unchanged, and their kept sets are dropped. `version` selects
        their old log-probs. Raise `ValueError` for an unknown version, or if no message remains
        before a completion.
        """
        ...


class TrainView(Protocol):
    """Definition of the training samples of a trajectory."""

    def __call__(self, trajectory: Trajectory, rerender: Rerender) -> Sequence[TokenTrace]:
        """Return the training samples of a trajectory; empty if it is not trained on.

        With advantages per turn or per token, a view must keep all answers of an origin (actions,
        questions) or none.
        """
        ...


class Loss(Protocol):
    """Policy loss of one micro-batch."""

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
        """Return the loss of one micro-batch and its metrics.

        The losses of the micro-batches of a minibatch sum to the loss of the minibatch.

        * logp, old_logp, mask: [b, t].
        * advantage: [b] or [b, t].
        * weights: [b], computed over the whole minibatch.
        * total_tokens: trained tokens of the whole minibatch.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """Trained model of a method, with the definition of its samples and its loss."""

    name: str
    terms: tuple[AdvantageTerm, ...]
    view: TrainView
    loss: Loss
    distillation: Callable[[Sequence[Trajectory]], torch.Tensor] | None = None
    """Self-distillation: function that returns one weight of the next-token loss per trajectory.

    The loss is computed on the trajectory's answers after the prompts of an unguided episode. A
    trajectory with weight 0 gives no distillation sample. None disables self-distillation.
    """


@dataclass(frozen=True, slots=True)
class ExtractorRole:
    """Extractor as a trained model.

    The `ExperienceManager` provides its samples and their advantages (CRL eq. 3, 7).
    """

    loss: Loss
    batch: int
    """Number of credit units in one training step, see `ExtractorSection.batch`."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Number of experiences that guide an episode, and the time of their retrieval."""

    count: int = 1
    """Maximum number of experiences of one search."""
    every_turn: bool = False
    """True if experience is searched before every turn, not only at the start."""
    between_attempts: bool = False
    """True if the members of a group are attempts at its task, one after the other.

    The last `count` reflections guide the next attempt, until one succeeds; see
    `crl.rollout.attempts`.
    """


@dataclass(frozen=True, slots=True)
class StepParts:
    """Parts that act on the tasks, rewards and metrics of a step."""

    replay: Callable[[TurnSource], TaskReplay] | None = None
    """Function from the train stream to the stream that also repeats tasks; None: no repetition.

    Only for a method with a bank, whose entries are the failures.
    """
    intrinsic: IntrinsicReward | None = None
    """Intrinsic reward of training episodes, for a method with a bank, whose embedder it uses."""
    measure: Callable[[Sequence[Trajectory]], Mapping[str, float]] | None = None
    """Function that returns further metrics of the batch; None for none."""
    predicted: Callable[[Sequence[Trajectory]], float] | None = None
    """Function that returns the share of predictions in the replies of the batch.

    It is for the metric of their time. None for agents that predict nothing.
    """


@dataclass(frozen=True, slots=True)
class Method:
    """Components of a method. `crl/methods/NAME.py` builds them from the run's config."""

    planner: RolloutPlanner
    context: ContextProvider
    shaper: RewardShaper
    actor: TrainSpec
    """Training of the actor. It is not used if the actor is not trained."""
    distiller: DistillationFilter | None = None
    """Filter of the episodes to distil; None for a run without a bank."""
    extractor: ExtractorRole | None = None
    """Role of the extractor; None if the extractor is not trained."""
    advice: Advice = Advice()
    """Number and time of the experiences that guide an episode."""
    step: StepParts = StepParts()
    """Parts that act on the tasks, rewards and metrics of a step."""
