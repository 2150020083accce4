"""Intrinsic reward for novel states (EMPO² §4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crl.protocols import Embedder, State
from crl.types import Trajectory

MAX_STATES = 1000
"""Maximum number of distinct states per goal. The oldest are forgotten first."""

MAX_GOALS = 256
"""Maximum number of goals with states. The goal that was played least recently is forgotten."""


@dataclass
class _States:
    """Distinct states of one goal."""

    texts: list[str] = field(default_factory=list)
    visits: list[int] = field(default_factory=list)
    vectors: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Embeddings of the texts: float32 [states, dim]."""

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

    A memory holds the distinct states of each goal. n is the number of visits to the most similar
    one, the current visit included; a state that is similar to none is new, and n is 1. **Ours**:
    the paper rewards new states and defines n as "the number of similar past states", which is 0
    for them.

    Episodes are processed in the order of the batch. Those with an error get no reward.
    """

    def __init__(self, coef: float, similarity: float) -> None:
        self._coef, self._similarity = coef, similarity
        self._goals: dict[tuple[str, str], _States] = {}

    async def add(self, batch: Sequence[Trajectory], embedder: Embedder) -> list[Trajectory]:
        """Return the trajectories with the reward channel `novelty`."""
        await self._embed_loaded(embedder)
        texts = list(dict.fromkeys(text for t in batch for text in t.turn_observations))
        embedded = await embedder.embed(texts) if texts else ()
        vectors = dict(zip(texts, embedded, strict=True))
        return [t if t.error else self._rewarded(t, vectors) for t in batch]

    def _rewarded(self, t: Trajectory, vectors: Mapping[str, NDArray[np.float32]]) -> Trajectory:
        goal = (t.task.name, t.task.goal)
        states = self._goals[goal] = self._goals.pop(goal, None) or _States()
        if len(self._goals) > MAX_GOALS:
            del self._goals[next(iter(self._goals))]
        visits = [
            states.visit(text, vectors[text], self._similarity) for text in t.turn_observations
        ]
        novelty = self._coef * sum(1 / n for n in visits)
        return t.with_rewards({**t.rewards, "novelty": novelty})

    async def _embed_loaded(self, embedder: Embedder) -> None:
        """Embed the states of a loaded memory again. A checkpoint has only their texts."""
        for states in self._goals.values():
            if len(states.vectors) < len(states.texts):
                states.vectors = np.asarray(await embedder.embed(states.texts), np.float32)

    def state(self) -> State:
        return {
            "states": [
                [task, goal, list(zip(states.texts, states.visits, strict=True))]
                for (task, goal), states in self._goals.items()
            ]
        }

    def load_state(self, state: State) -> None:
        loaded: list[Any] = state["states"]
        self._goals = {
            (task, goal): _States([text for text, _ in states], [n for _, n in states])
            for task, goal, states in loaded
        }


def novelty_metrics(batch: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean intrinsic reward of the episodes, as `rollout/novelty`."""
    return {"rollout/novelty": fmean(t.rewards.get("novelty", 0.0) for t in batch)}
