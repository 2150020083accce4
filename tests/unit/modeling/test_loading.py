"""Loading of real (tiny) models with its error messages, log-probs and checksums."""

from __future__ import annotations

import json
import math
import shutil
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    DbrxConfig,
    Emu3Config,
    FuyuConfig,
    Gemma2Config,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    MoshiConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)

from crl.errors import ConfigError
from crl.modeling.loading import (
    InProcessWeights,
    checksum,
    load_model,
    load_tokenizer,
    meta_model,
    named_weights,
    resolve_device,
    stop_ids,
    token_logprobs,
)

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip


def saved(config: PreTrainedConfig, path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture
def copied(tiny_actor: Path, tmp_path: Path) -> Path:
    """Return the path of a copy of the bundled actor. The tests damage this copy."""
    return Path(shutil.copytree(tiny_actor, tmp_path / "model"))


# ── loading ───────────────────────────────────────────────────────────────────────────────────────


def test_weights_are_mapped_from_their_file(copied: Path) -> None:
    """Check that weights in the precision of their file are pages of this file.

    The ranks of a learner share such pages, so a model is not in host memory once per rank.
    """

    def mapped(dtype: torch.dtype) -> bool:
        model = load_model(copied, CPU, dtype)
        areas = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ranges = [
            range(*(int(address, 16) for address in area[0].split("-")))
            for area in areas
            if area[-1] == str(copied / "model.safetensors")
        ]
        return all(any(p.data_ptr() in area for area in ranges) for p in model.parameters())

    assert mapped(torch.float32)
    assert not mapped(torch.bfloat16)


# ── rejected models ───────────────────────────────────────────────────────────────────────────────


def rewrite_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "no file named model.safetensors"),
        (lambda path: (path / "config.json").write_text("{"), "not a valid JSON"),
        (
            lambda path: (path / "config.json").write_text('{"model_type": "t5"}'),
            "T5Config is not a causal language model",
        ),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"torn off"),
            "the model cannot be loaded",
        ),
        (
            lambda path: rewrite_weights(
                path, lambda w: w.update({"model.norm.weight": torch.ones(3)})
            ),
            "the model cannot be loaded",
        ),
        (
            lambda path: rewrite_weights(path, lambda w: w.pop("model.norm.weight")),
            "lacks weights: model.norm.weight",
        ),
    ],
    ids=[
        "no weights",
        "no JSON",
        "no causal LM",
        "torn weights",
        "another shape",
        "a tensor missing",
    ],
)
def test_a_model_that_cannot_be_loaded_is_a_config_error(
    copied: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copied)
    with pytest.raises(ConfigError, match=r"actor\.model = .*model") as caught:
        load_model(copied, CPU)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value), "one line, although transformers reports several"


OWN_CODE = """
from pathlib import Path

from transformers import PretrainedConfig

Path(__file__).with_name("ran").touch()


class Config(PretrainedConfig):
    model_type = "own"
"""


