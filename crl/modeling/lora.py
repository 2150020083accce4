"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) by peft.

A linear layer W with an adapter computes W x + (alpha / rank) B A x (§4.1 of the paper). W is
frozen, and only A and B are trained. They are float32 in every precision of W. A is random and B is
0 at the start, so the model is unchanged at first.

A saved adapter is a directory in the format of peft: adapter_config.json, which names the base
model, and adapter_model.safetensors. Peft is imported only for a model with an adapter.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from safetensors import safe_open

from crl.errors import ConfigError, LearnerError
from crl.extras import require_package
from crl.modeling import ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from crl.config.schema import LoraSection

_NAME = "default"
"""Name of the adapter within its model, as peft names it."""
_FILE_PREFIX = "base_model.model."
"""Prefix of the tensors in a saved adapter."""


@dataclass(frozen=True)
class Adapter:
    """Adapter that a learner trains."""

    section: LoraSection
    base: Path
    """Directory or file of the base model, which saved adapters name."""
    seed: int
    """Seed of the matrices A."""


_bases: WeakValueDictionary[tuple[Path, torch.device, torch.dtype], PreTrainedModel] = (
    WeakValueDictionary()
)
"""Loaded base models. Each model of `shared_base` keeps its base model alive."""


def shared_base(
    path: Path, device: torch.device, dtype: torch.dtype, *, key: str = "actor.model"
) -> PreTrainedModel:
    """Load a model whose weights are shared with all models of this function from the same path.

    The weights are frozen, so that adapters can be added to each of these models. Raise
    `ConfigError` as `load_model` does.
    """
    from crl.modeling.loading import load_model

    address = path, device, dtype
    if (base := _bases.get(address)) is None:
        base = _bases[address] = load_model(path, device, dtype, key=key).requires_grad_(False)
    shared = copy.deepcopy(base, {id(tensor): tensor for tensor in base.parameters()})
    shared.__dict__["crl_base"] = base  # not as an attribute, which would make it a part
    return shared


def add_adapter(model: PreTrainedModel, adapter: Adapter, key: str = "actor.lora") -> None:
    """Freeze the weights of the model and add an adapter to its linear layers.

    `key`: setting of the adapter, for errors.

    Raise `ConfigError` if a target is not a linear layer of the model, or is its output head.
    """
    from peft import LoraConfig, inject_adapter_in_model

    section = adapter.section
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=list(section.target_names) or "all-linear",
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(adapter.seed)
            inject_adapter_in_model(config, model, adapter_name=_NAME)
    except ValueError as error:  # no layer has one of these names, or it is not linear
        raise _invalid_targets(section, key, str(error).split("\n")[0]) from error
    if model.get_output_embeddings() is not head:
        raise _invalid_targets(section, key, "the output head cannot have an adapter")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _invalid_targets(section: LoraSection, key: str, reason: str) -> ConfigError:
    remedy = "Give names of linear layers, such as q_proj,v_proj, or leave it out"
    return ConfigError(f"{key}.targets", section.targets, reason, remedy)


def has_adapter(model: PreTrainedModel) -> bool:
    """Return whether the model has an adapter that is not merged into its weights."""
    return hasattr(model, "peft_config")


def merged_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the detached weights of the base model by name, with the adapter merged into them.

    The sum is computed in float32 and rounded to the precision of the weight. A weight without
    adapter is not copied.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in _layers(model)}
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = parameter.detach()
        if layer := layers.get(name):
            with torch.no_grad():
                weight = (weight + layer.get_delta_weight(_NAME)).to(weight.dtype)
        weights[name.replace(".base_layer.", ".")] = weight
    return weights


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Compute with the base model alone within the body."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` would also change `requires_grad`
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def write_adapter(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], base: Path, folder: Path
) -> None:
    """Write an adapter to a directory, in the format of peft.

    `tensors`: values of `adapter_parameters`. `base`: base model that the directory names. Raise
    `OSError` if a file cannot be written.
    """
    from crl.modeling.weights import manifest_of, write_tensors

    config: Any = copy.copy(model.peft_config[_NAME])
    config.base_model_name_or_path = str(base)
    config.save_pretrained(folder)
    metadata = {"format": "pt"}  # transformers refuses files without it
    write_tensors(folder / ADAPTER_WEIGHTS, manifest_of(tensors), tensors.values(), metadata)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy a saved adapter into the adapter of the model.

    Raise `LearnerError` if the directory has no adapter of these shapes.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise LearnerError(f"{folder} contains no {ADAPTER_WEIGHTS}: it has no adapter")
    own = adapter_parameters(model)
    with safe_open(path, "pt", device=str(model.device)) as file, torch.no_grad():
        if set(file.keys()) != own.keys():
            raise LearnerError(f"{path} is an adapter of other layers")
        for name, parameter in own.items():
            parameter.copy_(file.get_tensor(name))


def write_merged(adapter: Path, base: Path, folder: Path, key: str) -> None:
    """Write the model in `base`, with the adapter merged into its weights, to `folder`.

    The precision is that of the base model. Tokenizer files and the profile beside the adapter
    replace those of the base model.

    Raise `ConfigError` under `key` if a package is missing or the adapter cannot be loaded.
    """
    require_package("peft", key, str(adapter), extra="lora")
    from peft import PeftModel

    from crl.modeling.files import copy_model_files
    from crl.modeling.loading import load_model

    declared = json.loads((base / "config.json").read_text("utf-8"))
    dtype = declared.get("dtype", declared.get("torch_dtype")) or "float32"
    model = load_model(base, torch.device("cpu"), getattr(torch, dtype), key=key)
    try:
        merged: Any = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except Exception as error:  # a broken file raises many types of errors
        first_line = str(error).strip().split("\n")[0]
        reason = f"the adapter cannot be merged into {base} ({first_line})"
        raise ConfigError(key, str(adapter), reason, "Restore the adapter") from error
    merged.save_pretrained(folder)
    for source in (adapter, base):
        copy_model_files(source, folder)


def adapter_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model's adapter, by their names in a saved adapter."""
    return {
        _FILE_PREFIX + name.replace(f".{_NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the layers with an adapter, by name."""
    if not has_adapter(model):
        return
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module
