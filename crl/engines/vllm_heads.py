"""Conversion of a model to larger attention heads that computes the same function.

vLLM's CPU kernels do not support small heads. This module widens each head from d to D numbers:

* The new numbers are 0 in queries, keys, values and the columns of the output projection.
* Rotary embeddings rotate the pairs (i, i + d/2) by the angle position · θ^(−2i/d). The pairs
  become (i, i + D/2). Replacing θ with θ^(D/d) keeps their angles.
* Attention divides scores by √D instead of √d, so queries are multiplied by √(D/d).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class WiderHeads:
    """Sizes of a model's attention heads before and after the widening."""

    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key-value heads."""
    size: int
    """Numbers per head in the original model (d)."""
    wide_size: int
    """Numbers per head in the widened model, which vLLM serves (D)."""
    theta: float
    """Base of the rotary embeddings of the original model."""

    @classmethod
    def of(cls, config: PreTrainedConfig, wide_size: int) -> WiderHeads | None:
        """Return the widening of the heads of a model to `wide_size` numbers.

        Return None if the model is not a Qwen2 model with default rotary embeddings and without
        sliding windows.
        """
        rope = getattr(config, "rope_parameters", None) or {}
        if (
            config.model_type != "qwen2"
            or rope.get("rope_type") != "default"
            or config.use_sliding_window
        ):
            return None
        size = config.hidden_size // config.num_attention_heads
        return cls(
            config.num_attention_heads,
            config.num_key_value_heads,
            size,
            wide_size,
            rope["rope_theta"],
        )

    def widen(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of the widened model.

        The widened model is a Llama with biases: Qwen2 with a separate head size and an additional
        bias in the output projection, which is 0.
        """
        widened: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if ".q_proj." in name:
                widened[name] = self._pad_heads(tensor, self.heads, rotary=True) * math.sqrt(
                    self.wide_size / self.size
                )
            elif ".k_proj." in name:
                widened[name] = self._pad_heads(tensor, self.kv_heads, rotary=True)
            elif ".v_proj." in name:
                widened[name] = self._pad_heads(tensor, self.kv_heads, rotary=False)
            elif name.endswith(".o_proj.weight"):
                widened[name] = self._pad_heads(tensor.T, self.heads, rotary=False).T.contiguous()
                widened[name.replace("weight", "bias")] = torch.zeros(
                    tensor.shape[0], dtype=tensor.dtype
                )
            else:
                widened[name] = tensor
        return widened

    def widen_adapter(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the matrices of an adapter (LoRA) of the widened model.

        The change of a weight is B A. Rows of the change are rows of B, and columns are those of A.
        Only the side of the heads is widened.
        """
        widened: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            layer, matrix = name.split(".")[-3:-1]
            weight = f"layer.{layer}.weight"
            on_heads = matrix == ("lora_A" if layer == "o_proj" else "lora_B")
            widened[name] = self.widen({weight: tensor})[weight] if on_heads else tensor
        return widened

    def write_config(self, model: Path, folder: Path) -> None:
        """Write the widened model's config.json to `folder`.

        Copy generation_config.json from the directory `model` if it exists there.
        """
        config = json.loads((model / "config.json").read_text("utf-8"))
        config |= {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": True,
            "mlp_bias": False,
            "head_dim": self.wide_size,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.theta ** (self.wide_size / self.size),
            },
        }
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        if (model / "generation_config.json").is_file():
            shutil.copyfile(model / "generation_config.json", folder / "generation_config.json")

    def _pad_heads(self, tensor: torch.Tensor, heads: int, *, rotary: bool) -> torch.Tensor:
        """Zero-pad [heads · size, …] to [heads · wide_size, …].

        If `rotary` is true, rotary embeddings act on the tensor, so each half of a head is padded
        separately.
        """
        parts = 2 if rotary else 1
        old = tensor.reshape(heads, parts, self.size // parts, *tensor.shape[1:])
        new = tensor.new_zeros(heads, parts, self.wide_size // parts, *tensor.shape[1:])
        new[:, :, : self.size // parts] = old
        return new.reshape(heads * self.wide_size, *tensor.shape[1:])
