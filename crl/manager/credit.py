"""What the extractor is trained on: which credit units make a batch, with what weight and advantage. Pure.

CRL §3.3 and appendix B. A unit is one op of one generation; its reward the mean of r = ±1 over the pending episodes it guided, or
of r̃ (eq. 8) over those it was found for where the actor judges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from crl.algo.experience import training_weight
from crl.manager.records import Generation, PendingUnit
from crl.types import TokenTrace


@dataclass(frozen=True, slots=True)
class CreditSettings:
    """What the extractor's training makes of credit."""

    cooldown: int = 2
    """δ of CRL eq. 7, in actor steps."""
    alpha: float = 0.5
    """α of CRL eq. 7."""
    malformed_reward: float | None = None
    """Reward of a generation without any op. None: such generations are not trained on."""
    centred: bool = True
    """Whether advantages are taken against the batch's mean. Rewards that are relative already, to what
    a group came to without experience, are advantages as they are."""

    def __post_init__(self) -> None:
        if self.cooldown < 0 or self.alpha < 0:
            raise ValueError(f"cooldown and alpha must not be negative: {self}")


@dataclass(frozen=True, slots=True)
class ExtractorSample:
    """A training sample: a generation with the mask on one op's tokens, on those before its first op, or
    on the token that made it malformed.

    id: what `mark_trained` takes; reward: r̄ ∈ [−2, 2], with the critic's scores at most 3;
    weight: w of eq. 7; advantage: w·(r̄ − baseline), see `batch_samples`.
    """

    id: str
    generation: str
    trace: TokenTrace
    reward: float
    weight: float
    advantage: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A unit that may be trained on, with the counters of its generation."""

    pending: PendingUnit
    c_train: int
    t_last: int | None

    def weight(self, step: int, settings: CreditSettings) -> float:
        return training_weight(
            step, self.t_last, self.c_train, cooldown=settings.cooldown, alpha=settings.alpha
        )


def choose_batch(
    ready: Sequence[Ready], n: int, step: int, settings: CreditSettings
) -> list[Ready] | None:
    """The first `n` of `ready`, which is in order of becoming ready; None when there are not so many.

    Units in cooldown wait and do not fill the batch; at most n // 4 of it are generations without an op. step: completed
    actor steps.
    """
    batch: list[Ready] = []
    malformed = 0
    for unit in ready:
        if unit.pending.malformed and malformed == n // 4:
            continue
        if unit.weight(step, settings) <= 0:
            continue
        malformed += unit.pending.malformed
        batch.append(unit)
        if len(batch) == n:
            return batch
    return None


def batch_samples(
    batch: Sequence[Ready],
    generations: Mapping[str, Generation],
    step: int,
    settings: CreditSettings,
) -> list[ExtractorSample]:
    """The samples of a batch: one per unit in order, then one per generation for the tokens before its first op.

    A = w·(r̄ − baseline), the baseline being the mean of r̄ over the units, weighted by w. **Ours**: with the plain mean the
    advantages would not sum to 0 as soon as the weights differ. What is trained again, at a lower weight, is mostly what helped;
    so their sum would be negative, and every batch would push down what all answers have in common: that they are answers.

    Where the settings do not centre, the baseline is 0. A right lesson earns 0 in a place that is won
    without it, and the mean of lessons that help elsewhere would push it down there.

    The tokens before the first op have as r̄ the mean over those ops of their generation that are in this batch.
    """
    weights = [unit.weight(step, settings) for unit in batch]
    baseline = 0.0
    if settings.centred:
        baseline = sum(
            w * unit.pending.reward for w, unit in zip(weights, batch, strict=True)
        ) / sum(weights)
    samples = []
    by_generation: dict[str, list[Ready]] = {}
    for unit, weight in zip(batch, weights, strict=True):
        pending = unit.pending
        by_generation.setdefault(pending.generation, []).append(unit)
        trace = masked_trace(generations[pending.generation], pending.span)
        samples.append(
            _sample(str(pending.unit), pending.generation, trace, pending.reward, weight, baseline)
        )
    for name, units in by_generation.items():
        generation = generations[name]
        if generation.head and not units[0].pending.malformed:
            reward = fmean(unit.pending.reward for unit in units)
            trace = masked_trace(generation, (0, generation.head))
            samples.append(
                _sample(
                    f"{name}@head", name, trace, reward, units[0].weight(step, settings), baseline
                )
            )
    return samples


def _sample(
    name: str, generation: str, trace: TokenTrace, reward: float, weight: float, baseline: float
) -> ExtractorSample:
    return ExtractorSample(name, generation, trace, reward, weight, weight * (reward - baseline))


def masked_trace(generation: Generation, span: tuple[int, int]) -> TokenTrace:
    """Prompt and completion with the mask on the sampled tokens [start, stop) alone, and nothing after them."""
    start, stop = span
    completion = generation.completion
    trace = TokenTrace().with_context(generation.prompt + completion.ids[:start])
    marked = (1,) * (stop - start)
    return TokenTrace(
        trace.ids + completion.ids[start:stop],
        trace.mask + marked,
        trace.logprobs + completion.logprobs[start:stop],
        trace.versions + completion.versions[start:stop],
    )
