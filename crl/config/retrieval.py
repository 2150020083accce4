"""Retrieval policies as the configuration sees them: a name, a description and a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from crl import plugins
from crl.config.catalog import did_you_mean
from crl.errors import ConfigError

BUNDLED_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "credit": "crl.manager.retrieval.policies.credit:POLICY",
        "diverse": "crl.manager.retrieval.policies.diverse:POLICY",
        "reward": "crl.manager.retrieval.policies.reward:POLICY",
    }
)
"""Reference of each bundled retrieval policy, by name."""


@dataclass(frozen=True)
class RetrievalPolicy:
    """Rule that chooses one entry among candidates of about equal similarity.

    A module of `crl/manager/retrieval/policies`, or of a user, defines one as `POLICY`.
    """

    scores: Callable[..., Iterable[float]]
    """Function `(candidates, step, settings)` that returns the scores of the candidates.

    `candidates` is a sequence of `crl.manager.retrieval.choice.Candidate`, the most similar first.
    `step` is the number of completed actor steps. `settings` is the `RetrievalSection`. Scores
    are in the order of the candidates. The highest score wins, and ties are broken at random. The
    scores may end early if no later candidate can win.
    """
    description: str
    """Description for the plan of a run: "chosen by ..."."""
    trials: bool = True
    """True if `retrieval.trial_share` applies."""


@cache
def retrieval_policy(choice: str) -> RetrievalPolicy:
    """Return a bundled policy, or the policy that a reference names.

    Raise `ConfigError` if there is no such policy.
    """
    reference = BUNDLED_POLICIES.get(choice, choice)
    if not plugins.is_reference(reference):
        own = "Your own policy: path/to/file.py:POLICY or package.module:POLICY"
        remedy = f"{did_you_mean(choice, BUNDLED_POLICIES)}. {own}"
        raise ConfigError("retrieval.choice", choice, "is not a retrieval policy", remedy)
    return plugins.load(
        reference,
        RetrievalPolicy,
        "retrieval.choice",
        example="crl/manager/retrieval/policies/credit.py",
        base="A relative path starts at the working directory",
    )
