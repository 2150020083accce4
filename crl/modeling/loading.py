"""Hugging Face causal language models for engines and learners.

This module loads and checks models, returns their weights by name, and computes log-probs of given
tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from crl.errors import ConfigError
from crl.modeling import MAX_LOGITS
from crl.modeling.lora import has_adapter, merged_weights, without_adapter
from crl.modeling.packing import Gather, Packing, enable_packing, reads_packed
from crl.modeling.tokens import PROBE, ChatRenderer
from crl.modeling.truncation import KeptTokens
from crl.protocols import WeightManifest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

OWN_FILES: Mapping[str, bool] = MappingProxyType(
    {"local_files_only": True, "trust_remote_code": False}
)
"""Arguments of transformers for a model's directory: no downloads, and none of its code is run."""

CHECKSUM_ROW_WORDS = 4096
"""Number of 32-bit words that a checksum sums together."""


def resolve_device(device: str, key: str = "device") -> torch.device:
    """Return the torch device. `auto` is CUDA if it is available, else the CPU.

    Raise `ConfigError` if `device` is a CUDA device and CUDA is not available.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(key, device, "torch finds no CUDA device", "Use auto or cpu")
    return torch.device(device)


def load_tokenizer(path: Path, key: str = "actor.model") -> PreTrainedTokenizerBase:
    """Load the tokenizer from a model's directory.

    Raise `ConfigError` if the tokenizer cannot be loaded, has no chat template or no eos token, or
    cannot render, encode and decode a chat.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **OWN_FILES)
    except Exception as error:  # a broken file raises many types of errors
        remedy = "Put the tokenizer's files in this directory"
        raise not_loadable(key, path, error, remedy, part="its tokenizer") from error
    if not tokenizer.chat_template:
        raise ConfigError(
            key,
            str(path),
            "its tokenizer has no chat template",
            "Use a chat model, or add a chat_template to the tokenizer",
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            key,
            str(path),
            "its tokenizer has no eos_token",
            "Set eos_token to the token that ends a turn",
        )
    _require_chat(tokenizer, path, key)
    return tokenizer


def _require_chat(tokenizer: PreTrainedTokenizerBase, path: Path, key: str) -> None:
    """Raise `ConfigError` if the tokenizer cannot render, encode and decode a chat.

    If files are missing, transformers creates an empty tokenizer. Errors in a template only appear
    when it is rendered.
    """
    own_file = (path / "chat_template.jinja").is_file()
    file = "chat_template.jinja" if own_file else "chat_template in tokenizer_config.json"
    try:
        text = ChatRenderer(tokenizer, ()).text(PROBE)
    except Exception as error:  # a template raises errors of many types
        reason = (
            "its chat template cannot be rendered with messages of user and assistant in turn "
            f"({type(error).__name__}: {first_line(error)})"
        )
        raise ConfigError(key, str(path), reason, f"Fix {file}") from error
    if omitted := [segment.role for segment in PROBE if segment.text not in text]:
        reason = f"its chat template omits or changes a message of the {omitted[0]}"
        raise ConfigError(key, str(path), reason, f"Fix {file}")
    if "north" not in str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))):
        raise ConfigError(
            key,
            str(path),
            "its tokenizer cannot encode and decode a chat",
            "Put the tokenizer's files in this directory",
        )


def silence_transformers() -> None:
    """Disable the progress bars of transformers and all its log messages except errors."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()  # bars of loading and saving would clutter the stderr of a run
    set_verbosity_error()  # `load_model` reports bad checkpoints in one line


def load_model(
    path: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    key: str = "actor.model",
) -> PreTrainedModel:
    """Load a causal LM for sampling and training. `key` is the setting that names the model.

    Raise `ConfigError` if:

    * the model cannot be loaded, or weights are missing in its checkpoint,
    * its architecture cannot be trained correctly (`require_trainable`), or it is not causal,
    * a layer does not use full attention, because the in-process engine could not serve it,
    * the output head is not linear, or the model changes the logits after the output head, because
      log-probs would be wrong.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    silence_transformers()
    try:
        config = AutoConfig.from_pretrained(path, **OWN_FILES)
    except Exception as error:  # a broken file raises many types of errors
        raise not_loadable(key, path, error) from error
    require_trainable(config, path, key)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,  # pyright: ignore[reportGeneralTypeIssues]
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            **OWN_FILES,
        )
    except Exception as error:  # a broken file raises many types of errors
        raise not_loadable(key, path, error) from error
    # Transformers initialises missing weights with random numbers.
    if missing := sorted(report["missing_keys"]):
        reason = f"its checkpoint lacks weights: {missing[0]} ({len(missing)} in total)"
        raise ConfigError(key, str(path), reason, "Download or create the model again")
    require_supported(model, path, key)
    model = model.to(device).eval()
    _require_causal(model, path, key)
    _require_unchanged_logits(model, path, key)
    return model


