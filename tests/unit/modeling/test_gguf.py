"""Models in GGUF files."""

from __future__ import annotations

import errno
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from crl.config.load import load, load_saved
from crl.config.models import model_size, profile_of, resolve_model
from crl.errors import ConfigError
from crl.modeling import gguf as module
from crl.modeling.gguf import converted, described
from crl.modeling.loading import load_model, load_tokenizer
from crl.monitor.plain import PlainMonitor
from crl.planning import plan, preflight
from crl.planning.model_size import planned_shape
from crl.run import main
from support.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def is_scratch(path: Path) -> bool:
    return path.name.startswith("crl-scratch-")


class _DiskFullError(Exception):
    """Error of safetensors for a full disk."""

    def __str__(self) -> str:
        return "Error while serializing: I/O error: No space left on device (os error 28)"


def test_conversions_of_killed_processes_are_removed(tiny_actor: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_actor, file)
    code = (
        "import os, sys; from pathlib import Path; from crl.modeling import gguf\n"
        "def killed(file, folder):\n"
        "    (folder / 'model.safetensors').write_bytes(b'1')\n"
        "    os.kill(os.getpid(), 9)\n"
        "gguf.convert = killed\n"
        "gguf.converted(Path(sys.argv[1]), 'actor.model', print)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=False, capture_output=True)
    cache = tmp_path / "cache" / "crl" / "gguf"
    (partial,) = cache.rglob("model.safetensors")
    path = converted(file, "actor.model", print)
    assert not partial.exists()
    assert list(cache.rglob("model.safetensors")) == [path / "model.safetensors"]


@pytest.mark.parametrize("named", ["file", "directory"])
def test_a_gguf_model_computes_what_its_source_computes(
    named: str, tiny_actor: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_gguf(tiny_actor, folder / "tiny.gguf")
    name = str(folder / "tiny.gguf" if named == "file" else folder)
    file, lines = resolve_model(name), []
    assert file == folder / "tiny.gguf"
    assert profile_of(name) == "full"
    path = converted(file, "actor.model", lines.append)
    assert path.parent == tmp_path / "cache" / "crl" / "gguf"
    assert lines == [f"converting {file} to float32 in {path}"]
    assert converted(file, "actor.model", lines.append) == path
    assert len(lines) == 1
    tokenizer, source_tokenizer = load_tokenizer(path), load_tokenizer(tiny_actor)
    text = "<|im_start|>user\nat 2 1 dark east<|im_end|>\n<|im_start|>assistant\n"
    ids = source_tokenizer.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.chat_template == source_tokenizer.chat_template
    cpu, batch = torch.device("cpu"), torch.tensor([ids])
    with torch.no_grad():
        logits = load_model(path, cpu)(batch).logits
        assert torch.equal(logits, load_model(tiny_actor, cpu)(batch).logits)
    assert [item.name for item in path.parent.iterdir() if not is_scratch(item)] == [path.name]


def test_the_description_of_a_file(tiny_actor: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_actor, file)
    path = described(file, "actor.model")
    assert model_size(path) is None
    assert planned_shape(str(file)) == planned_shape("tiny-actor"), "sizes of the header"
    description, source = load_tokenizer(path), load_tokenizer(tiny_actor)
    assert description.encode("at 2 1 dark east") == source.encode("at 2 1 dark east")
    model = converted(file, "actor.model", lambda line: None)
    assert described(file, "actor.model") == model, "the description is not needed any more"
    assert planned_shape(str(file)) == planned_shape("tiny-actor"), "sizes of the weights"
    assert described(model, "actor.model") == model
    assert converted(model, "actor.model", lambda line: None) == model


def test_a_gguf_model_in_a_run(
    tiny_actor: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "tiny.gguf", tmp_path / "run"
    write_gguf(tiny_actor, file)
    config = load(["room"], sets=[
        f"actor.model={file}", "method=grpo", "actor.max_context_tokens=1024",
        "tasks.room.max_turns=2", "tasks.room.max_response_tokens=8", "run.steps=1",
        "rollout.groups=2", "rollout.group_size=2",
        "tasks.room.eval.seen=2", "tasks.room.eval.unseen=2",
    ])  # fmt: skip
    assert config.actor.model == str(file)
    assert not (tmp_path / "cache").exists(), "the config does not read the file"
    preflight.require(config)
    texts: list[str] = []
    plan.dry_run(config, texts.append)
    assert f"actor      {file} (GGUF file, converted to float32)" in texts[0]
    assert "197,440 parameters; profile full" in texts[0]
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    main.train(config, run, command="", screen=PlainMonitor())
    captured = capfd.readouterr()
    assert captured.out.count(f"converting {file} to float32 in {tmp_path}/cache") == 1
    assert captured.err == ""
    assert load_saved(run).config.actor.model == str(file)
    assert model_size(run / "checkpoints" / "1" / "actor") == model_size(tiny_actor)
    shutil.rmtree(tmp_path / "cache")
    main.evaluate_run(run)
    assert not (tmp_path / "cache").exists(), "an evaluation loads the actor of the checkpoint"


def test_a_file_is_converted_once_and_again_after_a_change(
    tiny_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        calls.append(file)
        shutil.copy(tiny_actor / "config.json", folder)

    monkeypatch.setattr(module, "convert", convert)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    first = converted(file, "actor.model", print)
    assert converted(file, "actor.model", print) == first
    assert calls == [file]
    file.write_bytes(b"22")
    assert converted(file, "actor.model", print) != first
    assert calls == [file, file]


def test_gguf_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            converted(resolve_model(str(path), "extractor.model"), "extractor.model", print)
        assert caught.value.key == "extractor.model"
        return str(caught.value)

    assert "is neither a known model nor a directory" in error(tmp_path / "none.gguf")
    file = tmp_path / "a.gguf"
    file.write_bytes(b"no model")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert error(file) == (
            f"extractor.model = '{file}': it needs the extra 'gguf', which is not installed. "
            "Run pip install 'crl[gguf]'."
        )
    monkeypatch.setattr(module, "convert", lambda file, folder: 1 / 0)
    assert "the GGUF file cannot be converted (division by zero)" in error(file)
    folder = tmp_path / "cache" / "crl" / "gguf"
    (scratch,) = folder.iterdir()
    assert is_scratch(scratch)
    assert [item.name for item in scratch.iterdir()] == ["lock"], "no partial conversion"
    for full in (OSError(errno.ENOSPC, "No space left"), _DiskFullError()):
        monkeypatch.setattr(module, "convert", Mock(side_effect=full))
        assert f"Free some disk space in {folder}, or set XDG_CACHE_HOME." in error(file)
    (tmp_path / "b.gguf").write_bytes(b"")
    assert "contains several GGUF files (a.gguf, b.gguf)" in error(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "Set XDG_CACHE_HOME to a writable folder" in error(file)


def test_a_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF, torn off")
    with pytest.raises(ConfigError, match="the GGUF file cannot be converted"):
        described(file, "actor.model")
    with pytest.raises(ConfigError, match="the GGUF file cannot be converted"):
        converted(file, "actor.model", print)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"without": {"blk.1.attn_q.weight", "blk.0.ffn_up.weight"}},
            "lacks weights: model.layers.0.mlp.up_proj.weight, "
            "model.layers.1.self_attn.q_proj.weight",
        ),
        (
            {"without": {f"blk.{i}.attn_{name}.bias" for i in range(3) for name in "qkv"}},
            "lacks weights: model.layers.0.self_attn.k_proj.bias, "
            "model.layers.0.self_attn.q_proj.bias, model.layers.0.self_attn.v_proj.bias, …",
        ),
        (
            {"added": {"rope_freqs.weight": (8,), "blk.1.attn_q.scale": (4,)}},
            "has tensors that transformers does not read: blk.1.attn_q.scale, rope_freqs.weight",
        ),
        (
            {"without": {"output_norm.weight"}, "added": {"output_norm.weight": (3,)}},
            "has weights of another shape: model.norm.weight",
        ),
    ],
)
def test_files_whose_tensors_are_not_those_of_the_model(
    changes: dict[str, Any], reason: str, tiny_actor: Path, tmp_path: Path
) -> None:
    """Transformers would write random weights, or would drop tensors."""
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_actor, file, **changes)
    with pytest.raises(ConfigError) as caught:
        converted(file, "extractor.model", print)
    assert (caught.value.key, caught.value.value) == ("extractor.model", str(file))
    assert caught.value.reason.startswith(f"the GGUF file {reason}")
    assert "a directory in Hugging Face format" in caught.value.remedy
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_an_output_head_of_its_own(tiny_actor: Path, tmp_path: Path) -> None:
    vocabulary, hidden = load_model(tiny_actor, torch.device("cpu")).lm_head.weight.shape
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_actor, file, added={"output.weight": (vocabulary, hidden)})
    model = load_model(converted(file, "actor.model", print), torch.device("cpu"))
    assert bool((model.lm_head.weight == 1).all())


def test_a_suffix_in_capitals(tiny_actor: Path, tmp_path: Path) -> None:
    write_gguf(tiny_actor, file := tmp_path / "TINY.GGUF")
    for name in (file, tmp_path):
        assert resolve_model(str(name)) == file
    assert planned_shape(str(file)) == planned_shape("tiny-actor")
    assert (converted(file, "actor.model", print) / "model.safetensors").is_file()
