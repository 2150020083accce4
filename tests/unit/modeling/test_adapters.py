"""Base models of saved adapters: their SHA-256, and other models in their place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from crl.config.models import adapter_base
from crl.errors import ConfigError
from crl.modeling.adapters import (
    BaseModel,
    base_has_moved,
    recorded_precision,
    require_same_base,
    weights_sha256,
    with_base,
    write_base_name,
)

KEY = "actor.model"


def adapter(folder: Path, base: str, **metadata: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    tensors = {"base_model.model.q_proj.lora_A.weight": torch.ones(2, 3)}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"} | metadata)
    return folder


def test_the_sha256_of_weights(tiny_actor: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_actor, copied := tmp_path / "copy")
    (copied / "optimizer.safetensors").write_bytes(b"no weights of the model")
    assert weights_sha256(copied) == weights_sha256(tiny_actor)
    first = adapter(tmp_path / "first", str(copied))
    second = adapter(tmp_path / "second", str(first))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    found = {weights_sha256(path) for path in (tiny_actor, first, second, file)}
    assert len(found) == 4, "an adapter's own weights count"
    with (copied / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x01")
    assert not {weights_sha256(path) for path in (copied, first, second)} & found


def test_another_model_is_not_taken_for_the_base(tiny_actor: Path, tmp_path: Path) -> None:
    base = BaseModel.of(tiny_actor)
    saved = adapter(tmp_path / "saved", str(tmp_path / "gone"), base_sha256=base.sha256)
    assert base_has_moved(saved)
    require_same_base(saved, tiny_actor, KEY)
    other = adapter(tmp_path / "other", str(tiny_actor))
    with pytest.raises(ConfigError, match=r"other.*is not the base model of .*saved: their w"):
        require_same_base(saved, other, KEY)
    reason = r"cannot be compared .* which records no SHA-256\. Move the base model back to "
    with pytest.raises(ConfigError, match=reason):
        require_same_base(other, tiny_actor, KEY)
    found = with_base(saved, tiny_actor)
    assert (base_has_moved(found), base_has_moved(saved)) == (False, True)
    assert weights_sha256(found) == weights_sha256(with_base(saved, tiny_actor))
    assert adapter_base(found) == tiny_actor
    write_base_name(saved, tiny_actor)
    assert not base_has_moved(saved)


def test_damaged_records(tiny_actor: Path, tmp_path: Path) -> None:
    odd = adapter(tmp_path / "odd", str(tiny_actor), base_precision="int8")
    with pytest.raises(ConfigError, match="names the unknown precision 'int8'"):
        recorded_precision(odd)
    (odd / "adapter_config.json").write_text('{"base_model_name_or_path": 1}')
    with pytest.raises(ConfigError, match=r"cannot be read .*base_model_name_or_path is 1"):
        base_has_moved(odd)