def meta_model(path: Path, key: str = "actor.model", *, encoder: bool = False) -> PreTrainedModel:
    """Return the model of a directory without its weights: all tensors are on the meta device.

    Only config.json is read. `encoder`: the model is a text encoder, not a causal LM. Raise
    `ConfigError` as `load_model` does if config.json does not describe such a model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    silence_transformers()
    try:
        config = AutoConfig.from_pretrained(path, **OWN_FILES)
    except Exception as error:  # a broken file raises many types of errors
        raise not_loadable(key, path, error) from error
    if not encoder:
        require_trainable(config, path, key)
    try:
        with init_empty_weights(include_buffers=True):
            kind = AutoModel if encoder else AutoModelForCausalLM
            return kind.from_config(config, trust_remote_code=False)
    except Exception as error:  # a broken file raises many types of errors
        raise not_loadable(key, path, error) from error


def not_loadable(
    key: str, path: Path, error: Exception,
    remedy: str = "Give a directory with a causal language model", *, part: str = "the model",
) -> ConfigError:  # fmt: skip
    """Return the error for a part of a model's directory that transformers cannot load."""
    reason = f"{part} cannot be loaded ({first_line(error)})"
    if "trust_remote_code" in str(error):
        reason = f"{part} needs code from this directory, which crl does not run"
        remedy = "Use a model whose architecture is part of transformers"
    return ConfigError(key, str(path), reason, remedy)


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in a config, or in a part of it."""
OTHER_INPUTS = (
    "vision_config", "audio_config", "speech_config", "vq_config", "audio_encoder_config",
)  # fmt: skip
"""Names of parts of a config that read something else than text."""
MULTIMODAL_TYPES = ("fuyu",)
"""Types of multimodal models whose config has none of these parts."""


def require_trainable(config: PreTrainedConfig, path: Path, key: str) -> None:
    """Raise `ConfigError` for an architecture that would be trained wrongly or not at all.

    Mixtures of experts: the trainer's router may choose other experts than the engine's did, and
    crl does not replay its choices, so log-probs would be those of another policy. Multimodal
    models and models that are not causal language models cannot play text episodes.
    """
    from transformers import PreTrainedConfig

    text: Any = config.get_text_config(decoder=True)
    name = (config.architectures or [type(config).__name__])[0]
    parts = [text, *(p for p in vars(text).values() if isinstance(p, PreTrainedConfig))]
    experts = max(
        number
        for part in parts
        for count in EXPERT_COUNTS
        if isinstance(number := getattr(part, count, None) or 0, int)
    )
    reason = ""
    if (
        any(getattr(config, part, None) is not None for part in OTHER_INPUTS)
        or config.model_type in MULTIMODAL_TYPES
    ):
        reason = f"{name} is multimodal, but episodes are text"
    elif config.is_encoder_decoder or name.endswith(NOT_CAUSAL):
        reason = f"{name} is not a causal language model"
    elif experts > 1:
        reason = (
            f"{name} is a mixture of {experts} experts: in training, its router may choose other "
            "experts than in sampling, and crl does not replay the router's choices"
        )
    if reason:
        raise ConfigError(key, str(path), reason, "Use a dense causal language model")


NOT_CAUSAL = ("ForMaskedLM", "Classification", "ForQuestionAnswering", "ForPreTraining")
"""Ends of the names of architectures that are not causal language models."""


@torch.no_grad()
def _require_causal(model: PreTrainedModel, path: Path, key: str) -> None:
    """Raise `ConfigError` if a token changes the hidden states of earlier tokens."""
    ids = torch.arange(8, device=model.device)[None] % model.config.vocab_size
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % model.config.vocab_size
    before, after = (hidden_states(model, tokens)[0, :-1] for tokens in (ids, changed))
    tolerance = 1e-4 if model.dtype == torch.float32 else 2e-2
    if not bool((after - before).norm() <= tolerance * before.norm()):
        reason = "it is not causal: a token changes the states of earlier tokens"
        raise ConfigError(key, str(path), reason, "Use a dense causal language model")


def require_supported(model: PreTrainedModel, path: Path, key: str) -> None:
    """Raise `ConfigError` if a layer does not use full attention, or if the head is not linear.

    The weights are not read, so `model` may be on the meta device.
    """
    if kinds := _unsupported_attention(model.config):
        raise ConfigError(
            key,
            str(path),
            f"only full attention is supported, but the model has layers of {kinds}",
            "Use a model with full attention in all layers",
        )
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        raise ConfigError(
            key,
            str(path),
            "its output head is not a linear layer",
            "Use a model with a linear output head",
        )


def _unsupported_attention(config: PreTrainedConfig) -> str:
    """Return the kinds of layers without full attention as text; an empty string if none exist."""
    declared = getattr(config, "layer_types", None)
    # Mistral and Phi-3 use the sliding window in all layers but do not declare `layer_types`.
    if declared is None and getattr(config, "sliding_window", None) is not None:
        declared = ["sliding_attention"]
    return ", ".join(sorted(set(declared or ()) - {"full_attention"}))


def first_line(error: Exception) -> str:
    """Return the first line of the error's message. Transformers appends many more lines."""
    return str(error).strip().split("\n")[0]