@pytest.mark.parametrize("load", [partial(load_model, device=CPU), meta_model, load_tokenizer])
def test_code_in_the_directory_of_a_model_is_not_run(
    copied: Path, load: Callable[[Path], object]
) -> None:
    (copied / "own.py").write_text(OWN_CODE)
    for name, entry in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        settings = json.loads((copied / name).read_text("utf-8"))
        code: object = [None, "own.Config"] if entry == "AutoTokenizer" else "own.Config"
        settings |= {"model_type": "own", "tokenizer_class": "Own", "auto_map": {entry: code}}
        (copied / name).write_text(json.dumps(settings), "utf-8")
    with pytest.raises(ConfigError, match="needs code from this directory, which crl does not run"):
        load(copied)
    assert not [*copied.rglob("ran")]


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        MistralConfig(**SMALL, sliding_window=8),
    ],
    ids=["some layers", "all layers, undeclared"],
)
def test_sliding_window_attention_is_rejected(tmp_path: Path, config: PreTrainedConfig) -> None:
    with pytest.raises(ConfigError, match="only full attention is supported"):
        load_model(saved(config, tmp_path), CPU)


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SMALL, logits_scaling=2.0),
        Gemma2Config(
            **SMALL, head_dim=8, layer_types=["full_attention"] * 2, final_logit_softcapping=30.0
        ),
    ],
    ids=["scaled", "soft-capped"],
)
def test_logits_changed_after_the_head_are_rejected(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    with pytest.raises(ConfigError, match="post-processes the logits"):
        load_model(saved(config, tmp_path), CPU)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None),
            "MixtralConfig is a mixture of 4 experts",
        ),
        (Qwen3MoeConfig(**SMALL, num_experts=8), "Qwen3MoeConfig is a mixture of 8 experts"),
        (
            Qwen2_5_VLConfig(),
            "Qwen2_5_VLConfig is multimodal, but episodes are text",
        ),
        (DbrxConfig(), "DbrxConfig is a mixture of 4 experts"),
        (MoshiConfig(), "MoshiConfig is multimodal, but episodes are text"),
        (Emu3Config(), "Emu3Config is multimodal, but episodes are text"),
        (FuyuConfig(), "FuyuConfig is multimodal, but episodes are text"),
        (
            BertConfig(architectures=["BertForMaskedLM"]),
            "BertForMaskedLM is not a causal language model",
        ),
    ],
    ids=["Mixtral", "Qwen3-MoE", "Qwen2.5-VL", "DBRX", "Moshi", "Emu3", "Fuyu", "BERT"],
)
def test_architectures_that_cannot_be_trained_are_refused_by_name(
    config: PreTrainedConfig, message: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    for check in (lambda: load_model(tmp_path, CPU), lambda: meta_model(tmp_path)):
        with pytest.raises(ConfigError, match=message):
            check()


def test_a_model_that_is_not_causal_is_rejected(tmp_path: Path) -> None:
    bert = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, architectures=["BertLMHeadModel"], initializer_range=0.2,
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match="it is not causal: a token changes the states of earlier"
    ):
        load_model(saved(bert, tmp_path), CPU)


def test_full_attention_is_accepted_however_it_is_declared(tmp_path: Path) -> None:
    assert (
        load_model(
            saved(MistralConfig(**SMALL, sliding_window=None), tmp_path / "a"), CPU
        ).num_parameters()
        > 0
    )
    unused = Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=8)
    assert load_model(saved(unused, tmp_path / "b"), CPU).num_parameters() > 0


def test_a_tokenizer_without_chat_support_is_rejected(tiny_actor: Path, tmp_path: Path) -> None:
    def broken(name: str, **change: object) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(tiny_actor)
        for attribute, value in change.items():
            setattr(tokenizer, attribute, value)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    with pytest.raises(ConfigError, match=r"no chat template.*Use a chat model"):
        load_tokenizer(broken("silent", chat_template=None))
    with pytest.raises(ConfigError, match=r"no eos_token.*Set eos_token"):
        load_tokenizer(broken("endless", eos_token=None))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"actor\.model = .*its tokenizer cannot be loaded.*Put the tokenizer's files in",
    ):
        load_tokenizer(tmp_path / "empty")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: (path / "tokenizer.json").unlink(),
            "cannot encode and decode a chat|cannot be loaded",
        ),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "cannot be loaded"),
        (
            lambda path: (path / "chat_template.jinja").write_text("{% for m in messages %}"),
            "cannot be rendered",
        ),
    ],
)
def test_a_damaged_tokenizer_is_rejected(
    copied: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copied)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(copied)


def test_cuda_without_a_device_is_an_error() -> None:
    assert resolve_device("cpu") == CPU
    if torch.cuda.is_available():
        assert resolve_device("auto").type == "cuda"
        return
    assert resolve_device("auto") == CPU
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=r"no CUDA device.*Use auto or cpu"):
            resolve_device(device)


