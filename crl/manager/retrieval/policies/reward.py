"""Choice of the entry that was written about the episode with the highest reward.

EMPO² (arXiv 2602.23008), Listing 1: tips are sorted by a score that is stored with them. The paper
does not say which; in the released code, it is the reward of the episode.
"""

from __future__ import annotations

from collections.abc import Sequence

from crl.config.retrieval import RetrievalPolicy
from crl.config.schema import RetrievalSection
from crl.manager.retrieval.choice import Candidate


def source_rewards(
    candidates: Sequence[Candidate], step: int, settings: RetrievalSection
) -> list[float]:
    """Return the reward of each candidate's episode; 0 if it is unknown."""
    return [candidate.entry.provenance.reward or 0.0 for candidate in candidates]


POLICY = RetrievalPolicy(source_rewards, "reward of the episode that it is about", trials=False)
