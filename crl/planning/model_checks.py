"""Checks of the models of a run that need no weights: config.json, tokenizer and file headers.

Models of the architectures in `PLAIN_ARCHITECTURES` are checked without torch. Other models are
also built on the meta device, without weights, as `crl.modeling.loading` would load them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from crl.config.models import (
    adapter_base,
    is_adapter,
    model_size,
    positions,
    resolve_model,
    safetensors_metadata,
    weight_shapes,
)
from crl.config.models.shapes import PUBLISHED_SHAPES, require_context
from crl.config.schema import ActorSection, ExtractorSection, LoraSection, RunConfig
from crl.embedders import encoder_folder
from crl.engines.backends import ENGINES
from crl.errors import ConfigError
from crl.extras import require_package
from crl.modeling import ADAPTER_WEIGHTS
from crl.modeling.gguf import described, find_folder
from crl.modeling.memory import block_layers
from crl.modeling.tokenizer_files import read_tokenizer
from crl.modeling.tokens import ChatRenderer
from crl.monitor.run_dir import RunDir
from crl.planning.context import merge_prompt
from crl.planning.model_size import planned_shape
from crl.types import RoleName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS_INDEX = "model.safetensors.index.json"
"""File that lists the files of a model whose weights are in several files."""


TOKENIZER_FILES = ("*token*", "*vocab*", "*.model")
"""Patterns of the names of a tokenizer's files."""