def _require_unchanged_logits(model: PreTrainedModel, path: Path, key: str) -> None:
    """Raise `ConfigError` if the model changes the logits after its output head."""
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    with torch.no_grad():
        head_output = head_logits(model, hidden_states(model, ids))
        logits = model(input_ids=ids, use_cache=False).logits
    if not torch.equal(head_output, logits):
        raise ConfigError(
            key,
            str(path),
            "it post-processes the logits of its output head",
            "Use a model whose logits are the unchanged output of its head",
        )


def precision(name: str, path: Path, device: torch.device) -> torch.dtype:
    """Return the dtype for the weights of the model at `path`, trained on `device`.

    `name` is the setting: `auto`, `float32` or `bfloat16`. `auto` is bfloat16 if the device is CUDA
    and the checkpoint is in half precision (float16 or bfloat16), else float32.
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    declared = json.loads((path / "config.json").read_text("utf-8"))
    half = declared.get("dtype", declared.get("torch_dtype")) in ("bfloat16", "float16")
    return torch.bfloat16 if half and device.type == "cuda" else torch.float32


@torch.no_grad()
def require_packing(model: PreTrainedModel, path: Path, key: str = "actor.model") -> None:
    """Set the model to read packed sequences and check the result.

    Compare the hidden states of two packed sequences with those of each sequence alone. Raise
    `ConfigError` if they differ or the forward pass fails. Do not check a model whose attention
    transformers cannot replace, because it does not read packed sequences.
    """
    ids = torch.arange(16, device=model.device) % model.config.vocab_size
    separate = torch.cat([hidden_states(model, part[None])[0] for part in (ids[:9], ids[9:])])
    enable_packing(model)
    if not reads_packed(model):
        return
    try:
        packed = _packed_states(model, ids, Packing((9, 7), model.device))
    except Exception as error:  # the type of the error depends on the model's code
        raise ConfigError(
            key,
            str(path),
            f"it cannot be trained on packed sequences ({first_line(error)})",
            "Use a model with plain causal attention",
        ) from error
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    if not bool((packed - separate).norm() <= tolerance * separate.norm()):
        raise ConfigError(
            key,
            str(path),
            "packed sequences influence each other in this model",
            "Use a model with plain causal attention",
        )


def checkpoint_activations(
    model: PreTrainedModel, key: str = "learner.activation_checkpointing"
) -> None:
    """Set the model to recompute the activations of its layers in backward passes.

    Raise `ConfigError` if the model does not support this or has dropout. Transformers enables
    activation checkpointing only in training mode, which also enables dropout. With dropout,
    log-probs would be random.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ConfigError(
            key,
            True,
            f"{type(model).__name__} has no layers that support activation checkpointing",
            "Remove the setting",
        )
    for name, value in model.config.to_dict().items():
        if "drop" in name and isinstance(value, float) and value > 0:
            raise ConfigError(
                key,
                True,
                f"activation checkpointing would also enable dropout, and the model's {name} "
                f"is {value:g}",
                f"Set {name} to 0 in the model's config.json",
            )
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in layers:
        layer.training = True  # only of the layer, not of its submodules