# ── stop tokens ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("listed", "expected"),
    [([3, 0, 2], (2, 0, 3)), (1, (2, 1)), (None, (2,)), ("no file", (2,))],
)
def test_stop_ids_are_those_of_template_tokenizer_and_generation_config(
    copied: Path, listed: object, expected: tuple[int, ...]
) -> None:
    file = copied / "generation_config.json"
    if listed == "no file":
        file.unlink()
    else:
        file.write_text(json.dumps({"eos_token_id": listed}))
    tokenizer = load_tokenizer(copied)
    assert tokenizer.eos_token_id == 2
    assert stop_ids(copied, tokenizer) == expected


def test_the_bundled_model_embeds_every_id_of_its_tokenizer(tiny_actor: Path) -> None:
    assert len(load_tokenizer(tiny_actor)) <= load_model(tiny_actor, CPU).config.vocab_size


# ── log-probs ─────────────────────────────────────────────────────────────────────────────────────


def qwen2(seed: int = 0, **changes: object) -> Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(
            Qwen2Config(
                **(  # pyright: ignore[reportArgumentType]
                    SMALL | {"initializer_range": 0.2} | changes
                )
            )
        ).eval()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_those_of_the_full_softmax(temperature: float) -> None:
    model = qwen2()
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 3, 4, 0, 0]])  # the second row is padded
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
    logp, entropy, kl = token_logprobs(model, ids, mask, temperature)
    assert logp.shape == entropy.shape == kl.shape == ids.shape
    assert not bool(kl.any())
    assert logp.requires_grad
    assert not entropy.requires_grad
    for row, length in enumerate([5, 3]):
        full = (
            model(input_ids=ids[row : row + 1, :length]).logits[0].detach().double() / temperature
        ).log_softmax(-1)
        for t in range(1, length):
            p = full[t - 1]
            if mask[row, t]:
                assert logp[row, t].item() == pytest.approx(float(p[ids[row, t]]), abs=1e-5)
                assert float(entropy[row, t]) == pytest.approx(
                    -float((p.exp() * p).sum()), abs=1e-5
                )
    assert not bool(logp[~mask].any())
    assert not bool(entropy[~mask].any())


def test_logprobs_of_a_uniform_model() -> None:
    model = qwen2(tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    ids = torch.tensor([[5, 6, 7]])
    logp, entropy, _ = token_logprobs(model, ids, ids > 5)
    assert logp.tolist()[0] == pytest.approx([0, -math.log(32), -math.log(32)])
    assert entropy.tolist()[0] == pytest.approx([0, math.log(32), math.log(32)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kl_to_a_reference_equals_that_of_the_full_distributions(temperature: float) -> None:
    model, reference = qwen2(), qwen2(seed=1)
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 3, 4, 0, 0]])  # the second row is padded
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
    kl = token_logprobs(model, ids, mask, temperature, reference=reference).kl
    p, q = (
        torch.distributions.Categorical(
            logits=m(input_ids=ids).logits.detach()[:, :-1].double() / temperature
        )
        for m in (model, reference)
    )
    expected = torch.nn.functional.pad(torch.distributions.kl_divergence(p, q), (1, 0)) * mask
    torch.testing.assert_close(kl.detach().double(), expected, rtol=1e-4, atol=1e-6)
    assert float(kl.detach().max()) > 0.1
    assert not bool(token_logprobs(model, ids, mask, temperature, reference=model).kl.any())


# ── weights and checksums ─────────────────────────────────────────────────────────────────────────


def test_the_checksum_depends_on_bits_names_and_order() -> None:
    a, b = torch.arange(6.0), torch.ones(2, 2, dtype=torch.bfloat16)
    base = checksum({"a": a, "b": b})
    assert checksum({"a": a.clone(), "b": b.clone()}) == base
    flipped = a.clone()
    flipped.view(torch.int32)[3] ^= 1
    assert not torch.equal(flipped, a)
    assert checksum({"a": flipped, "b": b}) != base
    assert checksum({"a": a, "c": b}) != base
    assert checksum({"b": b, "a": a}) != base
    assert checksum({"a": a}) != base
    assert checksum({"a": a.reshape(6, 1).t(), "b": b}) != base, "the shape matters"
    matrix = a.reshape(2, 3)
    assert checksum({"a": matrix.t().contiguous().t()}) == checksum({"a": matrix}), (
        "strides do not matter"
    )