PLAIN_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures that crl supports without sliding windows and dropout, with their model types."""


Layer = tuple[str, tuple[int, int]]
"""Name of a linear layer within its block, and its outputs and inputs."""


def model_sections(
    config: RunConfig, only: RoleName | None = None
) -> dict[RoleName, ActorSection | ExtractorSection]:
    """Return the sections of the models of a run, by role.

    These are the actor and, if the method has one, the extractor. `only`: the only role in use;
    None for all. The checks below have the same parameter.
    """
    sections: dict[RoleName, ActorSection | ExtractorSection] = {"actor": config.actor}
    if config.with_extractor:
        sections["extractor"] = config.extractor
    return {only: sections[only]} if only else sections


def named_models(config: RunConfig, only: RoleName | None = None) -> dict[str, str]:
    """Return the names of the run's models, by the key that names each model.

    The embedder is left out if it is not an encoder on this machine, or not in use (`only`).
    """
    sections = model_sections(config, only)
    named = {f"{role}.model": section.model for role, section in sections.items()}
    embedder = config.embedder
    if config.with_bank and embedder.is_encoder and not only:
        named["embedder.model"] = embedder.model
    return named


def require_model(name: str, key: str) -> Path:
    """Return the directory or the GGUF file of the model `name`.

    Raise `ConfigError` under `key` if it is not on this machine, if its weights are missing,
    incomplete or damaged, or if its tokenizer is missing.
    """
    embedder = key == "embedder.model"
    folder = encoder_folder(Path(name)) if embedder else resolve_model(name, key)
    if folder.is_file():
        described(folder, key)
        return folder
    if is_adapter(folder):
        require_package("peft", key, str(folder), extra="lora")
        if not (folder / ADAPTER_WEIGHTS).is_file():
            reason = f"the directory of the adapter contains no {ADAPTER_WEIGHTS}"
            raise ConfigError(key, str(folder), reason, "Download or create the adapter again")
        safetensors_metadata(folder / ADAPTER_WEIGHTS, key)  # an incomplete file is an error
        require_model(str(adapter_base(folder, key)), key)
        return folder
    missing = _missing_files(folder, key)
    if missing or not (model_size(folder, key) or any(folder.glob("pytorch_model*.bin"))):
        reason = (
            f"its checkpoint lacks the file {missing[0]} ({len(missing)} in total)"
            if missing
            else "the directory contains no weights (model*.safetensors)"
        )
        raise ConfigError(key, str(folder), reason, "Download or create the model again")
    if not _has_tokenizer(folder):
        reason = "the directory contains no tokenizer"
        raise ConfigError(key, str(folder), reason, "Put the tokenizer's files in this directory")
    return folder


def require_config(folder: Path, key: str) -> None:
    """Raise `ConfigError` if config.json is not an object."""
    file = folder / "config.json"
    try:
        if not isinstance(json.loads(file.read_text("utf-8")), dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        reason = f"cannot be read ({error})"
        raise ConfigError(key, str(file), reason, "Download or create the model again") from error


def _has_tokenizer(folder: Path) -> bool:
    """Return whether a file of a tokenizer is in the directory of a model."""
    return any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern))


def _missing_files(folder: Path, key: str) -> list[str]:
    """Return the names of files that the index of the weights lists and that do not exist."""
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return []
    try:
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"cannot be read ({type(error).__name__}: {error})"
        raise ConfigError(key, str(index), reason, "Download or create the model again") from error
    return sorted(file for file in files if not (folder / file).is_file())


def require_models(config: RunConfig, only: RoleName | None = None) -> None:
    """Raise `ConfigError` if a model of the run is not on this machine, or is incomplete."""
    for key, name in named_models(config, only).items():
        require_model(name, key)


def require_adapters(config: RunConfig, only: RoleName | None = None) -> None:
    """Raise `ConfigError` if engine or packages do not support the adapter of a role."""
    for role in model_sections(config, only):
        if section := config.trained_adapter(role):
            require_package("peft", f"{role}.lora.rank", section.rank, extra="lora")
            ENGINES[config.engine.kind].require_adapter(role, section)


def require_adapter_ranks(config: RunConfig, only: RoleName | None = None) -> None:
    """Raise `ConfigError` if the model of a role is too small for the rank of its adapter."""
    for role, model in model_sections(config, only).items():
        if section := config.trained_adapter(role):
            _require_rank(section, adapted_layers(model.model, section, role), role)


def _require_rank(section: LoraSection, layers: Sequence[Layer], role: str) -> None:
    """Raise `ConfigError` if the rank is above the smallest dimension of a layer."""
    narrow = {name: dims for name, dims in layers if min(dims) < section.rank}
    if not narrow:
        return
    name = min(narrow, key=lambda name: min(narrow[name]))
    outputs, inputs = narrow[name]
    reason = (
        f"is above the smallest dimension of {name}, which is {outputs} × {inputs}: a larger rank "
        "only adds useless parameters"
    )
    remedy = f"Choose at most {min(outputs, inputs)}"
    if narrow.keys() != {name for name, _ in layers}:
        remedy += f", or leave out {' and '.join(narrow)} with --set {role}.lora.targets=A,B"
    remedy += f", or train all weights with {role}.lora.rank=0"
    raise ConfigError(f"{role}.lora.rank", section.rank, reason, remedy)


def adapted_layers(model: str, section: LoraSection, role: str) -> list[Layer]:
    """Return the linear layers of a model that get an adapter, in all of its blocks.

    The layers are those in the headers of the weights, which name them like Llama, or those of the
    model without its weights. For a model that is not on this machine, they are those of Llama with
    its sizes; none if these are unknown.

    Raise `ConfigError` if a target is not a linear layer of the model.
    """
    path = find_folder(model, f"{role}.model")
    shapes = weight_shapes(path, f"{role}.model") if path else {}
    layers: list[Layer] = [
        (name.split(".")[-2], (shape[0], shape[1]))
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and ".layers." in name
    ]
    if path and not layers:
        layers = _layers_without_weights(path, f"{role}.model")
    names = {name for name, _ in layers}
    for name in section.target_names:
        if names and name not in names:
            raise ConfigError(
                f"{role}.lora.targets",
                section.targets,
                f"{name} is not a linear layer in a block of the model",
                f"Choose from {', '.join(sorted(names))}",
            )
    if not layers:
        try:
            shape = planned_shape(model, f"{role}.model")
        except ConfigError:  # other checks report it, if it is an error
            return []
        layers = [*block_layers(shape).items()] * shape.layers
    return [layer for layer in layers if layer[0] in (section.target_names or {layer[0]})]


def _layers_without_weights(path: Path, key: str) -> list[Layer]:
    """Return the linear layers of a model; none if config.json does not describe one."""
    from crl.modeling.loading import meta_model
    from crl.modeling.lora import linear_layers

    try:
        return list(linear_layers(meta_model(path, key)))
    except ConfigError:  # other checks report it
        return []


def require_contexts(config: RunConfig, only: RoleName | None = None) -> None:
    """Raise `ConfigError` if max_context_tokens exceeds the positions of the actor or extractor.

    A model without max_position_embeddings in its config.json is not checked here.
    """
    for role, section in model_sections(config, only).items():
        path = find_folder(section.model, f"{role}.model")
        limit = positions(path) if path else PUBLISHED_SHAPES[section.model].max_context
        require_context(role, section.max_context_tokens, limit)


def require_architectures(config: RunConfig, only: RoleName | None = None) -> None:
    """Raise `ConfigError` if crl does not support the architecture of a model that it loads.

    An untrained model of an engine in other processes is not checked: only that engine loads it,
    and vLLM supports more architectures.
    """
    for role, section in model_sections(config, only).items():
        loaded = config.trains(role) or ENGINES[config.engine.kind].in_process
        path = find_folder(section.model, f"{role}.model")
        if not loaded or path is None or _is_plain(path):
            continue
        from crl.modeling.loading import checkpoint_activations, meta_model, require_supported

        model = meta_model(path, f"{role}.model")
        require_supported(model, path, f"{role}.model")
        positions = getattr(model.config, "max_position_embeddings", None)
        require_context(role, section.max_context_tokens, positions)
        if config.trains(role) and config.learner.activation_checkpointing:
            checkpoint_activations(model)


def _is_plain(path: Path) -> bool:
    """Return whether config.json certainly describes a model that crl supports."""
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text("utf-8"))
        (architecture,) = config["architectures"]
        layers = set(config.get("layer_types") or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    windows = config.get("use_sliding_window", architecture == "LlamaForCausalLM")
    return (
        PLAIN_ARCHITECTURES.get(architecture, "") == config.get("model_type")
        and layers <= {"full_attention"}
        and not (windows and config.get("sliding_window"))
        and not config.get("attention_dropout")
        and positions(path) is not None
    )


def require_tokenizers(config: RunConfig, only: RoleName | None = None) -> None:
    """Raise `ConfigError` if the tokenizer of actor or extractor cannot write and stop turns.

    A missing tokenizer, like missing weights, is reported by `require_model`.
    """
    for role, section in model_sections(config, only).items():
        key = f"{role}.model"
        path = find_folder(section.model, key)
        if path is None or not _has_tokenizer(path):
            continue
        _tokenizer(path, key)
        if not _plain_stop_ids(path):
            from crl.modeling.loading import load_tokenizer, stop_ids

            stop_ids(path, load_tokenizer(path, key), key)


def require_structured_outputs(config: RunConfig) -> None:
    """Raise `ConfigError` if structured outputs conflict with the extractor's chat template.

    They conflict if the template opens the thinking in every prompt. Nothing is checked without a
    tokenizer.
    """
    if not config.with_extractor or not config.extractor.structured_outputs:
        return
    renderer = _extractor_renderer(config)
    if renderer and (start := renderer.thinking_start):
        reason = (
            f"the chat template of {config.extractor.model} ends every prompt with "
            f"{start.strip()}, but the answer would have to be JSON from its first token, without "
            "an end of the thinking"
        )
        remedy = "Use a model whose chat template does not open the thinking, or leave it out"
        raise ConfigError("extractor.structured_outputs", True, reason, remedy)


def require_merge_tokens(config: RunConfig) -> None:
    """Raise `ConfigError` if a full chunk of the bank does not fit into the merge prompt.

    The tokens of the prompt without experiences are counted with the extractor's tokenizer. Nothing
    is checked without a tokenizer.
    """
    extractor = config.extractor
    if not config.distils or not extractor.merge_every:
        return
    renderer = _extractor_renderer(config)
    if renderer is None:
        return
    write_prompt = merge_prompt(config.profile("extractor"), config.prompts.files)
    prompt = len(renderer.encode(renderer.text(write_prompt([]))))
    limit = extractor.max_context_tokens - extractor.max_response_tokens - prompt
    if extractor.merge_tokens > limit:
        reason = (
            f"does not fit into the extractor's context: its {extractor.max_context_tokens} tokens "
            f"also hold {prompt} tokens of the merge prompt and "
            f"{extractor.max_response_tokens} tokens of the answer"
        )
        choose = f"Choose at most {limit}, or raise" if limit > 0 else "Raise"
        raise ConfigError(
            "extractor.merge_tokens",
            extractor.merge_tokens,
            reason,
            f"{choose} extractor.max_context_tokens",
        )


def _extractor_renderer(config: RunConfig) -> ChatRenderer | None:
    """Return the renderer of the extractor; None if its tokenizer is not on this machine."""
    key = "extractor.model"
    path = find_folder(config.extractor.model, key)
    if path is None or not _has_tokenizer(path):
        return None
    return ChatRenderer(_tokenizer(path, key), ())


def recording_model(run: RunDir, model: str) -> Path:
    """Return the directory of the model that recorded the episodes of a run, for its tokenizer.

    It is the actor of a checkpoint, or else the initial model `model`. Raise `ConfigError` if there
    is neither.
    """
    if saved := sorted(run.checkpoints.glob("[0-9]*/actor")):
        return saved[0]
    key = f"actor.model of {run.path}"
    return described(resolve_model(model, key), key)


def require_same_tokenizer(name: str, recorder: Path) -> None:
    """Raise `ConfigError` if the model `name` has another tokenizer than the model in `recorder`.

    Only the tokens and their ids are compared. The chat template may differ.
    """
    key = "actor.model"
    tokenizers = [_tokenizer(path, key) for path in (described(resolve_model(name), key), recorder)]
    if tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        reason = f"does not have the tokenizer of {recorder}, which recorded the episodes"
        remedy = "Use a model with the same tokenizer, or record episodes of this model"
        raise ConfigError(key, name, reason, remedy)


def _tokenizer(path: Path, key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `path`. Raise `ConfigError` as `load_tokenizer` does."""
    if tokenizer := read_tokenizer(path):
        return cast("PreTrainedTokenizerBase", tokenizer)
    from crl.modeling.loading import load_tokenizer

    return load_tokenizer(path, key)


def _plain_stop_ids(path: Path) -> bool:
    """Return whether the generation config is missing, or certainly readable."""
    file = path / "generation_config.json"
    if not file.is_file():
        return True
    try:
        settings: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict)
