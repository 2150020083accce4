"""How large a model is: parameters and layer sizes, from its directory, or as published for the models that presets name. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crl.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on, of a transformer with gated MLPs. parameters: tied ones once; intermediate: width of an MLP's hidden layer;
    head_dim: of queries, keys and values alike; max_context: tokens that its positions reach; half: its checkpoint is in 16 bits."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_context: int
    half: bool

    def kv_bytes(self, width: int) -> int:
        """Keys and values of one token, in numbers of `width` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


KNOWN: dict[str, ModelShape] = {
    "Qwen/Qwen2.5-7B-Instruct": ModelShape(
        7_615_616_512, 28, 3584, 18_944, 28, 4, 128, 152_064, 32_768, True
    ),
    "Qwen/Qwen3-4B-Thinking-2507": ModelShape(
        4_022_468_096, 36, 2560, 9728, 32, 8, 128, 151_936, 262_144, True
    ),
    "Qwen/Qwen3-Embedding-0.6B": ModelShape(
        595_776_512, 28, 1024, 3072, 16, 8, 128, 151_669, 32_768, True
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": ModelShape(
        494_032_768, 24, 896, 4864, 14, 2, 64, 151_936, 32_768, True
    ),
}
"""The models that presets name, so that a plan can be made before they are downloaded: the sizes of their config.json, and the number of
parameters that their model pages on the hub give. Tests build each architecture without weights and count."""


def read_shape(path: Path, parameters: int, key: str) -> ModelShape:
    """Of the model in a directory. parameters: counted from its safetensors files. Raises `ConfigError` for a config.json without them."""
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text("utf-8"))
        heads = int(config["num_attention_heads"])
        return ModelShape(
            parameters,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocabulary=int(config["vocab_size"]),
            max_context=int(config["max_position_embeddings"]),
            half=config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16"),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"its sizes cannot be read ({type(error).__name__}: {error})"
        raise ConfigError(
            key, str(file), reason, "Restore the config.json that belongs to the model"
        ) from error


def require_context(role: str, wanted: int, longest: int | None) -> None:
    """Raises `ConfigError` where ROLE.max_context_tokens is more than the model's positions reach (None = any number)."""
    if longest is not None and wanted > longest:
        raise ConfigError(
            f"{role}.max_context_tokens",
            wanted,
            f"the model reads at most {longest} tokens",
            f"Choose at most {longest}",
        )


def require_divisible(role: str, tensor_parallel: int, heads: int) -> None:
    """Raises `ConfigError` where engine.tensor_parallel does not share a model's attention heads out evenly."""
    if heads % tensor_parallel:
        reason = f"the model of {role}.model has {heads} attention heads, which cannot be shared out evenly"
        raise ConfigError(
            "engine.tensor_parallel", tensor_parallel, reason, f"Choose a divisor of {heads}"
        )