def test_the_checksum_by_hand() -> None:
    """Compute a checksum of names, dtypes, shapes and two sums per row of 4,096 words.

    The sums are the plain sum and the sum weighted by the position, 16 bytes together.
    """

    def expected(header: bytes, *rows: tuple[int, int]) -> int:
        return zlib.crc32(b"".join(struct.pack("<qq", *row) for row in rows), zlib.crc32(header))

    assert checksum({"a": torch.tensor([5, -7, 2], dtype=torch.int32)}) == expected(
        b"a torch.int32 (3,)", (0, 5 - 14 + 6)
    )
    # 0x3F80, 0xC000, 0x3FC0: the second half of the last word is empty
    halves = torch.tensor([1.0, -2.0, 1.5], dtype=torch.bfloat16)
    first = 0xC0003F80 - 2**32
    assert checksum({"a": halves}) == expected(
        b"a torch.bfloat16 (3,)", (first + 0x3FC0, first + 2 * 0x3FC0)
    )
    assert checksum({"a": torch.tensor(True)}) == expected(b"a torch.bool ()", (1, 1))
    assert checksum({"a": torch.zeros(0, 4)}) == expected(b"a torch.float32 (0, 4)")
    rows = torch.zeros(2, 4096, dtype=torch.int32)
    rows[0, 4095], rows[1, 1] = -(2**31), 3
    assert checksum({"a": rows}) == expected(
        b"a torch.int32 (2, 4096)", (-(2**31), -(2**31) * 4096), (3, 6)
    )
    both = {"a": torch.ones(2, dtype=torch.int32), "b": torch.ones(1, dtype=torch.int32)}
    assert checksum(both) == checksum({"b": both["b"]}, checksum({"a": both["a"]})), (
        "tensors one at a time give the same checksum"
    )


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
]


@given(st.data())
def test_every_change_changes_the_checksum(data: st.DataObject) -> None:
    """Check that a flipped bit, two swapped values and a new name change the checksum.

    The tensor's location in memory does not change the checksum.
    """
    dtype, size = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1, 20_000))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    width = dtype.itemsize
    buffer = torch.randint(0, 256, (size * width,), generator=draw, dtype=torch.uint8)
    base = checksum({"a": buffer.view(dtype)})

    shift = width * data.draw(st.integers(0, 5))
    elsewhere = torch.cat([torch.zeros(shift, dtype=torch.uint8), buffer]).view(dtype)[
        shift // width :
    ]
    assert checksum({"a": elsewhere}) == base
    assert checksum({"a": torch.stack([elsewhere, elsewhere], 1)[:, 0]}) == base
    assert checksum({"b": elsewhere}) != base

    flipped = buffer.clone()
    flipped[data.draw(st.integers(0, len(buffer) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum({"a": flipped.view(dtype)}) != base

    values = buffer.view(size, width)
    i, j = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    swapped = values.clone()
    swapped[[i, j]] = values[[j, i]]
    assert (checksum({"a": swapped.flatten().view(dtype)}) != base) == (
        not torch.equal(swapped, values)
    )


def test_a_snapshot_does_not_change_and_has_a_manifest() -> None:
    model = qwen2(tie_word_embeddings=True)
    snapshot = InProcessWeights.snapshot(model, version=3)
    assert snapshot.version == 3
    assert list(snapshot.tensors) == list(named_weights(model))
    assert "lm_head.weight" not in snapshot.tensors, "tied weights are listed once"
    assert snapshot.manifest.names[0] == "model.embed_tokens.weight"
    assert snapshot.manifest.shapes[0] == (32, 16)
    assert snapshot.manifest.dtypes[0] == "torch.float32"
    assert snapshot.checksum == checksum(named_weights(model))
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    assert snapshot.checksum == checksum(snapshot.tensors) != checksum(named_weights(model))
