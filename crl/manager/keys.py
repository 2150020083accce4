"""Keys of entries, which searches compare with queries."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from crl.protocols import Embedder
from crl.types import Segment, states


@dataclass(frozen=True)
class StateKey:
    """State of an episode as text, by which notes are found (EMPO²)."""

    name: str
    """Name, as in the name of the keys."""
    text: Callable[[Sequence[Segment]], str]
    """Function that returns the state at the end of a conversation."""

    def of_last_action(self, segments: Sequence[Segment]) -> str:
        """Return the state in which the agent acted last.

        The texts after this action are left out: they report how the episode ended, and a search
        during an episode never has them.
        """
        actions = [i for i, segment in enumerate(segments) if segment.origin == "policy"]
        return self.text(segments[: actions[-1]] if actions else segments)


def newest_state(segments: Sequence[Segment]) -> str:
    """Return the state after the agent's last action (`crl.types.states`)."""
    return states(segments)[-1]


def whole_conversation(segments: Sequence[Segment]) -> str:
    """Return all texts with their roles, without experiences (EMPO², Listing 1)."""
    return " ".join(f"{s.role}: {s.text}" for s in segments if s.origin != "experience")


STATE_KEYS: Mapping[str, StateKey] = MappingProxyType(
    {
        "state": StateKey("state", newest_state),
        "conversation": StateKey("conversation", whole_conversation),
    }
)
"""States by which notes are found, by name."""


_FORMULA = re.compile(r": (goal \+ \S+ text|\w+ before the last action)$")
"""Formula of the keys at the end of their name."""


def embedder_of(name: str) -> str:
    """Return the name of the embedder in the name of keys (`KeyEmbedder.name`)."""
    return _FORMULA.sub("", name)


class KeyEmbedder:
    """Keys of entries, which are compared with queries.

    A key is unit(embed(goal) + text_weight·embed(text)); **ours**. If `text_weight` is None, the
    key is embed(text), as in the paper. For a weight w < 1, the cosine of a key and its own goal is
    at least √(1 − w²) for any text. Raise `ValueError` for a negative weight.
    """

    def __init__(
        self, embedder: Embedder, text_weight: float | None, *, state: StateKey | None = None
    ) -> None:
        """Prepare keys. `state`: the texts are these states of episodes, without the goal's key."""
        if text_weight is not None and not text_weight >= 0:
            raise ValueError(f"text_weight must not be negative, not {text_weight}")
        self._embedder, self._weight = embedder, None if state else text_weight
        self.state = state
        """States of episodes that are the texts of keys (EMPO²); None: the texts of entries."""

    @property
    def name(self) -> str:
        """Name of the embedder and the formula. Only vectors with equal names are comparable."""
        if self.state:
            return f"{self._embedder.name}: {self.state.name} before the last action"
        return (
            self._embedder.name
            if self._weight is None
            else f"{self._embedder.name}: goal + {self._weight} text"
        )

    async def embed(self, entries: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        """Return the keys of (goal, text) pairs: float32 [len(entries), dim], unit norm."""
        if not entries:
            return np.zeros((0, self._embedder.dim), np.float32)
        texts = await self._embedder.embed([text for _, text in entries])
        if self._weight is None:
            return texts
        keys = await self._embedder.embed([goal for goal, _ in entries]) + self._weight * texts
        return keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)
