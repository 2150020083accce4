"""Choice of one entry among similar ones, by a retrieval policy or as a trial. Pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import NamedTuple

from crl.config.retrieval import retrieval_policy
from crl.config.schema import RetrievalSection
from crl.errors import ConfigError
from crl.manager.records import Entry
from crl.seeds import derive_seed

SIMILARITY_TOLERANCE = 1e-6
"""Tolerance for equal similarities, because float32 products differ in their last bits."""


class Candidate(NamedTuple):
    """Entry near a query, with the cosine of query and key."""

    entry: Entry
    similarity: float


def choose_entries(
    candidates: Sequence[Candidate],
    step: int,
    rng: Callable[[], random.Random],
    settings: RetrievalSection,
    *,
    count: int = 1,
    trial: bool = False,
) -> list[Entry]:
    """Return at most `count` entries that guide an episode, the best first.

    The list is empty if no candidate is similar enough.

    * candidates: the most similar first.
    * step: completed actor steps.
    * rng: function that creates the random generator for breaking ties.
    * trial: prefer the least retrieved entries instead of those that the policy prefers. Ignored if
      the policy has no trials.

    Raise `ConfigError` if the scores of the policy cannot be used.
    """
    if not candidates or candidates[0].similarity < settings.min_similarity:
        return []
    threshold = max(
        candidates[0].similarity - settings.margin - SIMILARITY_TOLERANCE, settings.min_similarity
    )
    # Equally similar candidates are in the order of the index, which differs in a resumed run.
    eligible = sorted((c for c in candidates if c.similarity >= threshold), key=_order)
    chosen: list[Entry] = []
    while eligible and len(chosen) < count:
        # A policy may omit the scores of candidates that cannot win. They are scored again when the
        # others are chosen.
        scores = _scores(eligible, step, settings, trial=trial)
        scored, eligible = eligible[: len(scores)], eligible[len(scores) :]
        by_score: dict[float, list[Candidate]] = {}
        for candidate, score in zip(scored, scores, strict=True):
            by_score.setdefault(score, []).append(candidate)
        complete = not eligible
        for score in sorted(by_score, reverse=True):
            tied = [candidate.entry for candidate in by_score.pop(score)]
            chosen += _first_drawn(tied, count - len(chosen), rng)
            if len(chosen) == count or not complete:
                break
        eligible = [candidate for tied in by_score.values() for candidate in tied] + eligible
        eligible.sort(key=_order)
    return chosen


def _first_drawn(
    tied: Sequence[Entry], count: int, rng: Callable[[], random.Random]
) -> Sequence[Entry]:
    """Return the first `count` entries in an order that `rng` draws.

    The order of two entries does not depend on the others.
    """
    if len(tied) == 1:
        return tied
    root = rng().getrandbits(63)
    return nsmallest(count, tied, key=lambda entry: derive_seed(root, "tie", entry.uid))


def _order(candidate: Candidate) -> tuple[float, str]:
    """Return a sort key: the most similar candidates first, equal ones by the id of the entry."""
    return -candidate.similarity, candidate.entry.uid


def _scores(
    eligible: Sequence[Candidate], step: int, settings: RetrievalSection, *, trial: bool
) -> list[float]:
    """Return the scores of the first candidates, as far as the policy gives them."""
    policy = retrieval_policy(settings.choice)
    if trial and policy.trials:
        return [-float(entry.counters.retrieved) for entry, _ in eligible]
    scores = list(policy.scores(eligible, step, settings))
    if not 0 < len(scores) <= len(eligible) or not all(map(math.isfinite, scores)):
        reason = (
            f"its policy must return 1 to {len(eligible)} finite scores for {len(eligible)} "
            f"candidates, not {scores}"
        )
        raise ConfigError("retrieval.choice", settings.choice, reason, "Correct the policy")
    return scores


def is_trial(index: int, share: float, phase: float) -> bool:
    """Return whether search number `index` of a group is a trial.

    `share` is the share of trials among all searches. Trials are spread evenly over a group.
    `phase` is drawn from [0, 1) for each group, so that the average over many groups equals any
    `share`.
    """
    return math.floor((index + 1) * share + phase) > math.floor(index * share + phase)
