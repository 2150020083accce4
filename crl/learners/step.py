"""Training step in plain torch, shared by all learners.

A step makes one optimizer update per minibatch. The gradient does not depend on how a minibatch is
split into micro-batches: sample weights and token totals refer to the whole minibatch, and the
losses of the micro-batches are summed.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR

from crl.algo import micro_batches, truncated_importance_weights
from crl.modeling.loading import TokenStats, checkpoint_activations, token_logprobs
from crl.modeling.lora import dropout_layers, dropout_of, has_adapter
from crl.modeling.packing import enable_packing
from crl.modeling.truncation import KeptTokens
from crl.protocols import Loss
from crl.types import (
    BEHAVIOUR,
    CURRENT_POLICY,
    STEP_START,
    Minibatch,
    StepStats,
    TokenTrace,
    TrainSample,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from crl.config.schema import OptimizerSection


MOMENT_PREFIX = "moment_"
"""Name prefix of intermediate metrics, from which `mismatch` computes the final metrics."""

VARIANCE_TOLERANCE = 1e-10
"""Variance relative to the mean square, at or below which a quantity counts as constant."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training step."""

    temperature: float
    """Sampling temperature of the engine, by which the logits are divided."""
    micro_batch_tokens: int
    """Maximum number of tokens of one forward pass. A longer sample has its own forward pass."""
    max_grad_norm: float
    """Norm to which gradients are clipped."""
    recompute: bool = False
    """True if old log-probs are the trainer's at the start of the step, not the engine's."""
    importance_cap: float | None = None
    """Cap of the trainer-to-engine importance weights, used only with `recompute`.

    None disables the weights.
    """
    kl_coef: float = 0.0
    """Weight of KL(model ‖ reference); the reference is the model at the start of the run.

    The KL is summed over the samples that the minibatch still contains and divided by
    `Minibatch.total_tokens`. At a token with a kept set, it is the KL of both distributions
    renormalised over this set. With 0 there is no reference model.
    """
    activation_checkpointing: bool = False
    """True if activations are recomputed in the backward pass instead of stored."""


def adamw(
    parameters: Iterable[torch.Tensor], section: OptimizerSection, **options: bool
) -> tuple[torch.optim.AdamW, LambdaLR]:  # fmt: skip
    """Return an AdamW optimizer and its schedule.

    The learning rate rises linearly over the first `warmup_steps` updates. It is then constant, or
    falls linearly to 0 until the update `decay_steps`.
    """
    betas = (section.beta1, section.beta2)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=section.learning_rate,
        betas=betas,
        weight_decay=section.weight_decay,
        **options,
    )
    warmup, end = max(section.warmup_steps, 1), section.decay_steps

    def factor(update: int) -> float:
        """Return the learning rate of an update relative to that after the warm-up."""
        rising = (update + 1) / warmup
        falling = (end - update) / max(end - warmup + 1, 1) if end else 1.0
        return max(0.0, min(1.0, rising, falling))

    return optimizer, LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch as tensors, right-padded to [b, t] except `weights` and `kept`."""

    ids: torch.Tensor
    mask: torch.Tensor
    """True at trained tokens."""
    old_logp: torch.Tensor
    """Old log-probs, float32: the engine's, or the trainer's after `_recompute_logprobs`.

    They are not used where `versions` is `CURRENT_POLICY`.
    """
    versions: torch.Tensor
    """Policy version that sampled each token; negative as in `TokenTrace`."""
    advantage: torch.Tensor
    weights: torch.Tensor
    """Weight of each sample [b]."""
    kept: KeptTokens | None
    """Kept sets of the trained tokens, row by row; None if no token has one."""

    @classmethod
    def of(cls, samples: Sequence[TrainSample], device: torch.device) -> MicroBatch:
        """Return the tensors of `samples`."""
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
            kept=KeptTokens.of(
                [ids for s in samples for ids in compress(s.trace.kept, s.trace.mask)], device
            ),
        )

    def old_logps(self, logp: torch.Tensor) -> torch.Tensor:
        """Return the old log-probs [b, t]. Those of `CURRENT_POLICY` are the detached `logp`."""
        return torch.where(self.versions == CURRENT_POLICY, logp.detach(), self.old_logp)

    def engine_logps(self, logp: torch.Tensor) -> torch.Tensor:
        """Return the engine's log-probs [b, t], or the detached `logp` where it sampled none."""
        return torch.where(self.versions < 0, logp.detach(), self.old_logp)


