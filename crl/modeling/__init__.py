"""Tokens, Hugging Face models, packed sequences, and weights on their way to engines."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File with the weights of a saved adapter."""

MAX_LOGITS = 1 << 26
"""Maximum number of elements of one float32 tensor of logits in training.

The tensor takes 256 MiB. With a vocabulary of 152 thousand, it holds the logits of 441 tokens.
"""
