"""Tokens, Hugging Face models, packed sequences, and weights on their way to engines."""

from typing import Literal

Precision = Literal["float32", "bfloat16"]
"""Precision of a model's weights."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File with the weights of a saved adapter."""

BASE_PRECISION = "base_precision"
"""Entry in the metadata of a saved adapter: the precision of its base model in the run."""

BASE_SHA256 = "base_sha256"
"""Entry in the metadata of a saved adapter: the `weights_sha256` of its base model."""

MAX_LOGITS = 1 << 26
"""Maximum number of elements of one float32 tensor of logits in training.

The tensor takes 256 MiB. With a vocabulary of 152 thousand, it holds the logits of 441 tokens.
"""
