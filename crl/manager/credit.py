"""Training batches of the extractor: credit units, weights and advantages. Pure functions.

See CRL §3.3 and appendix B. A unit is one op of one generation. Its reward is the mean of r = ±1
over the pending episodes that it guided. If the actor judges experiences, it is the mean of r̃
(eq. 8) over the pending episodes that it was retrieved for. The expected r of an episode without
experience may be subtracted, and a bonus may be added (`crl.manager.records.Credit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from crl.algo.experience import training_weight
from crl.config.schema import ExtractorSection
from crl.manager.records import Generation, PendingUnit
from crl.types import TokenTrace


@dataclass(frozen=True, slots=True)
class ExtractorSample:
    """Training sample of the extractor.

    The mask selects a part of one generation: the tokens of one op, the tokens before the first op,
    or the token that made the generation malformed.
    """

    id: str
    """Id for `ExperienceManager.mark_trained`."""
    generation: str
    """Id of the generation."""
    trace: TokenTrace
    reward: float
    """r̄ ∈ [−2, 2]; with the critic's scores at most 3. The perplexity-reduction reward is added."""
    weight: float
    """w of CRL eq. 7."""
    advantage: float
    """w·(r̄ − baseline), see `batch_samples`."""


@dataclass(frozen=True, slots=True)
class ReadyUnit:
    """Unit with pending rewards, with the counters of its generation."""

    pending: PendingUnit
    c_train: int
    """c_train of CRL eq. 7: number of times that the generation was trained on."""
    t_last: int | None
    """t_last of CRL eq. 7: actor step that last trained on the generation; None if none did."""

    def weight(self, step: int, settings: ExtractorSection) -> float:
        """Return w of CRL eq. 7 after `step` completed actor steps; 0 during the cooldown."""
        return training_weight(
            step, self.t_last, self.c_train, cooldown=settings.cooldown, alpha=settings.alpha
        )


def choose_batch(
    ready: Sequence[ReadyUnit], n: int, step: int, settings: ExtractorSection
) -> list[ReadyUnit] | None:
    """Return a batch of the first `n` suitable units of `ready`; None if there are fewer.

    `ready` is in the order of preference. Units in cooldown are skipped. At most n // 4 units of a
    batch are generations without a usable op. `step` is the number of completed actor steps.
    """
    batch: list[ReadyUnit] = []
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
    batch: Sequence[ReadyUnit],
    generations: Mapping[str, Generation],
    step: int,
    settings: ExtractorSection,
    *,
    centred: bool,
) -> list[ExtractorSample]:
    """Return the samples of a batch.

    The first samples are one per unit, in the order of the batch. Then follows one sample per
    generation for the tokens before its first op. It is omitted if there are no such tokens or if
    the generation is malformed.

    The advantage is A = w·(r̄ − baseline). The baseline is the mean of r̄ over the units, weighted
    by w. **Ours**: with the unweighted mean, the advantages would not sum to 0 if the weights
    differ. Units that are trained again have a lower weight, and most of them have helped. The sum
    would therefore be negative, and every batch would lower the probability of the features that
    all answers share.

    If `centred` is False, the baseline is 0. A correct lesson earns 0 in a place where the
    actor wins without it. The mean of lessons that help in other places would give it a negative
    advantage.

    For the tokens before the first op, r̄ is the mean over the ops of the generation that are in
    this batch.
    """
    weights = [unit.weight(step, settings) for unit in batch]
    baseline = 0.0
    if centred:
        baseline = sum(
            w * unit.pending.reward for w, unit in zip(weights, batch, strict=True)
        ) / sum(weights)
    samples = []
    by_generation: dict[str, list[ReadyUnit]] = {}
    for unit, weight in zip(batch, weights, strict=True):
        pending = unit.pending
        by_generation.setdefault(pending.generation, []).append(unit)
        trace = masked_trace(generations[pending.generation], pending.span)
        samples.append(
            _sample(str(pending.unit), pending.generation, trace, pending.reward, weight, baseline)
        )
    for name, units in by_generation.items():
        generation = generations[name]
        if generation.head_tokens and not units[0].pending.malformed:
            reward = fmean(unit.pending.reward for unit in units)
            trace = masked_trace(generation, (0, generation.head_tokens))
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
    """Return the trace of a generation up to sampled token `stop`.

    The mask is 1 for the sampled tokens [start, stop) and 0 before them.
    """
    start, stop = span
    completion = generation.completion
    trace = TokenTrace().with_context(generation.prompt + completion.ids[:start])
    marked = (1,) * (stop - start)
    return TokenTrace(
        trace.ids + completion.ids[start:stop],
        trace.mask + marked,
        trace.logprobs + completion.logprobs[start:stop],
        trace.versions + completion.versions[start:stop],
        trace.kept + completion.kept[start:stop],
    )
