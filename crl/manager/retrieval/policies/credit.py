"""Choice of the entry with the best success record. **Ours**."""

from __future__ import annotations

from collections.abc import Sequence

from crl.algo.experience import success_score
from crl.config.retrieval import RetrievalPolicy
from crl.config.schema import RetrievalSection
from crl.manager.retrieval.choice import Candidate


def success_scores(
    candidates: Sequence[Candidate], step: int, settings: RetrievalSection
) -> list[float]:
    """Return the `success_score` of each candidate."""
    counters = [candidate.entry.counters for candidate in candidates]
    return [success_score(c.credited, c.credit) for c in counters]


POLICY = RetrievalPolicy(success_scores, "success record")
