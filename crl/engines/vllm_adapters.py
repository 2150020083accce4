"""Adapters (LoRA) in vLLM engines.

The engine loads the base model once. It has one adapter, which all requests name, and which every
sync replaces. Requests that wait for a sync therefore use the new adapter. At the start, the
matrices of the adapter are 0, so the engine samples from the base model.

vLLM reads an adapter from a directory in the format of peft (`AdapterFile`). The interfaces of this
module are vLLM's `LoRARequest` and `add_lora`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest

from crl.config.models import ADAPTER_CONFIG
from crl.engines.backends import vllm_rank
from crl.modeling.loading import meta_model
from crl.modeling.lora import default_targets
from crl.modeling.weights import FileWeights

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from crl.config.schema import LoraSection

ADAPTER_NAME = "crl"
ADAPTER_ID = 1
"""Number of the adapter in vLLM."""


@dataclass(frozen=True)
class AdapterFile(FileWeights):
    """Adapter in a directory of its own: the tensors at `path`, with adapter_config.json."""

    def discard(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)


def adapter_request(folder: Path = Path("/"), *, replace: bool = False) -> LoRARequest:
    """Return vLLM's name of the adapter.

    `folder`: directory from which the adapter is loaded, with `replace`. Requests for completions
    need none.
    """
    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder), load_inplace=replace)


def adapter_arguments(model: Path, section: LoraSection) -> dict[str, Any]:
    """Return fields of vLLM's `AsyncEngineArgs` for an engine with one adapter.

    Only the layers with an adapter are replaced. vLLM would also replace embeddings and output head
    otherwise, and reserve memory for their matrices.
    """
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": vllm_rank(section.rank),
        "lora_target_modules": list(section.target_names) or default_targets(meta_model(model)),
    }


def write_config(section: LoraSection, folder: Path) -> None:
    """Write adapter_config.json with the fields that vLLM reads."""
    config = {
        "peft_type": "LORA",
        "r": section.rank,
        "lora_alpha": section.alpha,
        "target_modules": list(section.target_names) or "all-linear",
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), "utf-8")


async def add_initial_adapter(llm: AsyncLLM) -> None:
    """Add the adapter whose matrices are 0 to a new engine."""
    await llm.collective_rpc("add_initial_adapter", args=(ADAPTER_NAME, ADAPTER_ID))


async def load_adapter(llm: AsyncLLM, weights: AdapterFile) -> list[int]:
    """Replace the adapter of a paused engine. Return the checksums of the workers.

    Raise vLLM's error if the adapter does not fit to the model.
    """
    await llm.add_lora(adapter_request(weights.path.parent, replace=True))
    received = await llm.collective_rpc(
        "received_adapter", args=(str(weights.path), list(weights.manifest.names), ADAPTER_ID)
    )
    await llm.update_weight_version(str(weights.version))
    return received