def stop_ids(
    model_path: Path, tokenizer: PreTrainedTokenizerBase, key: str = "actor.model"
) -> tuple[int, ...]:
    """Return the ids of all tokens that end a turn.

    The first is the token with which the chat template ends an answer, if there is one. The eos
    tokens of the tokenizer and of the model's generation config follow in ascending order. Raise
    `ConfigError` if the generation config cannot be read.
    """
    from transformers import GenerationConfig

    end = ChatRenderer(tokenizer, ()).end_of_turn()
    first: list[Any] = [] if end is None else [tokenizer.convert_tokens_to_ids(end)]
    ids: list[Any] = [tokenizer.eos_token_id]
    if (model_path / "generation_config.json").is_file():
        try:
            eos_ids = GenerationConfig.from_pretrained(
                model_path, local_files_only=True
            ).eos_token_id
        except Exception as error:
            reason = f"its generation_config.json cannot be read ({first_line(error)})"
            raise ConfigError(key, str(model_path), reason, "Fix or remove this file") from error
        ids += eos_ids if isinstance(eos_ids, list) else [eos_ids]
    return tuple(dict.fromkeys([*first, *sorted({i for i in ids if i is not None})]))


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states [b, t, h] of right-padded ids [b, t].

    No padding mask is needed: attention is causal, so real tokens do not attend to padding.
    """
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of hidden states, computed by the output head."""
    return _output_head(model)(hidden)


def _output_head(model: PreTrainedModel) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    return head


class TokenStats(NamedTuple):
    """Results for given tokens, each float32 [b, t] and 0 at tokens that are not selected.

    The distribution of a token with a kept set is renormalised over it.
    """

    logp: torch.Tensor
    """Log-probs of the tokens."""
    entropy: torch.Tensor
    """Entropy of the tokens' distributions in nats, without gradient."""
    kl: torch.Tensor
    """Exact KL(model ‖ reference) of the tokens' distributions in nats; 0 without a reference.

    Both distributions are renormalised over the kept set of the token.
    """


def token_logprobs(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0,
    *, reference: PreTrainedModel | None = None, kept: KeptTokens | None = None,
) -> TokenStats:  # fmt: skip
    """Return log-prob, entropy and KL of the tokens that `mask` selects, at `temperature`.

    `ids` [b, t] is right-padded. `mask` is bool [b, t] and must be false in column 0. A model that
    reads packed sequences reads neither padding nor tokens after the last selected token. Other
    models read the padded rows. Logits are computed only for selected tokens, in parts, so that no
    tensor of logits has more than `MAX_LOGITS` elements.

    `reference` may be `model` itself if it has an adapter: the reference is then its base model.
    `kept` are the kept sets of the selected tokens, row by row. None: no token has one.
    """
    hidden, head = predicting_states(model, ids, mask), _output_head(model)
    reference_dist = None
    if reference is not None:
        base = without_adapter(model) if reference is model else nullcontext()
        with torch.no_grad(), base:
            reference_hidden = predicting_states(reference, ids, mask)
            reference_head = _output_head(reference)
        reference_dist = HeadDistribution(
            reference_hidden, reference_head.weight, reference_head.bias, temperature, kept
        )
    with _replaced_forward(
        head,
        lambda x: _HeadStats.apply(
            x, head.weight, head.bias, ids[mask], temperature, kept, reference_dist
        ),
    ):
        stats = head(hidden)
    return TokenStats(
        *(
            torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, values)
            for values in stats
        )
    )


