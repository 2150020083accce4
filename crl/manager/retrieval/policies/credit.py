"""Choice of the entry with the best success record. **Ours**."""

from __future__ import annotations

from collections.abc import Sequence

from crl.config.retrieval import RetrievalPolicy
from crl.config.schema import RetrievalSection
from crl.manager.retrieval.choice import Candidate

PRIOR_SUCCESS_RATE = 0.3
"""Prior success rate in `success_score`, with the weight of one episode."""


def success_score(credited: int, credit: float) -> float:
    """Return (won + 0.3) / (n + 1).

    This policy and `bank.evict = "credit"` rank entries by this score. `credited` is n, the number
    of credited episodes that the entry's version guided. `credit` is Σ r over them, r = ±1.
    """
    return ((credit + credited) / 2 + PRIOR_SUCCESS_RATE) / (credited + 1)


def success_scores(
    candidates: Sequence[Candidate], step: int, settings: RetrievalSection
) -> list[float]:
    """Return the `success_score` of each candidate."""
    counters = [candidate.entry.counters for candidate in candidates]
    return [success_score(c.credited, c.credit) for c in counters]


POLICY = RetrievalPolicy(success_scores, "credit")
