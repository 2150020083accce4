"""Intrinsic reward for novel states (EMPO² §4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from crl.methods.parts.training import GroupAdvantage
from crl.protocols import Embedder, State, StepParts
from crl.types import Place, Trajectory

if TYPE_CHECKING:
    from crl.methods.empo2 import Empo2Section

MAX_STATES = 1000
"""Maximum number of distinct states per place. The oldest are forgotten first."""

MAX_PLACES = 256
"""Maximum number of places with states. The least recently played one is forgotten."""


@dataclass
class _States:
    """Distinct states of one place."""

    texts: list[str] = field(default_factory=list)
    visits: list[int] = field(default_factory=list)
    vectors: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Embeddings of the texts: float32 [states, dim]."""

    def copy(self) -> _States:
        return _States([*self.texts], [*self.visits], self.vectors)

    def visit(self, text: str, vector: NDArray[np.float32], similarity: float) -> int:
        """Return the number of visits to states similar to `text`, this one included."""
        if self.texts:
            cosines = self.vectors @ vector
            nearest = int(cosines.argmax())
            if cosines[nearest] >= similarity:
                self.visits[nearest] += 1
                return self.visits[nearest]
        self.texts = [*self.texts, text][-MAX_STATES:]
        self.visits = [*self.visits, 1][-MAX_STATES:]
        known = self.vectors if len(self.vectors) else vector[None][:0]
        self.vectors = np.concatenate([known, vector[None]])[-MAX_STATES:]
        return 1


class StateNovelty:
    """`IntrinsicReward`: coef · Σ 1/n over the states in which an episode acted.

    A memory holds the distinct states of each place. n is the number of visits to the most similar
    one, in earlier steps and so far in the episode, the current visit included. A state that is
    similar to none is new, and n is 1. **Ours**: the paper rewards new states and defines n as "the
    number of similar past states", which is 0 for them. With `only_new`, the states with n > 1 give
    no reward.

    Visits of other episodes of the same step do not count: episodes with the same states get the
    same reward. Their states are added to the memory after the step. Rewards and memory do not
    depend on the order of the batch. Episodes with an error get no reward and are not remembered.
    """

    def __init__(self, coef: float, similarity: float, *, only_new: bool = False) -> None:
        self._coef, self._similarity, self._only_new = coef, similarity, only_new
        self._known: dict[Place, _States] = {}

    async def add(self, batch: Sequence[Trajectory], embedder: Embedder) -> list[Trajectory]:
        """Return the trajectories with the reward channel `novelty`."""
        await self._embed_loaded(embedder)
        texts = list(dict.fromkeys(text for t in batch for text in t.turn_states))
        embedded = await embedder.embed(texts) if texts else ()
        vectors = dict(zip(texts, embedded, strict=True))
        rewarded = [t if t.error else self._rewarded(t, vectors) for t in batch]
        for t in sorted(batch, key=lambda t: (t.task.place, t.turn_states)):
            if not t.error:
                self._remember(t, vectors)
        return rewarded

    def _rewarded(self, t: Trajectory, vectors: Mapping[str, NDArray[np.float32]]) -> Trajectory:
        known = self._known.get(t.task.place)
        visits = self._visits(known.copy() if known else _States(), t, vectors)
        novelty = sum(1 / n for n in visits if n == 1 or not self._only_new)
        return t.with_rewards({**t.rewards, "novelty": self._coef * novelty})

    def _remember(self, t: Trajectory, vectors: Mapping[str, NDArray[np.float32]]) -> None:
        """Add the states of an episode to the memory."""
        place = t.task.place
        states = self._known[place] = self._known.pop(place, None) or _States()
        if len(self._known) > MAX_PLACES:
            del self._known[next(iter(self._known))]
        self._visits(states, t, vectors)

    def _visits(
        self, states: _States, t: Trajectory, vectors: Mapping[str, NDArray[np.float32]]
    ) -> list[int]:
        """Visit the states of an episode, in order. Return the number of visits n of each."""
        return [states.visit(text, vectors[text], self._similarity) for text in t.turn_states]

    async def _embed_loaded(self, embedder: Embedder) -> None:
        """Embed the states of a loaded memory again. A checkpoint has only their texts."""
        for states in self._known.values():
            if len(states.vectors) < len(states.texts):
                states.vectors = np.asarray(await embedder.embed(states.texts), np.float32)

    def state(self) -> State:
        return {
            "states": [
                [*place, list(zip(states.texts, states.visits, strict=True))]
                for place, states in self._known.items()
            ]
        }

    def load_state(self, state: State) -> None:
        loaded: list[Any] = state["states"]
        self._known = {
            Place(*place): _States([text for text, _ in states], [n for _, n in states])
            for *place, states in loaded
        }


def novelty_metrics(batch: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean intrinsic reward of the episodes that got one, as `rollout/novelty`."""
    rewards = [t.rewards["novelty"] for t in batch if "novelty" in t.rewards]
    return {"rollout/novelty": fmean(rewards)} if rewards else {}


def _novelty(t: Trajectory) -> float:
    """Return the intrinsic reward of an episode, 0 if it got none."""
    return t.rewards.get("novelty", 0.0)


def _outcome(t: Trajectory) -> float:
    """Return the reward of an episode without the intrinsic one."""
    return sum(reward for channel, reward in t.rewards.items() if channel != "novelty")


def advantage_terms(
    settings: Empo2Section, scale: Literal["std", "none"]
) -> tuple[GroupAdvantage, ...]:
    """Return the terms of the advantage, with the intrinsic reward where `novelty_in` adds it."""
    if settings.novelty_in == "reward":
        return (GroupAdvantage(scale),)
    return GroupAdvantage(scale, reward=_outcome), GroupAdvantage("none", reward=_novelty)


def novelty_parts(settings: Empo2Section) -> StepParts:
    """Return the intrinsic reward and its metric, or nothing if the weight is 0."""
    if not settings.novelty_coef:
        return StepParts()
    only_new = settings.novelty_states == "new"
    novelty = StateNovelty(settings.novelty_coef, settings.novelty_similarity, only_new=only_new)
    return StepParts(intrinsic=novelty, measure=novelty_metrics)