def predicting_states(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the hidden states [n, h] from which the n selected tokens are predicted.

    The hidden state for a token is that of the token before it.
    """
    predicting = mask[:, 1:]
    if not reads_packed(model):
        return hidden_states(model, ids)[:, :-1][predicting]
    positions = torch.arange(1, ids.shape[1], device=ids.device)
    packing = Packing((predicting * positions).amax(-1).clamp(min=1).tolist(), ids.device)
    packed_ids = ids[packing.rows, packing.positions]
    row, column = predicting.nonzero(as_tuple=True)
    return Gather.apply(_packed_states(model, packed_ids, packing), packing.offsets[row] + column)


def _packed_states(model: PreTrainedModel, ids: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return the last hidden states [T, h] of packed ids [T]."""
    positions = packing.positions[None]
    return model.base_model(
        input_ids=ids[None], position_ids=positions, use_cache=False, packing=packing
    ).last_hidden_state[0]


@contextmanager
def _replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the `forward` of `module` within the body.

    The hooks of the module still run. For example, ZeRO-3 gathers the weights of the module for the
    call.
    """
    original = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if original is not None:
            module.forward = original


class HeadDistribution(NamedTuple):
    """Distributions of n tokens: the softmax of a linear head at x [n, h] and a temperature.

    With `kept`, they are renormalised over the kept sets of the tokens.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    kept: KeptTokens | None

    def log_probs(self, part: slice) -> torch.Tensor:
        """Return log p [m, V] in float32 for the m tokens in `part`."""
        logits = torch.nn.functional.linear(self.x[part], self.weight, self.bias).float()
        if self.temperature != 1:
            logits.div_(self.temperature)
        if self.kept is not None:
            self.kept.restrict(logits, part)
        return logits.log_softmax(-1)


class _HeadStats(torch.autograd.Function):
    """Log-probs of given tokens under a linear head, with entropy and KL of their distributions.

    Tokens are processed in parts. Let z = (x Wᵀ + b) / T, p = softmax(z), and q the distribution of
    the reference. Then ∂ logp / ∂z = 1[token] − p and ∂ KL / ∂z = p (log p − log q − KL). With more
    than one part, the backward pass recomputes the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        tokens: torch.Tensor, temperature: float, kept: KeptTokens | None,
        reference_dist: HeadDistribution | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        logp, entropy, kl = (
            torch.zeros(len(x), dtype=torch.float32, device=x.device) for _ in range(3)
        )
        parts, log_p = _parts(len(x), len(weight)), None
        for part in parts:
            log_p = HeadDistribution(x, weight, bias, temperature, kept).log_probs(part)
            logp[part] = log_p.gather(-1, tokens[part, None])[:, 0]
            p = log_p.exp()
            if reference_dist is not None:
                kl[part] = reference_dist.log_probs(part).sub_(log_p).mul_(p).sum(-1).neg_()
            entropy[part] = p.mul_(log_p).sum(-1).neg_()
        ctx.save_for_backward(x, weight, bias, tokens, kl, log_p if len(parts) == 1 else None)
        ctx.temperature, ctx.kept, ctx.reference_dist = temperature, kept, reference_dist
        ctx.mark_non_differentiable(entropy)
        return logp, entropy, kl

    @staticmethod
    def backward(
        ctx: Any, grad_logp: torch.Tensor, _: Any, grad_kl: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, tokens, kl, saved_log_p = ctx.saved_tensors
        inputs = zip((x, weight, bias), ctx.needs_input_grad, strict=False)
        grad_x, grad_weight, grad_bias = (
            torch.zeros_like(tensor) if needed else None for tensor, needed in inputs
        )
        for part in _parts(len(x), len(weight)):
            log_p = (
                HeadDistribution(x, weight, bias, ctx.temperature, ctx.kept).log_probs(part)
                if saved_log_p is None
                else saved_log_p
            )
            grad = log_p.exp()
            if ctx.reference_dist is None:
                grad.mul_(-grad_logp[part, None])
            else:
                kl_grad = (
                    ctx.reference_dist.log_probs(part)
                    .neg_()
                    .add_(log_p)
                    .sub_(kl[part, None])
                    .mul_(grad_kl[part, None])
                )
                grad.mul_(kl_grad.sub_(grad_logp[part, None]))
            grad[torch.arange(len(grad), device=grad.device), tokens[part]] += grad_logp[part]
            grad = grad.div_(ctx.temperature).to(weight.dtype)
            if grad_x is not None:
                grad_x[part] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), x[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _parts(n: int, vocabulary: int) -> list[slice]:
    """Return slices of n tokens, each with at most `MAX_LOGITS` logits but at least one token."""
    size = max(1, MAX_LOGITS // vocabulary)
    return [slice(begin, begin + size) for begin in range(0, n, size)]


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's detached parameters by name. A tied parameter is listed once.

    An adapter is merged into the weights of the base model.
    """
    if has_adapter(model):
        return merged_weights(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def checksum(weights: Mapping[str, torch.Tensor], crc: int = 0) -> int:
    """Return a checksum of the names, dtypes, shapes and bytes of the weights, in order.

    The checksum does not depend on the device. `crc` is the checksum of the preceding weights, so a
    checksum can be computed in several calls.

    The bytes are read as rows of 4,096 int32 words; the last row is padded with zeros. For each row
    the sums Σ w_i and Σ i w_i are computed on the device of the tensor. They change if one word
    changes, or if two different words are exchanged. The result is the CRC-32 of the sums, which
    have about a thousandth of the size. It detects lost or damaged weights, but not forgery.
    """
    for name, tensor in weights.items():
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(_row_sums(tensor.detach()).cpu().numpy().data, crc)
    return crc


def _row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return both sums of each row, int64 [rows, 2]. Process one block of rows at a time."""
    data, size, device = tensor_bytes(tensor), 4 * CHECKSUM_ROW_WORDS, tensor.device
    # Rows per block: 512 KiB on the CPU, which fit in caches; 16 MiB on a GPU, for few launches.
    rows = 32 if device.type == "cpu" else 1024
    positions, buffer = (
        torch.arange(1, CHECKSUM_ROW_WORDS + 1, device=device),
        torch.empty(rows, CHECKSUM_ROW_WORDS, dtype=torch.int64, device=device),
    )
    sums = torch.empty(-(-len(data) // size), 2, dtype=torch.int64, device=device)
    for block, out in zip(data.split(rows * size), sums.split(rows), strict=True):
        if len(block) % size:
            block = torch.nn.functional.pad(block, (0, -len(block) % size))
        elif block.storage_offset() % 4:
            block = block.clone()
        words = buffer[: len(out)].copy_(block.view(torch.int32).view(len(out), CHECKSUM_ROW_WORDS))
        out[:, 0] = words.sum(1)
        out[:, 1] = words.mul_(positions).sum(1)
    return sums


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the tensor's values in order, uint8 [n].

    The bytes are not copied if the tensor is contiguous.
    """
    # `as_strided` is needed because a tensor with a single value may have any stride.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True)
class InProcessWeights:
    """`PublishHandle` within one process: a snapshot of the weights that engines copy."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    checksum: int
    transport: str = "in-process"

    @classmethod
    def snapshot(cls, model: PreTrainedModel, version: int) -> InProcessWeights:
        """Return a handle with copies of the model's current weights, an adapter merged."""
        held = {parameter.data_ptr() for parameter in model.parameters()}
        copied = {  # merged weights are new tensors already
            name: tensor.clone() if tensor.data_ptr() in held else tensor
            for name, tensor in named_weights(model).items()
        }
        return cls(version, copied, checksum(copied))

    @classmethod
    def copies(cls, tensors: Mapping[str, torch.Tensor], version: int) -> InProcessWeights:
        """Return a handle with copies of the tensors."""
        copied = {name: tensor.clone() for name, tensor in tensors.items()}
        return cls(version, copied, checksum(copied))

    @property
    def manifest(self) -> WeightManifest:
        named = self.tensors.items()
        return WeightManifest(
            tuple(self.tensors),
            tuple(str(t.dtype) for _, t in named),
            tuple(tuple(t.shape) for _, t in named),
        )

    def discard(self) -> None:
        """Do nothing; the memory is freed with the last reference."""
