"""Sizes of models for plans: counted, published and hypothetical ones."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from crl.cli.main import app
from crl.config.models import model_size
from crl.config.models.shapes import AttentionShape, read_shape
from crl.errors import ConfigError
from crl.planning import gpu_plan, plan
from crl.planning.model_size import QWEN25_SHAPES, dense_shape, parse_size, planned_shape

# ── models at hand ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", ["tiny_actor", "tiny_extractor", "random_qwen3"])
def test_a_model_built_without_weights_has_the_sizes_of_its_files(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(model)
    counted = planned_shape(str(source))
    size = model_size(source)
    assert size
    assert counted == read_shape(source, size.parameters, "actor.model"), "the safetensors headers"
    shutil.copy(source / "config.json", tmp_path)
    assert planned_shape(str(tmp_path)) == counted, "config.json alone"


def test_an_encoder_built_without_weights(random_bert: Path, tmp_path: Path) -> None:
    counted = planned_shape(str(random_bert), "embedder.model", encoder=True)
    shutil.copy(random_bert / "config.json", tmp_path)
    assert planned_shape(str(tmp_path), "embedder.model", encoder=True) == counted
    assert (counted.layers, counted.hidden, counted.max_context) == (2, 32, 64)
    assert counted.attention.kv_heads == 4


def test_an_architecture_with_other_names_in_its_config(tmp_path: Path) -> None:
    GPT2Config(
        n_layer=2, n_embd=48, n_head=3, n_positions=96, vocab_size=100
    ).save_pretrained(tmp_path)  # fmt: skip
    shape = planned_shape(str(tmp_path))
    # Embeddings: 100 · 48 and 96 · 48. A layer: 12 · 48² weights, 9 · 48 biases, two norms of 96.
    # A last norm of 96. The head is tied.
    assert shape.parameters == 196 * 48 + 2 * (12 * 48**2 + 9 * 48 + 4 * 48) + 2 * 48
    assert (shape.layers, shape.hidden, shape.intermediate, shape.max_context) == (2, 48, 192, 96)
    assert shape.attention == AttentionShape(heads=3, kv_heads=3, head_dim=16)
    assert not shape.half_precision


def test_sizes_of_a_bundled_model(tiny_actor: Path) -> None:
    shape = planned_shape("tiny-actor")
    config = json.loads((tiny_actor / "config.json").read_text())
    assert (shape.parameters, shape.layers, shape.hidden) == (
        197_440,
        config["num_hidden_layers"],
        config["hidden_size"],
    )
    assert shape.attention.head_dim == config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )


def test_a_model_that_nothing_describes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="so its memory use cannot be planned"):
        planned_shape(str(tmp_path))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + b"\0" * 8
    )
    with pytest.raises(ConfigError, match="the sizes of the model cannot be read"):
        planned_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="Restore the config"):
        read_shape(tmp_path / "nowhere", 1, "actor.model")


# ── hypothetical models ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("1.5B", 1_500_000_000),
        ("350M", 350_000_000),
        ("7b", 7_000_000_000),
        (" 0.5 B ", 500_000_000),
    ],
)
def test_sizes_as_texts(text: str, parameters: int) -> None:
    assert parse_size(text) == parameters


@pytest.mark.parametrize("text", ["", "B", "1.5", "1,5B", "1.5T", "-1B", "1e9", "1.5BB", "x1B"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--size = .*: is not a number of parameters") as caught:
        parse_size(text)
    assert caught.value.remedy == "Write for example 1.5B or 350M"


@pytest.mark.parametrize("text", ["1M", "2000B", "0B"])
def test_sizes_out_of_range(text: str) -> None:
    with pytest.raises(ConfigError, match="is outside the range of 10M to 1000B"):
        parse_size(text)


@pytest.mark.parametrize("shape", QWEN25_SHAPES, ids=lambda shape: f"{shape.parameters / 1e9:.1f}B")
def test_the_shapes_of_the_family(shape) -> None:
    """Check the parameters of the table's shapes, and that the rule returns the same shapes."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.attention.heads, num_key_value_heads=shape.attention.kv_heads,
        intermediate_size=shape.intermediate, tie_word_embeddings=shape.parameters < 5e9,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert dense_shape(shape.parameters, 99) == replace(shape, max_context=99)


def test_a_size_between_two_models() -> None:
    # 350 M = 151,936 h + c h² with c = (494,032,768 − 151,936 · 896) / 896² = 445.8: h = 731.9,
    # which is 11.4 heads of 64, and with two key-value heads 12.
    shape = dense_shape(350_000_000, 4096)
    assert (shape.layers, shape.hidden) == (24, 768)
    assert (shape.attention.heads, shape.attention.kv_heads) == (12, 2)
    assert shape.intermediate == round(4864 * 768 / 896)
    assert (shape.parameters, shape.max_context) == (350_000_000, 4096)


@pytest.mark.parametrize("billions", [0.01, 0.1, 1, 5, 20, 200, 1000])
def test_a_hypothetical_model_is_consistent(billions: float) -> None:
    parameters = round(billions * 1e9)
    shape = dense_shape(parameters, 8192)
    assert shape.attention.heads % shape.attention.kv_heads == 0
    assert shape.hidden == shape.attention.heads * shape.attention.head_dim
    mlp, attention = 3 * shape.hidden * shape.intermediate, 2 * shape.hidden * shape.hidden
    keys = 2 * shape.hidden * shape.attention.kv_heads * shape.attention.head_dim
    built = shape.layers * (mlp + attention + keys) + 2 * shape.vocabulary * shape.hidden
    if billions >= 1:
        assert 0.7 < built / parameters < 1.4


# ── the command line ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def no_gpus_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for module in (gpu_plan, plan):
        monkeypatch.setattr(module, "visible_gpus", list)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def crl(*args: str):
    return CliRunner().invoke(app, ["train", "--tasks", "room", *args])


def test_a_dry_run_for_a_size() -> None:
    result = crl("--preset", "node8", "--dry-run", "--size", "14B")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert (
        "for hypothetical models of 14,000,000,000 parameters as actor and extractor: "
        "48 layers of 5120, 40 heads, 8 key-value heads"
    ) in lines
    assert any(line.startswith("actor learner       GPU 2–3  14.0 B, DeepSpeed") for line in lines)
    assert (
        "── models ──\n"
        "actor      hypothetical, 14,000,000,000 parameters (--size)\n"
        "extractor  hypothetical, 14,000,000,000 parameters (--size)\n"
    ) in result.output
    assert "missing on this machine" not in result.output
    assert "time of a step      about" in result.output


def test_a_size_that_does_not_fit() -> None:
    result = crl("--preset", "gpu1", "--dry-run", "--size", "7B", "--method", "grpo")
    assert result.exit_code == 2
    assert (
        "── GPUs ──\nfor hypothetical models of 7,000,000,000 parameters as actor:" in result.output
    )
    assert result.stderr.startswith("error: gpus = 1: GPU 0 needs")
    assert "time of a step" not in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--size", "1.5B"], "--size = '1.5B': only applies to a dry run. Add --dry-run."),
        (
            ["--size", "1.5B", "--dry-run"],
            "--size = '1.5B': is only used to plan GPUs, but the run",
        ),
        (["--size", "big", "--dry-run"], "--size = 'big': is not a number of parameters"),
    ],
)
def test_sizes_that_are_refused(args: list[str], message: str) -> None:
    result = crl(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
