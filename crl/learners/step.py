"""One training step in plain torch, shared by every learner: minibatches in, optimizer updates out.

The gradient does not depend on how a minibatch is cut: weights and token totals belong to the whole minibatch, losses of
micro-batches are summed.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR

from crl.algo import micro_batches, truncated_importance_weights
from crl.modeling import TokenFigures, checkpoint_activations, token_logprobs
from crl.packing import pack_sequences
from crl.protocols import Loss
from crl.types import Minibatch, StepStats, TokenTrace, TrainSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from crl.config.schema import OptimizerSection


MOMENT = "moment_"
"""What names of figures begin with that others are computed from, at the end."""

ROUNDING = 1e-10
"""Of a mean square: what does not vary has a smaller variance."""


@dataclass(frozen=True)
class TrainSettings:
    """What a training step needs to know.

    temperature: the one that sampled, by which logits are scaled; micro_batch_tokens: tokens of one forward pass;
    max_grad_norm: gradient clipping; recompute: old log-probs are the trainer's at the start of the step instead of the
    engine's; importance_cap: truncation of the trainer-to-engine importance weights (only with recompute); kl_coef: weight of
    KL(model ‖ the model at the start), summed over the samples that the minibatch still has and divided by all its trained tokens;
    0 = no reference is kept; activation_checkpointing: activations are computed again for the gradient instead of kept.
    """

    temperature: float
    micro_batch_tokens: int
    max_grad_norm: float
    recompute: bool = False
    importance_cap: float | None = None
    kl_coef: float = 0.0
    activation_checkpointing: bool = False


def adamw(
    parameters: Iterable[torch.Tensor], section: OptimizerSection, **options: bool
) -> tuple[torch.optim.AdamW, LambdaLR]:  # fmt: skip
    """The optimizer of a model, and its warm-up: a learning rate that rises linearly over the first updates."""
    betas = (section.beta1, section.beta2)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=section.learning_rate,
        betas=betas,
        weight_decay=section.weight_decay,
        **options,
    )
    warmup = max(section.warmup_steps, 1)
    return optimizer, LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / warmup))


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
            return torch.tensor(
                [[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype, device=device
            )

        advantages = [
            s.advantage if isinstance(s.advantage, tuple) else (s.advantage,) * len(s.trace.ids)
            for s in samples
        ]
        return cls(
            ids=pad([s.trace.ids for s in samples], torch.long),
            mask=pad([s.trace.mask for s in samples], torch.bool),
            old_logp=pad([s.trace.logprobs for s in samples], torch.float32),
            versions=pad([s.trace.versions for s in samples], torch.long),
            advantage=pad(advantages, torch.float32),
            weights=torch.tensor([s.weight for s in samples], device=device),
        )

    def old_logps(self, logp: torch.Tensor) -> torch.Tensor:
        """Return the behaviour policy's log-probs [b, t]; `logp` itself where no policy sampled the token.

        There the ratio is 1, and the gradient that of the advantage times the log-likelihood.
        """
        return torch.where(self.versions < 0, logp.detach(), self.old_logp)


class Figures:
    """Adds up a step's metrics: `…_max` by maximum, the others as means weighted by trained tokens."""

    def __init__(
        self, rows: Iterable[tuple[Mapping[str, torch.Tensor | float], float]] = ()
    ) -> None:
        self.rows = list(rows)

    def add(self, metrics: Mapping[str, torch.Tensor | float], tokens: float) -> None:
        self.rows.append((metrics, tokens))

    def merge(self, other: Figures) -> None:
        self.rows += other.rows

    def result(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        maxima: dict[str, float] = {}
        for metrics, tokens in self.rows:
            for name, value in metrics.items():
                if name.endswith("_max"):
                    maxima[name] = max(maxima.get(name, float("-inf")), float(value))
                elif tokens:
                    sums[name] += float(value) * tokens
                    counts[name] += tokens
        return {name: total / counts[name] for name, total in sums.items()} | maxima


def mismatch_moments(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, torch.Tensor]:
    """Means over tokens of what `mismatch` is computed from: with g = trainer − engine and e = engine, log-probs [n] of the same tokens
    under the same weights. Means of parts, weighted by tokens, are those of the whole."""
    gap, engine = (trainer - engine).double(), engine.double()
    terms = {
        "kl": gap.exp() - 1 - gap,
        "g": gap,
        "e": engine,
        "gg": gap.square(),
        "ee": engine.square(),
        "ge": gap * engine,
    }
    return {MOMENT + name: term.mean() for name, term in terms.items()}


def mismatch(moments: Mapping[str, float]) -> dict[str, float]:
    """How far the trainer's log-probs are from the engine's, and in which way.

    mismatch_kl: KL of the trainer against the engine (k3 estimator), nats a token; mismatch_correlation: of the two, 1 where either
    does not vary; mismatch_explained: share of the gap's variance that follows linearly from the engine's log-prob.
    """
    kl, g, e, gg, ee, ge = (moments[MOMENT + name] for name in ("kl", "g", "e", "gg", "ee", "ge"))
    of_gap, of_engine, common = gg - g * g, ee - e * e, ge - g * e
    of_trainer = of_engine + of_gap + 2 * common
    vary = of_engine > ROUNDING * ee
    correlated = vary and of_trainer > ROUNDING * (ee + gg + 2 * ge)
    explained = common**2 / (of_gap * of_engine) if vary and of_gap > ROUNDING * gg else 0.0
    return {
        "mismatch_kl": kl,
        "mismatch_correlation": (of_engine + common) / math.sqrt(of_engine * of_trainer)
        if correlated
        else 1.0,
        "mismatch_explained": explained,
    }


def untrained(probe: Sequence[TokenTrace]) -> Minibatch:
    """As something to be cut into micro-batches."""
    return Minibatch(tuple(TrainSample(trace, 0.0, 0.0) for trace in probe), 0)


class Trainer:
    """Applies minibatches to one model, which is as the run started when it comes here, and from then on reads packed sequences.

    The gradients are those of the optimizer's parameters, which need not be the model's (`MasterWeights`). Not thread-safe: a
    learner calls it from its one worker.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler,
        loss: Loss, settings: TrainSettings,
    ) -> None:  # fmt: skip
        pack_sequences(model)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.loss, self.settings = loss, settings
        self._reference = copy.deepcopy(model).requires_grad_(False) if settings.kl_coef else None

    def step(self, minibatches: Sequence[Minibatch], version: int) -> StepStats:
        """One optimizer update per minibatch. `version` is the trainer's policy version at the start of the step."""
        figures = Figures()
        measured = [Figures() for _ in minibatches]
        if self.settings.recompute:
            minibatches = [
                self._recomputed(m, own, version)
                for m, own in zip(minibatches, measured, strict=True)
            ]
        updates = skipped = 0
        grad_norms = []
        learning_rate = float(self.schedule.get_last_lr()[0])
        for minibatch, own in zip(minibatches, measured, strict=True):
            # The trainer's weights are those of `version` until the first update: only then can its log-probs be held
            # against the engine's.
            if updates == 0:
                self._probe(minibatch, own, version)
            total = self._gradient(minibatch, own, probe=version if updates == 0 else None)
            grad_norm = self._update(total)
            if grad_norm is None:
                skipped += 1  # with its figures: they may be as little finite as its loss
                continue
            learning_rate = float(self.schedule.get_last_lr()[0])  # the one that was applied
            self.schedule.step()
            updates += 1
            grad_norms.append(grad_norm)
            own.add({"loss": total}, 1)
            figures.merge(own)
        means = self._pooled(figures).result()
        moments = {name: value for name, value in means.items() if name.startswith(MOMENT)}
        metrics = {name: value for name, value in means.items() if name not in moments} | (
            mismatch(moments) if moments else {}
        )
        if grad_norms:
            metrics["grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics["samples"] = sum(len(m.samples) for m in minibatches)
        metrics["learning_rate"] = learning_rate
        return StepStats(updates, skipped, metrics)

    def _gradient(self, minibatch: Minibatch, figures: Figures, probe: int | None) -> float:
        """Leaves the minibatch's gradient in the parameters; returns its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _, batch in self._micro_batches(minibatch):
            loss = self._loss(batch, minibatch.total_tokens, figures, probe)
            loss.backward()
            total += loss.item()
        return total

    def _loss(
        self, batch: Tensors, total_tokens: int, figures: Figures, probe: int | None
    ) -> torch.Tensor:
        """A micro-batch's part of its minibatch's loss."""
        logp, entropy, kl = self._tokens(batch)
        old_logp = batch.old_logps(logp)
        loss, metrics = self.loss(
            logp,
            old_logp,
            batch.advantage,
            batch.mask,
            weights=batch.weights,
            total_tokens=total_tokens,
        )
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
        return token_logprobs(
            self.model, batch.ids, batch.mask, self.settings.temperature, reference=self._reference
        )

    def _update(self, total: float) -> float | None:
        """Clips and applies the gradient; returns its norm before, or None, with nothing applied, when it or the loss is not finite."""
        trained = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self.settings.max_grad_norm))
        if not (math.isfinite(total) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        self.optimizer.step()
        return norm

    def _pooled(self, figures: Figures) -> Figures:
        """With those of whoever else works on the same minibatches."""
        return figures

    def _add_mismatch(
        self, figures: Figures, logp: torch.Tensor, batch: Tensors, version: int
    ) -> None:
        """The trainer against the engine, on tokens of the trainer's own version."""
        same = batch.mask & (batch.versions == version)
        tokens = int(same.sum())
        if tokens:
            figures.add(mismatch_moments(logp[same], batch.old_logp[same]), tokens)

    @torch.no_grad()
    def _probe(self, minibatch: Minibatch, figures: Figures, version: int) -> None:
        for _, batch in self._micro_batches(untrained(minibatch.probe)):
            self._add_mismatch(figures, self._tokens(batch).logp, batch, version)

    def _micro_batches(
        self, minibatch: Minibatch
    ) -> Iterator[tuple[Sequence[TrainSample], Tensors]]:
        for indices in micro_batches(
            [len(s.trace.ids) for s in minibatch.samples], self.settings.micro_batch_tokens
        ):
            samples = [minibatch.samples[i] for i in indices]
            yield samples, Tensors.of(samples, self.model.device)

    @torch.no_grad()
    def _recomputed(self, minibatch: Minibatch, figures: Figures, version: int) -> Minibatch:
        """The minibatch with the trainer's own log-probs as the old ones, importance weights folded into the advantages."""
        recomputed = []
        for samples, batch in self._micro_batches(minibatch):
            logp = self._tokens(batch).logp
            self._add_mismatch(figures, logp, batch, version)
            advantage = batch.advantage
            if self.settings.importance_cap is not None:
                engine = batch.old_logps(logp)
                advantage = advantage * truncated_importance_weights(
                    logp, engine, batch.mask, cap=self.settings.importance_cap
                )
            for sample, own, weighted in zip(
                samples, logp.tolist(), advantage.tolist(), strict=True
            ):
                length = len(sample.trace.ids)
                trace = replace(sample.trace, logprobs=tuple(own[:length]))
                recomputed.append(replace(sample, trace=trace, advantage=tuple(weighted[:length])))
        return replace(minibatch, samples=tuple(recomputed))
