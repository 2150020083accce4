"""GGUF files of the bundled models."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""GGUF's names of a layer's tensors."""

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def write_gguf(
    source: Path,
    file: Path,
    *,
    without: Collection[str] = (),
    added: Mapping[str, Sequence[int]] | None = None,
    experts: int = 0,
) -> None:
    """Write a bundled model in the directory `source`, or a copy of one, as a GGUF file.

    A copy may lack the chat template.

    `without`: names in the GGUF file of tensors that are left out. `added`: sizes of further
    tensors, by name. `experts`: number of experts that the header declares; 0 = a dense model.
    """
    config = json.loads((source / "config.json").read_text("utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    writer = gguf.GGUFWriter(file, "qwen2moe" if experts else "qwen2")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(1)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    texts = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts |= special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([texts[i] for i in range(config["vocab_size"])])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    types = [control if i in special else normal for i in range(config["vocab_size"])]
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    if (template := source / "chat_template.jinja").exists():
        writer.add_chat_template(template.read_text("utf-8"))
    names = dict(NAMES)
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.startswith("model.layers."):
            _, _, layer, *path, kind = name.split(".")
            names[name] = f"blk.{layer}.{LAYER_NAMES['.'.join(path)]}.{kind}"
        if names[name] not in without:
            writer.add_tensor(names[name], tensor.astype(np.float32))
    for name, size in (added or {}).items():
        writer.add_tensor(name, np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
