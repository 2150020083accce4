"""Models whose attention heads are too small for vLLM's CPU kernels, as models with larger heads that compute the same function.

A head of d numbers gets D: the new ones are 0, in queries, keys, values and the columns of the output projection. Rotary embeddings turn
the pairs (i, i + d/2) by the angle position · θ^(−2i/d); the pairs become (i, i + D/2), and with θ^(D/d) in θ's place their angle is as
before. Scores are divided by √D in √d's place, so queries are multiplied by √(D/d).
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
    """heads, key_heads: of queries, and of keys and values; size: numbers of a head; wide: as vLLM serves them; theta: of the rotary
    embeddings."""

    heads: int
    key_heads: int
    size: int
    wide: int
    theta: float

    @classmethod
    def of(cls, config: PreTrainedConfig, wide: int) -> WiderHeads | None:
        """None for a model that is not built as Qwen2 is, or whose rotary embeddings are of another kind."""
        rope = getattr(config, "rope_parameters", None) or {}
        if (
            config.model_type != "qwen2"
            or rope.get("rope_type") != "default"
            or config.use_sliding_window
        ):
            return None
        size = config.hidden_size // config.num_attention_heads
        return cls(
            config.num_attention_heads, config.num_key_value_heads, size, wide, rope["rope_theta"]
        )

    def widened(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of the larger model: a Llama with biases, which is Qwen2 with a head size of its own and a bias more."""
        wide: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if ".q_proj." in name:
                wide[name] = self._rows(tensor, self.heads, turned=True) * math.sqrt(
                    self.wide / self.size
                )
            elif ".k_proj." in name:
                wide[name] = self._rows(tensor, self.key_heads, turned=True)
            elif ".v_proj." in name:
                wide[name] = self._rows(tensor, self.key_heads, turned=False)
            elif name.endswith(".o_proj.weight"):
                wide[name] = self._rows(tensor.T, self.heads, turned=False).T.contiguous()
                wide[name.replace("weight", "bias")] = torch.zeros(
                    tensor.shape[0], dtype=tensor.dtype
                )
            else:
                wide[name] = tensor
        return wide

    def write_config(self, model: Path, folder: Path) -> None:
        """config.json of the larger model, beside which vLLM finds its weights."""
        config = json.loads((model / "config.json").read_text("utf-8"))
        config |= {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": True,
            "mlp_bias": False,
            "head_dim": self.wide,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.theta ** (self.wide / self.size),
            },
        }
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        if (model / "generation_config.json").is_file():
            shutil.copyfile(model / "generation_config.json", folder / "generation_config.json")

    def _rows(self, tensor: torch.Tensor, heads: int, *, turned: bool) -> torch.Tensor:
        """[heads · size, …] → [heads · wide, …]. turned: by rotary embeddings, so halves stay halves."""
        parts = 2 if turned else 1
        old = tensor.reshape(heads, parts, self.size // parts, *tensor.shape[1:])
        new = tensor.new_zeros(heads, parts, self.wide // parts, *tensor.shape[1:])
        new[:, :, : self.size // parts] = old
        return new.reshape(heads * self.wide, *tensor.shape[1:])
