"""Weights in a file: contents of the file, loading by an engine, and removal of the file."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from crl.engines.torch import TorchEngine
from crl.errors import EngineError
from crl.modeling import weights as sync
from crl.modeling.loading import checksum, named_weights
from crl.modeling.weights import FileWeights, manifest_of, sibling_path, weights_path, write_tensors
from crl.run.sync import sync_weights
from crl.scratch import scratch_folder


def qwen2(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=24,
        tie_word_embeddings=tied, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).view(2, 3).t(),  # not contiguous
    "half": torch.tensor([1.5, -2.25, float("inf")], dtype=torch.bfloat16),
    "number": torch.tensor(3.0),
    "nothing": torch.zeros(0, 4),
    "counts": torch.tensor([1, -(2**40)]),
}


def test_the_written_file_is_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    weights = FileWeights.write(path, TENSORS, version=7)
    assert weights.checksum == checksum(TENSORS)
    for read in (load_file(path), weights.tensors):
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor), name
    assert tuple(weights.tensors) == weights.manifest.names == tuple(TENSORS)
    weights.discard()
    weights.discard()
    assert not path.exists()


def test_a_tensor_that_differs_from_the_manifest_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with pytest.raises(ValueError, match=r"half is torch\.float32 \(3,\), .* says torch\.bfloat16"):
        write_tensors(path, manifest_of(TENSORS), (TENSORS | {"half": torch.zeros(3)}).values())
    assert not path.exists()


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    def failing():
        yield torch.zeros(3, 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "weights", manifest_of(TENSORS), failing())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [True, False])
async def test_an_engine_loads_weights_from_a_file(tmp_path: Path, tied: bool) -> None:
    new, own = qwen2(1, tied=tied), qwen2(tied=tied)
    engine = TorchEngine(own, max_batch=2, max_context=64)

    class Learner:
        async def publish(self) -> FileWeights:
            return FileWeights.write(tmp_path / "weights", named_weights(new), version=3)

    size = await sync_weights(Learner(), engine)  # pyright: ignore[reportArgumentType]
    assert size == sum(tensor.nbytes for tensor in named_weights(new).values())
    assert engine.version == 3
    assert checksum(named_weights(own)) == checksum(named_weights(new))
    assert not os.listdir(tmp_path)
    await engine.aclose()


async def test_a_file_with_a_different_checksum_ends_the_engine(tmp_path: Path) -> None:
    weights = FileWeights.write(tmp_path / "weights", named_weights(qwen2(1)), version=1)
    engine = TorchEngine(qwen2(), max_batch=2, max_context=64)
    with pytest.raises(EngineError, match="different checksum"):
        await engine.update_weights(replace(weights, checksum=weights.checksum ^ 1))
    await engine.aclose()


def test_shared_memory_is_used_if_the_weights_fit_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the file is in the scratch folder of this process.

    If this process is killed, a later process removes the folder.
    """
    monkeypatch.setattr(sync, "SHARED_MEMORY", tmp_path)
    path = weights_path(1000)
    assert path.parent == scratch_folder(tmp_path)
    assert weights_path(1000) != path
    assert sibling_path(path) != path
    assert sibling_path(path).parent == path.parent
    assert weights_path(1 << 60).parent == scratch_folder()
    monkeypatch.setattr(sync, "SHARED_MEMORY", tmp_path / "absent")
    assert weights_path(1).parent == scratch_folder()
