"""Shared fixtures: tiny models with their tokenizers, created once per session."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # faster than two threads on matrices this small
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.register_assert_rewrite("support")

# Background jobs of a shell ignore SIGINT, and child processes inherit this. Several tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if find_spec("hypothesis"):  # hypothesis is missing on machines that run only tests/gpu
    from hypothesis import HealthCheck, settings

    # Every run uses the same examples. No example fails because it takes too long.
    settings.register_profile(
        "crl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("crl")


@pytest.fixture(scope="session")
def tiny_actor() -> Path:
    """Return the directory of the bundled actor."""
    from crl.config.models import resolve_model

    return resolve_model("tiny-actor")


@pytest.fixture(scope="session")
def tiny_extractor() -> Path:
    """Return the directory of the bundled extractor."""
    from crl.config.models import resolve_model

    return resolve_model("tiny-extractor")


@pytest.fixture(scope="session")
def random_qwen3(tmp_path_factory: pytest.TempPathFactory, tiny_actor: Path) -> Path:
    """Return the directory of a two-layer Qwen3 with random weights and grouped-query attention.

    Its chat template drops the thoughts of earlier turns.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(tiny_actor)
    tokenizer.chat_template = QWEN3_LIKE_TEMPLATE
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=64, max_position_embeddings=4096,
        tie_word_embeddings=False, initializer_range=0.2, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def random_bert(tmp_path_factory: pytest.TempPathFactory, tiny_actor: Path) -> Path:
    """Return the directory of a two-layer BERT encoder with random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    path = tmp_path_factory.mktemp("bert")
    tokenizer = AutoTokenizer.from_pretrained(tiny_actor)
    tokenizer.save_pretrained(path)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(path)
    return path


QWEN3_LIKE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
