"""Hugging Face causal language models as engines and learners use them: loading, weights by name, log-probs of given tokens."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from crl.errors import ConfigError
from crl.protocols import WeightManifest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def resolve_device(device: str, key: str = "device") -> torch.device:
    """`auto` is CUDA where there is one. Raises `ConfigError` when CUDA is asked for and absent."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(key, device, "torch finds no CUDA device", "use auto or cpu")
    return torch.device(device)


def load_tokenizer(path: Path, key: str = "actor.model") -> PreTrainedTokenizerBase:
    """The tokenizer beside a model. Raises `ConfigError` when it cannot render, encode and decode a chat, or ends no turn."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a broken file fails in many ways
        reason = f"its tokenizer cannot be loaded ({first_line(error)})"
        raise ConfigError(key, str(path), reason, "put the tokenizer's files there") from error
    if not tokenizer.chat_template:
        raise ConfigError(key, str(path), "its tokenizer has no chat template", "use a chat model, or add a chat_template")
    if tokenizer.eos_token_id is None:
        raise ConfigError(key, str(path), "its tokenizer has no eos_token", "set eos_token to the end-of-turn token")
    _require_chat(tokenizer, path, key)
    return tokenizer


def _require_chat(tokenizer: PreTrainedTokenizerBase, path: Path, key: str) -> None:
    """Without its files transformers makes an empty tokenizer, and a template's mistakes show when it is rendered."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Go north?"}], tokenize=False, add_generation_prompt=True)
    except Exception as error:
        reason = f"its chat template cannot be rendered ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(key, str(path), reason, "mend the chat_template") from error
    if "Go north?" not in str(text) or "north" not in str(tokenizer.decode(tokenizer.encode(str(text), add_special_tokens=False))):
        raise ConfigError(key, str(path), "its tokenizer does not encode a chat", "put the tokenizer's files there")


def silence_transformers() -> None:
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()  # of loading, and of saving later: they would litter a run's stderr
    set_verbosity_error()  # its reports of bad checkpoints too: they become one line here


def load_model(path: Path, device: torch.device, dtype: torch.dtype = torch.float32, *, key: str = "actor.model") -> PreTrainedModel:
    """A causal LM for sampling and training; `key`: the setting that named it.

    Raises `ConfigError` for a model that cannot be loaded in full, that keeps no full-attention cache in every layer (the
    in-process engine could not serve it), or that changes its logits after the output head (log-probs would be wrong).
    """
    from transformers import AutoModelForCausalLM

    silence_transformers()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            path, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # a broken file fails in many ways
        reason = f"it cannot be loaded ({first_line(error)})"
        raise ConfigError(key, str(path), reason, "give a directory with a causal LM") from error
    if missing := sorted(report["missing_keys"]):  # transformers would go on with random numbers in their place
        reason = f"its checkpoint lacks {missing[0]} ({len(missing)} missing in all)"
        raise ConfigError(key, str(path), reason, "download or make the model again")
    if kinds := _other_attention(model.config):
        raise ConfigError(key, str(path), f"it has layers of {kinds}", "the torch engine serves full attention only")
    model = model.to(device).eval()
    _require_plain_head(model, path, key)
    return model


def _other_attention(config: PreTrainedConfig) -> str:
    """The kinds of the model's layers that are not full attention, for people; empty if all are."""
    declared = getattr(config, "layer_types", None)
    if declared is None and getattr(config, "sliding_window", None) is not None:  # Mistral, Phi-3: every layer, undeclared
        declared = ["sliding_attention"]
    return ", ".join(sorted(set(declared or ()) - {"full_attention"}))


def first_line(error: Exception) -> str:
    """What went wrong, without the pages that transformers appends."""
    return str(error).strip().split("\n")[0]


def _require_plain_head(model: PreTrainedModel, path: Path, key: str) -> None:
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    with torch.no_grad():
        plain = head_logits(model, hidden_states(model, ids))
        full = model(input_ids=ids, use_cache=False).logits
    if not torch.equal(plain, full):
        raise ConfigError(key, str(path), "it post-processes the logits of its output head", "use a model with a plain head")


def stop_ids(model_path: Path, tokenizer: PreTrainedTokenizerBase, key: str = "actor.model") -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's and those of the model's generation config."""
    from transformers import GenerationConfig

    ids: list[Any] = [tokenizer.eos_token_id]
    if (model_path / "generation_config.json").is_file():
        try:
            listed = GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id
        except Exception as error:
            reason = f"its generation_config.json cannot be read ({first_line(error)})"
            raise ConfigError(key, str(model_path), reason, "mend or remove that file") from error
        ids += listed if isinstance(listed, list) else [listed]
    return tuple(sorted({i for i in ids if i is not None}))


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states [b, t, h] of right-padded ids [b, t]; causality alone keeps padding away from real tokens."""
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    head = model.get_output_embeddings()
    assert head is not None
    return head(hidden)


class TokenFigures(NamedTuple):
    """Of given tokens, float32 [b, t], 0 where they were not asked for. entropy: of the distributions, without gradient; kl:
    their exact KL(model ‖ reference) in nats, 0 without a reference."""

    logp: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor


def token_logprobs(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0,
    *, reference: PreTrainedModel | None = None,
) -> TokenFigures:  # fmt: skip
    """Log-probs of the tokens that `mask` selects, and figures of the distributions that they come from, at `temperature`.

    ids [b, t] right-padded, mask bool [b, t] (never true in column 0). Logits are computed at selected positions only.
    """
    log_p = _distributions(model, ids, mask, temperature)
    logp = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    entropy, kl = torch.zeros_like(logp), torch.zeros_like(logp)
    logp[mask] = log_p.gather(-1, ids[mask][:, None])[:, 0]
    with torch.no_grad():
        entropy[mask] = -(log_p.exp() * log_p).sum(-1)
    if reference is not None:
        with torch.no_grad():
            held_to = _distributions(reference, ids, mask, temperature)
        kl[mask] = (log_p.exp() * (log_p - held_to)).sum(-1)
    return TokenFigures(logp, entropy, kl)


def _distributions(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    """log p [n, V] of the n selected tokens' distributions."""
    hidden = hidden_states(model, ids)
    return (head_logits(model, hidden[:, :-1][mask[:, 1:]]).float() / temperature).log_softmax(-1)


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's parameters by name; tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def checksum(weights: Mapping[str, torch.Tensor], crc: int = 0) -> int:
    """CRC-32 over names and bytes, in order: equal weights, equal number. crc: of the weights before these."""
    for name, tensor in weights.items():
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data, crc)
    return crc


@dataclass(frozen=True)
class InProcessWeights:
    """A `PublishHandle` within one process: a snapshot that engines copy from."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    checksum: int
    transport: str = "in-process"

    @classmethod
    def snapshot(cls, model: PreTrainedModel, version: int) -> InProcessWeights:
        tensors = {name: tensor.clone() for name, tensor in named_weights(model).items()}
        return cls(version, tensors, checksum(tensors))

    @property
    def manifest(self) -> WeightManifest:
        named = self.tensors.items()
        return WeightManifest(tuple(self.tensors), tuple(str(t.dtype) for _, t in named), tuple(tuple(t.shape) for _, t in named))

    async def done(self) -> None:
        """The snapshot was complete when it was made."""

    def discard(self) -> None:
        """It goes with its last user."""
