"""Notes about a large mismatch between trainer and engine, with the probable cause.

The metrics are measured with real models that differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from crl.learners.step import mismatch, mismatch_moments
from crl.modeling.loading import token_logprobs
from crl.run.supervision.mismatch import MAX_KL, NOTE_INTERVAL, MismatchDetector, probable_cause


class NoteRecorder:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"only notes are expected, not {name}")


def qwen2(seed: int = 0) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=48, initializer_range=0.3,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def sampled(
    engine: PreTrainedModel, temperature: float, *, rows: int = 24, tokens: int = 12
) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(64, (rows, 1), generator=draw)
    for _ in range(tokens):
        p = (engine(input_ids=ids).logits[:, -1].float() / temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=draw)], dim=1)
    return ids


@torch.no_grad()
def measured(
    engine: PreTrainedModel,
    trainer: PreTrainedModel,
    temperature: float = 1.0,
    logprob_temperature: float | None = None,
) -> dict[str, float]:
    """Return the mismatch metrics of tokens that the engine samples at `temperature`.

    The engine's log-probs are computed at `logprob_temperature`, by default `temperature`.
    """
    ids = sampled(engine, temperature)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    engine_logprobs = token_logprobs(
        engine, ids, mask, temperature if logprob_temperature is None else logprob_temperature
    ).logp[mask]
    return mismatch_metrics(
        token_logprobs(trainer, ids, mask, temperature).logp[mask], engine_logprobs
    )


def mismatch_metrics(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    return mismatch(
        {name: float(value) for name, value in mismatch_moments(trainer, engine).items()}
    )


def test_an_engine_that_agrees_causes_no_note() -> None:
    notes = NoteRecorder()
    watch = MismatchDetector("actor", notes)  # pyright: ignore[reportArgumentType]
    same = measured(qwen2(), qwen2())
    assert same["mismatch_kl"] < 1e-9
    rounded = measured(qwen2().bfloat16(), qwen2().bfloat16().float())
    assert 1e-7 < rounded["mismatch_kl"] < MAX_KL
    for step, metrics in enumerate((same, rounded, {})):
        watch.observe(step, metrics)
    assert notes.texts == []


def test_probable_causes() -> None:
    stale = measured(qwen2(), qwen2(seed=1))
    raw = measured(qwen2(), qwen2(), temperature=0.5, logprob_temperature=1.0)
    assert min(stale["mismatch_kl"], raw["mismatch_kl"]) > MAX_KL
    assert "different weights" in probable_cause(stale)
    assert "another temperature" in probable_cause(raw)
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 0.25
    engine = torch.linspace(-6, -0.1, 2000)
    rough = mismatch_metrics(engine + noise, engine)
    assert rough["mismatch_kl"] > MAX_KL
    assert "rounding" in probable_cause(rough)
    assert "learner.precision=float32" in probable_cause(rough)


@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_notes_are_at_least_an_interval_apart(role: str) -> None:
    notes = NoteRecorder()
    watch = MismatchDetector(role, notes)  # pyright: ignore[reportArgumentType]
    bad = {"mismatch_kl": 0.5, "mismatch_correlation": 0.3, "mismatch_explained": 0.1}
    note_counts = []
    for step in range(3, 3 + 2 * NOTE_INTERVAL + 1):
        watch.observe(step, bad)
        note_counts.append(len(notes.texts))
    assert note_counts == [1] * NOTE_INTERVAL + [2] * NOTE_INTERVAL + [3]
    assert notes.texts[0].startswith(
        f"{role}: the trainer's log-probs differ from the engine's by a KL of 0.500 nats per token"
    )
