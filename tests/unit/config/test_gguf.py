"""Models in GGUF files."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from crl.config import gguf as module
from crl.config.load import load
from crl.config.models import find_model, profile_of
from crl.errors import ConfigError
from crl.modeling.loading import load_model, load_tokenizer
from crl.planning import preflight

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


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_gguf(source: Path, file: Path) -> None:
    """Write the bundled model in directory `source` as a GGUF file."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    writer = gguf.GGUFWriter(file, "qwen2")
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
    writer.add_chat_template((source / "chat_template.jinja").read_text("utf-8"))
    names = dict(NAMES)
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.startswith("model.layers."):
            _, _, layer, *path, kind = name.split(".")
            names[name] = f"blk.{layer}.{LAYER_NAMES['.'.join(path)]}.{kind}"
        writer.add_tensor(names[name], tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("named", ["file", "directory"])
def test_a_gguf_model_computes_what_its_source_computes(
    named: str, tiny_actor: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_gguf(tiny_actor, folder / "tiny.gguf")
    name = str(folder / "tiny.gguf" if named == "file" else folder)
    path = find_model(name)
    assert path is not None
    assert path.parent == tmp_path / "cache" / "crl" / "gguf"
    assert profile_of(name) == "full"
    tokenizer, source_tokenizer = load_tokenizer(path), load_tokenizer(tiny_actor)
    text = "<|im_start|>user\nat 2 1 dark east<|im_end|>\n<|im_start|>assistant\n"
    ids = source_tokenizer.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.chat_template == source_tokenizer.chat_template
    cpu, batch = torch.device("cpu"), torch.tensor([ids])
    with torch.no_grad():
        logits = load_model(path, cpu)(batch).logits
        assert torch.equal(logits, load_model(tiny_actor, cpu)(batch).logits)
    assert [item.name for item in path.parent.iterdir()] == [path.name], "no partial conversions"


def test_a_gguf_model_in_a_run(tiny_actor: Path, tmp_path: Path) -> None:
    write_gguf(tiny_actor, tmp_path / "tiny.gguf")
    sets = [f"actor.model={tmp_path / 'tiny.gguf'}", "method=grpo",
            "actor.max_context_tokens=1024", "tasks.room.max_response_tokens=64"]  # fmt: skip
    config = load(["room"], sets=sets)
    assert Path(config.actor.model).parent == tmp_path / "cache" / "crl" / "gguf"
    preflight.require(config)


def test_a_file_is_converted_once_and_again_after_a_change(
    tiny_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        calls.append(file)
        shutil.copy(tiny_actor / "config.json", folder)

    monkeypatch.setattr(module, "_convert", convert)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    first = find_model(str(file))
    assert find_model(str(file)) == first
    assert calls == [file]
    file.write_bytes(b"22")
    assert find_model(str(file)) != first
    assert calls == [file, file]


def test_gguf_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            find_model(str(path), "extractor.model")
        assert caught.value.key == "extractor.model"
        return str(caught.value)

    assert "is neither a bundled model nor a directory" in error(tmp_path / "none.gguf")
    file = tmp_path / "a.gguf"
    file.write_bytes(b"no model")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert error(file) == (
            f"extractor.model = '{file}': a GGUF file needs the package gguf, which is not "
            "installed. Run pip install 'crl[gguf]'."
        )
    monkeypatch.setattr(module, "_convert", lambda file, folder: 1 / 0)
    assert "the GGUF file cannot be converted (division by zero)" in error(file)
    assert list((tmp_path / "cache" / "crl" / "gguf").iterdir()) == []
    (tmp_path / "b.gguf").write_bytes(b"")
    assert "contains several GGUF files (a.gguf, b.gguf)" in error(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "Set XDG_CACHE_HOME to a writable folder" in error(file)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF, torn off")
    with pytest.raises(ConfigError, match="the GGUF file cannot be converted"):
        find_model(str(tmp_path / "a.gguf"))
