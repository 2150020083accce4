"""One training step in plain torch, shared by every learner: minibatches in, optimizer updates out.

The gradient does not depend on how a minibatch is cut: weights and token totals belong to the whole minibatch, losses of
micro-batches are summed.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from crl.algo import micro_batches, truncated_importance_weights
from crl.modeling import TokenFigures, token_logprobs
from crl.protocols import Loss
from crl.types import Minibatch, StepStats, TrainSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TrainSettings:
    """What a training step needs to know.

    temperature: the one that sampled, by which logits are scaled; micro_batch_tokens: padded tokens of one forward pass;
    max_grad_norm: gradient clipping; recompute: old log-probs are the trainer's at the start of the step instead of the
    engine's; importance_cap: truncation of the trainer-to-engine importance weights (only with recompute); kl_coef: weight of
    KL(model ‖ the model at the start), summed over the samples that the minibatch still has and divided by all its trained tokens;
    0 = no reference is kept.
    """

    temperature: float
    micro_batch_tokens: int
    max_grad_norm: float
    recompute: bool = False
    importance_cap: float | None = None
    kl_coef: float = 0.0


@dataclass(frozen=True)
class Tensors:
    """A micro-batch, right-padded to [b, t]; adv is [b, t] too, weights [b]."""

    ids: torch.Tensor
    mask: torch.Tensor
    old_logp: torch.Tensor
    versions: torch.Tensor
    advantage: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[TrainSample], device: torch.device) -> Tensors:
        width = max(len(s.trace.ids) for s in samples)

        def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype, device=device)

        advantages = [s.advantage if isinstance(s.advantage, tuple) else (s.advantage,) * len(s.trace.ids) for s in samples]
        return cls(
            ids=pad([s.trace.ids for s in samples], torch.long),
            mask=pad([s.trace.mask for s in samples], torch.bool),
            old_logp=pad([s.trace.logprobs for s in samples], torch.float32),
            versions=pad([s.trace.versions for s in samples], torch.long),
            advantage=pad(advantages, torch.float32),
            weights=torch.tensor([s.weight for s in samples], device=device),
        )


class Figures:
    """Adds up a step's metrics: `…_max` by maximum, the others as means weighted by trained tokens."""

    def __init__(self) -> None:
        self._rows: list[tuple[Mapping[str, torch.Tensor], float]] = []

    def add(self, metrics: Mapping[str, torch.Tensor], tokens: float) -> None:
        self._rows.append((metrics, tokens))

    def merge(self, other: Figures) -> None:
        self._rows += other._rows

    def result(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        maxima: dict[str, float] = {}
        for metrics, tokens in self._rows:
            for name, value in metrics.items():
                if name.endswith("_max"):
                    maxima[name] = max(maxima.get(name, float("-inf")), float(value))
                elif tokens:
                    sums[name] += float(value) * tokens
                    counts[name] += tokens
        return {name: total / counts[name] for name, total in sums.items()} | maxima


class Trainer:
    """Applies minibatches to one model, which is as the run started when it comes here. Not thread-safe: a learner calls it
    from its one worker."""

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler,
        loss: Loss, settings: TrainSettings,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.loss, self.settings = loss, settings
        self._reference = copy.deepcopy(model).requires_grad_(False) if settings.kl_coef else None

    def step(self, minibatches: Sequence[Minibatch], version: int) -> StepStats:
        """One optimizer update per minibatch. `version` is the trainer's policy version at the start of the step."""
        figures = Figures()
        if self.settings.recompute:
            minibatches = [self._recomputed(m) for m in minibatches]
        updates = skipped = 0
        grad_norms = []
        learning_rate = float(self.schedule.get_last_lr()[0])
        for minibatch in minibatches:
            # The trainer's weights are those of `version` until the first update: only then can its log-probs be held
            # against the engine's.
            own = Figures()
            total = self._gradient(minibatch, own, probe=version if updates == 0 else None)
            grad_norm = self._update(total)
            if grad_norm is None:
                skipped += 1  # with its figures: they may be as little finite as its loss
                continue
            learning_rate = float(self.schedule.get_last_lr()[0])  # the one that was applied
            self.schedule.step()
            updates += 1
            grad_norms.append(grad_norm)
            own.add({"loss": torch.tensor(total)}, 1)
            figures.merge(own)
        metrics = self._pooled(figures).result()
        if grad_norms:
            metrics["grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics["samples"] = sum(len(m.samples) for m in minibatches)
        metrics["learning_rate"] = learning_rate
        return StepStats(updates, skipped, metrics)

    def _gradient(self, minibatch: Minibatch, figures: Figures, probe: int | None) -> float:
        """Leaves the minibatch's gradient in the parameters; returns its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in self._micro_batches(minibatch):
            loss = self._loss(batch, minibatch.total_tokens, figures, probe)
            loss.backward()
            total += loss.item()
        return total

    def _loss(self, batch: Tensors, total_tokens: int, figures: Figures, probe: int | None) -> torch.Tensor:
        """A micro-batch's part of its minibatch's loss."""
        logp, entropy, kl = self._tokens(batch)
        loss, metrics = self.loss(logp, batch.old_logp, batch.advantage, batch.mask, weights=batch.weights, total_tokens=total_tokens)
        loss = loss + self.settings.kl_coef * kl.sum() / total_tokens
        tokens = int(batch.mask.sum())
        figures.add(metrics, tokens)
        figures.add({"entropy": entropy.sum() / max(tokens, 1)}, tokens)
        if self._reference is not None:
            figures.add({"reference_kl": kl.detach().sum() / max(tokens, 1)}, tokens)
        if probe is not None and not self.settings.recompute:
            self._add_mismatch(figures, logp.detach(), batch, probe)
        return loss

    def _tokens(self, batch: Tensors) -> TokenFigures:
        return token_logprobs(self.model, batch.ids, batch.mask, self.settings.temperature, reference=self._reference)

    def _update(self, total: float) -> float | None:
        """Clips and applies the gradient; returns its norm before, or None, with nothing applied, when it or the loss is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm))
        if not (math.isfinite(total) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        self.optimizer.step()
        return norm

    def _pooled(self, figures: Figures) -> Figures:
        """With those of whoever else works on the same minibatches."""
        return figures

    def _add_mismatch(self, figures: Figures, logp: torch.Tensor, batch: Tensors, version: int) -> None:
        """KL of the trainer against the engine (k3 estimator), on tokens of the trainer's own version."""
        same = batch.mask & (batch.versions == version)
        tokens = int(same.sum())
        if tokens:
            gap = (logp - batch.old_logp)[same]
            figures.add({"mismatch_kl": (gap.exp() - 1 - gap).mean()}, tokens)

    def _micro_batches(self, minibatch: Minibatch) -> list[Tensors]:
        samples = minibatch.samples
        cut = micro_batches([len(s.trace.ids) for s in samples], self.settings.micro_batch_tokens)
        return [Tensors.of([samples[i] for i in indices], self.model.device) for indices in cut]

    @torch.no_grad()
    def _recomputed(self, minibatch: Minibatch) -> Minibatch:
        """The minibatch with the trainer's own log-probs as the old ones, importance weights folded into the advantages."""
        samples = []
        for sample in minibatch.samples:
            batch = Tensors.of([sample], self.model.device)
            logp = self._tokens(batch).logp
            advantage = batch.advantage
            if self.settings.importance_cap is not None:
                advantage = advantage * truncated_importance_weights(logp, batch.old_logp, batch.mask, cap=self.settings.importance_cap)
            trace = replace(sample.trace, logprobs=tuple(logp[0].tolist()))
            samples.append(replace(sample, trace=trace, advantage=tuple(advantage[0].tolist())))
        return replace(minibatch, samples=tuple(samples))
