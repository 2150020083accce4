"""World-in-Agent (Role-Agent §3.2): the agent predicts the next states in its replies.

The reward of a prediction is its similarity to the state that followed (`crl.types.states`). The
module needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crl.algo.states import similarity
from crl.config.schema import RunConfig, TaskConfig
from crl.modeling.thinking import answer_start
from crl.prompts import NO_OVERRIDES, Overrides, fill, hashes, prompt
from crl.types import Trajectory, states

Horizons = Mapping[str, int]
"""H, the number of predictions in a reply, by task name. Agents of other tasks predict nothing."""

_PREDICTION = re.compile(
    r"<prediction>((?:(?!<prediction>).)*?)</prediction>", re.IGNORECASE | re.DOTALL
)


def horizons(tasks: Mapping[str, TaskConfig], share: float) -> dict[str, int]:
    """Return H = max(1, round(share · T_max)) by task name (Role-Agent, Table 4).

    A half is rounded to the even number: with 0.05, 30 and 50 turns give H = 2. The paper says that
    H "is rounded", and has no value for 50 turns.

    Tiny models cannot predict: tasks with the compact rendering are left out.
    """
    full = {name: task for name, task in tasks.items() if task.rendering == "full"}
    return {name: max(1, round(share * task.max_turns)) for name, task in full.items()}


def requests(horizons: Horizons, overrides: Overrides = NO_OVERRIDES) -> dict[str, str]:
    """Return the text of the prompt that asks for predictions, by task name."""
    template = prompt("predict", overrides)
    return {name: fill(template, horizon=h) for name, h in horizons.items()}


def measured_request(config: RunConfig, share: float | None) -> dict[str, Any]:
    """Return the settings and the SHA-256 of the prompt by which evaluations differ.

    `share` is that of `horizons`; None: agents do not predict. The values are then 0 and None.
    """
    predicted = {} if share is None else horizons(config.tasks, share)
    return {
        "role_agent.prediction_weight": "above 0" if predicted else 0,
        "role_agent.horizon": predicted or None,
        "prompts.predict": hashes(config.prompts.files)["predict"] if predicted else None,
    }


def without_predictions(answer: str) -> str:
    """Return the text of an answer without its predictions, which are not part of the action."""
    return _PREDICTION.sub("", answer)


def predictions(reply: str) -> list[str]:
    """Return the predictions in a reply, in order. Those in its thinking do not count."""
    return [found[1].strip() for found in _matches(reply)]


def _matches(reply: str) -> Iterator[re.Match[str]]:
    """Yield the predictions in a reply with their tags."""
    start = answer_start(reply)
    if start is not None:
        yield from _PREDICTION.finditer(reply, start)


def prediction_rewards(trajectory: Trajectory, horizon: int) -> list[list[float | None]]:
    """Return r̃ of eq. 4: one row per turn t, with the reward of each ŝ(t, h) for h = 1 … H.

    The reward is the similarity (`crl.algo.states.similarity`) of the prediction and the state that
    the agent saw h turns later. It is 0 if the episode had ended by then. None: the prediction is
    missing.
    """
    replies = [s.text for s in trajectory.segments if s.origin == "policy"][: trajectory.turns]
    seen = states(trajectory.segments)[: trajectory.turns + 1]
    rows: list[list[float | None]] = []
    for turn, reply in enumerate(replies):
        row: list[float | None] = [None] * horizon
        for h, predicted in enumerate(predictions(reply)[:horizon], start=1):
            later = seen[turn + h : turn + h + 1]
            row[h - 1] = similarity(predicted, later[0]) if later else 0.0
        rows.append(row)
    return rows


@dataclass(frozen=True)
class PredictionMetrics:
    """Metrics of the predictions of a batch; empty if no agent predicts."""

    horizons: Horizons
    """H by task name."""

    def __call__(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        rewards = [
            reward
            for t in batch
            if t.error is None and t.task.name in self.horizons
            for row in prediction_rewards(t, self.horizons[t.task.name])
            for reward in row
        ]
        if not rewards:
            return {}
        return {
            "rollout/prediction/similarity": sum(r or 0.0 for r in rewards) / len(rewards),
            "rollout/prediction/missing": sum(r is None for r in rewards) / len(rewards),
        }

    def share(self, batch: Sequence[Trajectory]) -> float:
        """Return the share of predictions, tags included, in the characters of all replies."""
        predicted = total = 0
        for t in batch:
            for reply in (s.text for s in t.segments if s.origin == "policy"):
                total += len(reply)
                if t.task.name in self.horizons:
                    predicted += sum(len(found[0]) for found in _matches(reply))
        return predicted / total if total else 0.0
