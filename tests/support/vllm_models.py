"""Tiny random models for vLLM on the CPU, and their outputs according to plain transformers.

vLLM's CPU kernels support their head sizes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from crl.modeling.loading import token_logprobs
from crl.modeling.truncation import KeptTokens
from crl.types import KeptSet

V = 160
NEVER = (2,)
"""Stop token that no prompt contains. A random model may sample it."""


def qwen2(seed: int, *, tied: bool = True) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=V, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=96, max_position_embeddings=512,
        initializer_range=0.3, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=2,
        dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, V) for _ in range(length))


@torch.no_grad()
def logprobs(
    model: PreTrainedModel, ids: Sequence[int], sampled: Sequence[int], temperature: float = 1.0,
    kept: Sequence[KeptSet] = (),
) -> list[float]:  # fmt: skip
    """Return the log-probs that the trainer computes for `sampled` after `ids`."""
    tokens = torch.tensor([[*ids, *sampled]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, : len(ids)] = False
    stats = token_logprobs(
        model, tokens, mask, temperature, kept=KeptTokens.of(kept, tokens.device)
    )
    return stats.logp[0, len(ids) :].tolist()


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: Sequence[int], tokens: int) -> tuple[int, ...]:
    sampled: list[int] = []
    while len(sampled) < tokens and (not sampled or sampled[-1] not in NEVER):
        sampled.append(int(model(torch.tensor([[*ids, *sampled]])).logits[0, -1].argmax()))
    return tuple(sampled)
