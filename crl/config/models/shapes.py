"""Sizes of models: parameters and layer sizes.

They are read from a model's directory, or are the published sizes for the models that presets name.
Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crl.errors import ConfigError


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of the attention in every layer."""

    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key-value heads."""
    head_dim: int
    """Width of a query, key or value head."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer with gated MLPs that determine its memory."""

    parameters: int
    """Number of parameters. Tied parameters count once."""
    layers: int
    hidden: int
    """Width of the hidden states."""
    intermediate: int
    """Width of the hidden layer of an MLP."""
    attention: AttentionShape
    vocabulary: int
    """Number of tokens in the vocabulary."""
    max_context: int
    """Number of tokens that the positions of the model cover."""
    half_precision: bool
    """True if the checkpoint has a precision of 16 bits."""

    def kv_bytes(self, width: int) -> int:
        """Return the size of one token's keys and values in bytes. `width`: bytes per number."""
        return 2 * self.layers * self.attention.kv_heads * self.attention.head_dim * width


PUBLISHED_SHAPES: dict[str, ModelShape] = {
    "smollm2": ModelShape(
        134_515_008, 30, 576, 1536, AttentionShape(9, 3, 64), 49_152, 8192, False
    ),
    "Qwen/Qwen2.5-7B-Instruct": ModelShape(
        7_615_616_512, 28, 3584, 18_944, AttentionShape(28, 4, 128), 152_064, 32_768, True
    ),
    "Qwen/Qwen3-4B-Thinking-2507": ModelShape(
        4_022_468_096, 36, 2560, 9728, AttentionShape(32, 8, 128), 151_936, 262_144, True
    ),
    "Qwen/Qwen3-Embedding-0.6B": ModelShape(
        595_776_512, 28, 1024, 3072, AttentionShape(16, 8, 128), 151_669, 32_768, True
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": ModelShape(
        494_032_768, 24, 896, 4864, AttentionShape(14, 2, 64), 151_936, 32_768, True
    ),
}
"""Sizes of the models that presets name, so that a run can be planned before they are downloaded.

The sizes are those of config.json. The number of parameters is the one on the model's page on the
hub. Tests build each architecture without weights and count its parameters.
"""


def read_shape(path: Path, parameters: int, key: str) -> ModelShape:
    """Return the sizes of the model in a directory.

    `parameters`: number counted from the safetensors files. Raise `ConfigError` under `key` if
    config.json cannot be read or does not contain the sizes.
    """
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text("utf-8"))
        heads = int(config["num_attention_heads"])
        return ModelShape(
            parameters,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            attention=AttentionShape(
                heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            ),
            vocabulary=int(config["vocab_size"]),
            max_context=int(config["max_position_embeddings"]),
            half_precision=config.get("dtype", config.get("torch_dtype"))
            in ("bfloat16", "float16"),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"the sizes of the model cannot be read ({type(error).__name__}: {error})"
        raise ConfigError(
            key, str(file), reason, "Restore the config.json that belongs to the model"
        ) from error


def require_context(role: str, requested: int, limit: int | None) -> None:
    """Raise `ConfigError` if ROLE.max_context_tokens exceeds the positions of the model.

    `limit` = None: no limit. Some models give −1 instead.
    """
    if limit is not None and 0 < limit < requested:
        raise ConfigError(
            f"{role}.max_context_tokens",
            requested,
            f"exceeds the context of the model, which is {limit} tokens",
            f"Choose at most {limit}",
        )


def require_divisible(role: str, tensor_parallel: int, heads: int) -> None:
    """Raise `ConfigError` if engine.tensor_parallel does not divide the attention heads evenly."""
    if heads % tensor_parallel:
        reason = f"does not divide the {heads} attention heads of the model {role}.model evenly"
        raise ConfigError(
            "engine.tensor_parallel", tensor_parallel, reason, f"Choose a divisor of {heads}"
        )
