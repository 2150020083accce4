"""Sizes of models for plans: of a directory, published ones, and those of a hypothetical model.

Torch is imported only for a directory whose sizes are not all in its JSON and safetensors headers.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from crl.config.models import find_model, model_size
from crl.config.models.shapes import PUBLISHED_SHAPES, AttentionShape, ModelShape, read_shape
from crl.errors import ConfigError
from crl.modeling.adapters import merged_precision
from crl.modeling.gguf import described

QWEN25_SHAPES = (
    PUBLISHED_SHAPES["Qwen/Qwen2.5-0.5B-Instruct"],
    ModelShape(1_543_714_304, 28, 1536, 8960, AttentionShape(12, 2, 128), 151_936, 32_768, True),
    ModelShape(3_085_938_688, 36, 2048, 11_008, AttentionShape(16, 2, 128), 151_936, 32_768, True),
    PUBLISHED_SHAPES["Qwen/Qwen2.5-7B-Instruct"],
    ModelShape(14_770_033_664, 48, 5120, 13_824, AttentionShape(40, 8, 128), 152_064, 32_768, True),
    ModelShape(32_763_876_352, 64, 5120, 27_648, AttentionShape(40, 8, 128), 152_064, 32_768, True),
    ModelShape(72_706_203_648, 80, 8192, 29_568, AttentionShape(64, 8, 128), 152_064, 32_768, True),
)
"""Sizes of the dense Qwen2.5 models, ascending (Qwen2.5 Technical Report, arXiv 2412.15115, table
1; widths and vocabularies from the models' config.json). Models up to 3 B have tied embeddings.
"""

MIN_SIZE, MAX_SIZE = 10_000_000, 1_000_000_000_000
"""Range of the parameters of a hypothetical model."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MB])", re.IGNORECASE)


def planned_shape(name: str, key: str = "actor.model", *, encoder: bool = False) -> ModelShape:
    """Return the sizes of the model `name`: from its directory, else the published ones.

    An adapter has the sizes of its base model, in the precision in which it is merged. The
    parameters are counted in the headers of the safetensors files. Without such files, and for
    sizes that config.json does not name directly, the architecture of config.json is built on the
    meta device, where tensors have shapes but no memory. Both counts are exact.

    Raise `ConfigError` under `key` if the sizes cannot be determined.
    """
    if (model := find_model(name, key)) is None:
        return PUBLISHED_SHAPES[name]
    shape = _shape(described(model, key), name, key, encoder=encoder)
    precision = merged_precision(model, key)
    return replace(shape, half_precision=precision == "bfloat16") if precision else shape


def _shape(path: Path, name: str, key: str, *, encoder: bool) -> ModelShape:
    """Return the sizes of the model in the directory `path`, as `planned_shape`."""
    size = model_size(path, key)
    try:
        if size is not None:
            return read_shape(path, size.parameters, key)
    except ConfigError as error:
        unreadable = error
    else:
        unreadable = ConfigError(
            key,
            name,
            "the directory contains no safetensors files, and its config.json does not describe a "
            "model, so its memory use cannot be planned",
            "Give a model in Hugging Face format",
        )
    try:
        shape = _built_shape(path, key, encoder=encoder)
    except (ConfigError, AttributeError, TypeError) as error:
        raise unreadable from error
    return replace(shape, parameters=size.parameters) if size else shape


def _built_shape(path: Path, key: str, *, encoder: bool) -> ModelShape:
    """Return the sizes of the architecture in config.json, built on the meta device."""
    from crl.modeling.loading import meta_model

    model = meta_model(path, key, encoder=encoder)
    config: Any = model.config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    return ModelShape(
        sum(parameter.numel() for parameter in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=hidden,
        intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
        attention=AttentionShape(
            heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
        ),
        vocabulary=config.vocab_size,
        max_context=config.max_position_embeddings,
        half_precision=str(config.dtype).removeprefix("torch.") in ("bfloat16", "float16"),
    )


def parse_size(text: str, key: str = "--size") -> int:
    """Return the number of parameters that a text such as 1.5B or 350M names.

    Raise `ConfigError` under `key` if the text is not of this form, or outside the supported range.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        reason = "is not a number of parameters with the unit M (million) or B (billion)"
        raise ConfigError(key, text, reason, "Write for example 1.5B or 350M")
    parameters = round(float(match[1]) * {"M": 1e6, "B": 1e9}[match[2].upper()])
    if not MIN_SIZE <= parameters <= MAX_SIZE:
        raise ConfigError(key, text, "is outside the range of 10M to 1000B", "Choose another size")
    return parameters


def dense_shape(parameters: int, max_context: int) -> ModelShape:
    """Return the typical sizes of a dense model in bfloat16 with this number of parameters.

    Rule: layers, key-value heads, width of a head, ratio of MLP width to hidden width, and
    vocabulary are those of the Qwen2.5 model that is nearest in log(parameters). The hidden width h
    solves the equation of that model's parameters,

        parameters = embeddings · vocabulary · h + layers · c · h²,

    and is rounded so that each key-value head has equally many query heads. `embeddings` is 1 if
    they are tied, else 2; c is the number of a layer's weights in units of h². See `QWEN25_SHAPES`
    for the source.
    """
    near = min(
        QWEN25_SHAPES, key=lambda shape: abs(math.log(shape.parameters) - math.log(parameters))
    )
    linear = (1 if near.parameters < 5e9 else 2) * near.vocabulary
    square = (near.parameters - linear * near.hidden) / near.hidden**2
    width = (math.sqrt(linear**2 + 4 * square * parameters) - linear) / (2 * square)
    kv_heads, head_dim = near.attention.kv_heads, near.attention.head_dim
    heads = kv_heads * max(1, round(width / (kv_heads * head_dim)))
    hidden = heads * head_dim
    return replace(
        near,
        parameters=parameters,
        hidden=hidden,
        intermediate=round(near.intermediate * hidden / near.hidden),
        attention=replace(near.attention, heads=heads),
        max_context=max_context,
    )
