"""Builders of saved evaluations."""

from __future__ import annotations

from typing import Any

from crl.evaluation.samples import Game, SavedEpisode
from crl.evaluation.saved import SavedEvaluation
from crl.types import Split


def episode(
    game: int, sample: int, *, task: str = "room", split: Split = "unseen", goal: str = "",
    condition: str = "free", success: bool = True, score: float | None = None, turns: int = 3,
    tokens: int = 10, error: str | None = None,
) -> SavedEpisode:  # fmt: skip
    """Return an episode. By default, every game has its own goal."""
    saved = Game(task, split, game, goal or f"goal {game}")
    return SavedEpisode(saved, condition, sample, success, score, turns, tokens, error)


def evaluation(*episodes: SavedEpisode, **about: Any) -> SavedEvaluation:
    facts = {
        "subject": "runs/mine",
        "step": 3,
        "experience": "none",
        "samples": 1,
        "temperature": 1.0,
        "seed": 5,
        "options": {},
        "data_notes": {},
    }
    return SavedEvaluation(facts | about, episodes or (episode(0, 0), episode(1, 0, success=False)))