class MetricAccumulator:
    """Accumulator of a step's metrics.

    Metrics whose names end in `_max` are combined by maximum. All other metrics are combined as
    means, weighted by trained tokens.
    """

    def __init__(
        self, rows: Iterable[tuple[Mapping[str, torch.Tensor | float], float]] = ()
    ) -> None:
        self.rows = list(rows)

    def add(self, metrics: Mapping[str, torch.Tensor | float], tokens: float) -> None:
        """Add metrics of `tokens` trained tokens."""
        self.rows.append((metrics, tokens))

    def merge(self, other: MetricAccumulator) -> None:
        self.rows += other.rows

    def result(self) -> dict[str, float]:
        """Return the combined metrics. A mean over 0 tokens is left out."""
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
    """Return the means over tokens from which `mismatch` is computed.

    `trainer` and `engine` are log-probs [n] of the same tokens under the same weights. The means
    are those of e = engine, g = trainer − engine, their squares and product, and the k3 terms.
    Means of several parts can be combined by weighting them with their numbers of tokens.
    """
    gap, engine = (trainer - engine).double(), engine.double()
    terms = {
        "kl": gap.exp() - 1 - gap,
        "g": gap,
        "e": engine,
        "gg": gap.square(),
        "ee": engine.square(),
        "ge": gap * engine,
    }
    return {MOMENT_PREFIX + name: term.mean() for name, term in terms.items()}


def mismatch(moments: Mapping[str, float]) -> dict[str, float]:
    """Return metrics of the difference between the trainer's and the engine's log-probs.

    * `mismatch_kl`: KL between engine and trainer in nats per token. It is the k3 estimator
      exp(g) − 1 − g on tokens sampled by the engine, which estimates KL(engine ‖ trainer).
    * `mismatch_correlation`: correlation of the two log-probs; 1 if one of them is constant.
    * `mismatch_explained`: share of the variance of g that a linear function of the engine's
      log-prob explains; 0 if the engine's log-prob or g is constant.
    """
    kl, g, e, gg, ee, ge = (
        moments[MOMENT_PREFIX + name] for name in ("kl", "g", "e", "gg", "ee", "ge")
    )
    var_gap, var_engine, covariance = gg - g * g, ee - e * e, ge - g * e
    var_trainer = var_engine + var_gap + 2 * covariance
    engine_varies = var_engine > VARIANCE_TOLERANCE * ee
    both_vary = engine_varies and var_trainer > VARIANCE_TOLERANCE * (ee + gg + 2 * ge)
    gap_varies = engine_varies and var_gap > VARIANCE_TOLERANCE * gg
    explained = covariance**2 / (var_gap * var_engine) if gap_varies else 0.0
    return {
        "mismatch_kl": kl,
        "mismatch_correlation": (var_engine + covariance) / math.sqrt(var_engine * var_trainer)
        if both_vary
        else 1.0,
        "mismatch_explained": explained,
    }


def _reference(model: PreTrainedModel) -> PreTrainedModel:
    """Return the reference for the KL: a copy, or the model itself if it has an adapter.

    The base model of an adapter does not change (`token_logprobs`).
    """
    return model if has_adapter(model) else copy.deepcopy(model).requires_grad_(False)


def probe_minibatch(probe: Sequence[TokenTrace]) -> Minibatch:
    """Return the traces as a minibatch that can be split into micro-batches.

    All weights, all advantages and `total_tokens` are 0.
    """
    return Minibatch(tuple(TrainSample(trace, 0.0, 0.0) for trace in probe), 0)


class Trainer:
    """Training of one model on minibatches.

    The constructor sets the model to read packed sequences. The model must still have the weights
    of the start of the run, because the reference for the KL is copied from it. The optimizer's
    parameters may differ from the model's (`MasterWeights`). A trainer is not thread-safe: a
    learner calls it from one worker thread only.

    Dropout of an adapter applies only to the forward and backward passes of an update
    (`_gradient`).
    """

    rank = 0
    """Number of this process among those that train on the same minibatches."""

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        loss: Loss, settings: TrainSettings,
    ) -> None:  # fmt: skip
        enable_packing(model)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.loss, self.settings = loss, settings
        self._reference = _reference(model) if settings.kl_coef else None
        self._dropout = dropout_layers(model)
        self._address = (0, 0)
        """Address of the draws of dropout: updates so far, and skipped updates of this step."""

    def step(self, minibatches: Sequence[Minibatch], version: int) -> StepStats:
        """Make one optimizer update per minibatch and return the metrics of the step.

        `version` is the trainer's policy version at the start of the step. An update whose loss or
        gradient is not finite is skipped.
        """
        accumulator = MetricAccumulator()
        accumulators = [MetricAccumulator() for _ in minibatches]
        minibatches = [
            self._recompute_logprobs(m, own, version)
            for m, own in zip(minibatches, accumulators, strict=True)
        ]
        updates = skipped = 0
        grad_norms = []
        learning_rate = float(self.schedule.get_last_lr()[0])
        for minibatch, own in zip(minibatches, accumulators, strict=True):
            # The trainer has the weights of `version` until the first update. Only until then can
            # its log-probs be compared with the engine's.
            comparable = updates == 0
            if comparable:
                self._measure_probe(self._with_probe(minibatch, version), own, version)
            self._address = (self.schedule.last_epoch, skipped)
            total = self._gradient(
                minibatch,
                own,
                mismatch_version=version if comparable and not self._dropout else None,
            )
            grad_norm = self._update(total)
            if grad_norm is None:
                skipped += 1  # its metrics are dropped too, because they may not be finite
                continue
            learning_rate = float(self.schedule.get_last_lr()[0])  # the rate of this update
            self.schedule.step()
            updates += 1
            grad_norms.append(grad_norm)
            own.add({"loss": total}, 1)
            accumulator.merge(own)
        means = self._gather_metrics(accumulator).result()
        moments = {name: value for name, value in means.items() if name.startswith(MOMENT_PREFIX)}
        metrics = {name: value for name, value in means.items() if name not in moments} | (
            mismatch(moments) if moments else {}
        )
        if grad_norms:
            metrics["grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics["samples"] = sum(len(m.samples) for m in minibatches)
        metrics["learning_rate"] = learning_rate
        return StepStats(updates, skipped, metrics)

    def _gradient(
        self, minibatch: Minibatch, accumulator: MetricAccumulator, mismatch_version: int | None
    ) -> float:
        """Compute the minibatch's gradient, store it in the parameters and return the loss.

        Add the metrics to `accumulator`. `mismatch_version` is the trainer's version if its
        log-probs can be compared with the engine's, else None.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, (_, batch) in enumerate(self._micro_batches(minibatch)):
            with dropout_of(self._dropout, *self._address, self.rank, number):
                loss = self._loss(batch, minibatch.total_tokens, accumulator, mismatch_version)
                loss.backward()
            total += loss.item()
        return total

    def _loss(
        self,
        batch: MicroBatch,
        total_tokens: int,
        accumulator: MetricAccumulator,
        mismatch_version: int | None,
    ) -> torch.Tensor:
        """Return the part of the minibatch's loss that belongs to one micro-batch.

        Add the metrics of the micro-batch to `accumulator`. `mismatch_version` is the trainer's
        version if its log-probs can be compared with the engine's, else None.
        """
        logp, entropy, kl = self._token_stats(batch)
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
        accumulator.add(metrics, tokens)
        accumulator.add({"entropy": entropy.sum() / max(tokens, 1)}, tokens)
        if self._reference is not None:
            accumulator.add({"reference_kl": kl.detach().sum() / max(tokens, 1)}, tokens)
        if mismatch_version is not None and not self.settings.recompute:
            self._add_mismatch(accumulator, logp.detach(), batch, mismatch_version)
        return loss

    def _token_stats(self, batch: MicroBatch) -> TokenStats:
        """Return log-prob, entropy and KL of the trained tokens of a micro-batch."""
        return token_logprobs(
            self.model,
            batch.ids,
            batch.mask,
            self.settings.temperature,
            reference=self._reference,
            kept=batch.kept,
        )

    def _update(self, total: float) -> float | None:
        """Clip the gradient, make the update and return the norm before clipping.

        If the loss `total` or the norm is not finite, make no update and return None.
        """
        parameters = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm))
        if not (math.isfinite(total) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        self.optimizer.step()
        return norm

    def _gather_metrics(self, accumulator: MetricAccumulator) -> MetricAccumulator:
        """Return the metrics of all processes that train on the same minibatches."""
        return accumulator

    def _add_mismatch(
        self, accumulator: MetricAccumulator, logp: torch.Tensor, batch: MicroBatch, version: int
    ) -> None:
        """Add the mismatch between trainer and engine on tokens sampled by policy `version`."""
        same = batch.mask & (batch.versions == version)
        tokens = int(same.sum())
        if tokens:
            accumulator.add(mismatch_moments(logp[same], batch.old_logp[same]), tokens)

    @torch.no_grad()
    def _measure_probe(
        self, minibatch: Minibatch, accumulator: MetricAccumulator, version: int
    ) -> None:
        """Add the mismatch between trainer and engine on the minibatch's probe traces."""
        for _, batch in self._micro_batches(probe_minibatch(minibatch.probe)):
            self._add_mismatch(accumulator, self._token_stats(batch).logp, batch, version)

    def _with_probe(self, minibatch: Minibatch, version: int) -> Minibatch:
        """Return the minibatch; if its update has dropout, its samples are also in its probe.

        The log-probs of an update with dropout cannot be compared with the engine's.
        """
        if not self._dropout or self.settings.recompute:
            return minibatch
        traces = (s.trace for s in minibatch.samples if version in s.trace.versions)
        return replace(minibatch, probe=(*minibatch.probe, *traces))

    def _micro_batches(
        self, minibatch: Minibatch
    ) -> Iterator[tuple[Sequence[TrainSample], MicroBatch]]:
        for indices in micro_batches(
            [len(s.trace.ids) for s in minibatch.samples], self.settings.micro_batch_tokens
        ):
            samples = [minibatch.samples[i] for i in indices]
            yield samples, MicroBatch.of(samples, self.model.device)

    @torch.no_grad()
    def _recompute_logprobs(
        self, minibatch: Minibatch, accumulator: MetricAccumulator, version: int
    ) -> Minibatch:
        """Return the minibatch with the trainer's log-probs as old log-probs.

        Without `recompute`, only samples that ask for them (`STEP_START`) change. Samples that ask
        for the log-probs of the policy that sampled them (`BEHAVIOUR`) never change. If
        `importance_cap` is set, the advantages are multiplied by truncated importance weights.
        """
        chosen = self._to_recompute(minibatch)
        recomputed = [s for s in minibatch.samples if not self._recomputes(s)]
        for samples, batch in self._micro_batches(chosen):
            logp = self._token_stats(batch).logp
            self._add_mismatch(accumulator, logp, batch, version)
            advantage = batch.advantage
            if self.settings.importance_cap is not None:
                engine = batch.engine_logps(logp)
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

    def _to_recompute(self, minibatch: Minibatch) -> Minibatch:
        """Return the samples of the minibatch whose old log-probs the trainer computes."""
        return replace(minibatch, samples=tuple(filter(self._recomputes, minibatch.samples)))

    def _recomputes(self, sample: TrainSample) -> bool:
        versions = sample.trace.versions
        return STEP_START in versions or (self.settings.recompute and BEHAVIOUR not in versions)
