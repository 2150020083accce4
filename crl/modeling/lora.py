"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) by peft.

A linear layer W with an adapter computes W x + (alpha / rank) B A x (§4.1 of the paper). W is
frozen, and only A and B are trained. They are float32 in every precision of W. A is random and B is
0 at the start, so the model is unchanged at first.

A saved adapter is a directory in the format of peft: adapter_config.json, which names the base
model, and adapter_model.safetensors (see `crl.modeling.adapters`). Peft is imported only for a
model with an adapter.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from safetensors import safe_open

from crl.errors import ConfigError, LearnerError
from crl.extras import require_package
from crl.modeling import ADAPTER_WEIGHTS, BASE_PRECISION, BASE_SHA256
from crl.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from crl.config.schema import LoraSection
    from crl.modeling.adapters import BaseModel

_NAME = "default"
"""Name of the adapter within its model, as peft names it."""
_FILE_PREFIX = "base_model.model."
"""Prefix of the tensors in a saved adapter."""


@dataclass(frozen=True)
class Adapter:
    """Adapter that a learner trains."""

    section: LoraSection
    base: BaseModel
    """Base model, which saved adapters name."""
    seed: int
    """Seed of the matrices A and of dropout."""
    merged: bool = True
    """True if the learner publishes the base model with the adapter merged.

    False: it publishes the adapter alone, for engines that hold the base model.
    """


_bases: WeakValueDictionary[tuple[Path, torch.device, torch.dtype], PreTrainedModel] = (
    WeakValueDictionary()
)
"""Loaded base models. Each model of `shared_base` keeps its base model alive."""


def shared_base(
    path: Path, device: torch.device, dtype: torch.dtype, *, key: str = "actor.model"
) -> PreTrainedModel:
    """Load a model that shares its weights with other models that this function returned.

    They are shared if path, device and dtype are equal. The weights are frozen, so that adapters
    can be added to each of these models. Raise `ConfigError` as `load_model` does.
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
        lora_dropout=section.dropout,
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            # Peft corrects its setting for Conv1D itself, and the output head is refused below.
            warnings.filterwarnings("ignore", module="peft")
            torch.manual_seed(adapter.seed)
            inject_adapter_in_model(config, model, adapter_name=_NAME)
    except ValueError as error:  # no layer has one of these names, or it has no adapters
        reason = str(error).split("\n")[0].rstrip(".")
        raise _invalid_targets(section, key, reason) from error
    if model.get_output_embeddings() is not head:
        raise _invalid_targets(section, key, "the output head cannot have an adapter")
    for name, layer in _layers(model):
        if not _is_linear(layer.get_base_layer()):
            raise _invalid_targets(section, key, f"{name} is not a linear layer")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if section.dropout:
        for number, (_, layer) in enumerate(_layers(model)):
            seed = derive_seed(adapter.seed, "dropout", number)
            layer.lora_dropout[_NAME] = AdapterDropout(section.dropout, seed)


def _invalid_targets(section: LoraSection, key: str, reason: str) -> ConfigError:
    remedy = "Give names of linear layers, such as q_proj,v_proj, or leave it out"
    return ConfigError(f"{key}.targets", section.targets, reason, remedy)


class AdapterDropout(torch.nn.Module):
    """Dropout of the inputs of one layer's adapter, which acts only inside `dropout_of`.

    Each pass draws from a new generator. A pass that is repeated inside the context, for recomputed
    activations, therefore has the same draws.
    """

    def __init__(self, probability: float, seed: int) -> None:
        super().__init__()
        self.probability, self.seed = probability, seed
        self.address: tuple[int, ...] | None = None
        """Address of the draws; None without dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.address is None:
            return x
        generator = torch.Generator(x.device)
        generator.manual_seed(derive_seed(self.seed, "mask", *self.address))
        kept = 1.0 - self.probability
        return x * torch.empty_like(x).bernoulli_(kept, generator=generator).div_(kept)


def dropout_layers(model: PreTrainedModel) -> list[AdapterDropout]:
    """Return the dropout layers of a model's adapter; empty without dropout."""
    return [module for module in model.modules() if isinstance(module, AdapterDropout)]


@contextmanager
def dropout_of(layers: Sequence[AdapterDropout], *address: int) -> Iterator[None]:
    """Enable dropout within the body, which contains a forward pass and its backward pass.

    Equal addresses have equal draws.
    """
    for layer in layers:
        layer.address = address
    try:
        yield
    finally:
        for layer in layers:
            layer.address = None


def default_targets(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers that have an adapter without `LoraSection.targets`.

    They are the last parts of the names of all linear layers except the output head, as in peft.
    The weights are not read.
    """
    return sorted({name for name, _ in linear_layers(model)})


def linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the last part of the name of each linear layer but the output head, and its dimensions.

    The dimensions are the numbers of outputs and inputs. The weights are not read.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if _is_linear(module) and module is not head:
            layer: Any = module
            rows, columns = layer.weight.shape
            transposed = not isinstance(layer, torch.nn.Linear)
            yield name.rpartition(".")[2], (columns, rows) if transposed else (rows, columns)


def _is_linear(module: Any) -> bool:
    """Return whether a module is a linear layer, or GPT-2's form of it with a transposed weight."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)


def has_adapter(model: PreTrainedModel) -> bool:
    """Return whether the model has an adapter that is not merged into its weights."""
    return hasattr(model, "peft_config")


def merged_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the detached weights of the base model by name, with the adapter merged into them."""
    return {name: merged_weight(parameter, layer) for name, parameter, layer in base_weights(model)}


def base_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
    """Yield the weights of the base model with their names in a model without adapter.

    The third value is the layer whose adapter changes the weight; None for other weights.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in _layers(model)}
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter, layers.get(name)


def layer_parameters(layer: Any) -> list[torch.nn.Parameter]:
    """Return the matrices A and B of a layer of `base_weights`."""
    return [layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight]


@torch.no_grad()
def merged_weight(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return a detached weight of `base_weights` with the adapter of its layer merged into it.

    The sum is computed in float32 and rounded to the precision of the weight. A weight without
    adapter is not copied.
    """
    if layer is None:
        return weight.detach()
    a, b = (matrix.float() for matrix in layer_parameters(layer))
    change = (b @ a) * layer.scaling[_NAME]
    if layer.fan_in_fan_out:  # a Conv1D of GPT-2 stores its weight transposed
        change = change.T
    return (weight + change).to(weight.dtype)


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
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], base: BaseModel, folder: Path
) -> None:
    """Write an adapter to a directory, in the format of peft.

    `tensors`: values of `adapter_parameters`. `base`: base model that the directory names. Raise
    `OSError` if a file cannot be written.
    """
    from crl.modeling.weights import manifest_of, write_tensors

    config: Any = copy.copy(model.peft_config[_NAME])
    config.target_modules = sorted(config.target_modules)  # a set, whose order differs by process
    config.base_model_name_or_path = str(base.path)
    config.save_pretrained(folder)
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)  # it has no adapter
    metadata = {
        "format": "pt",  # transformers refuses files without it
        BASE_PRECISION: str(head.weight.dtype).removeprefix("torch."),
        BASE_SHA256: base.sha256,
    }
    write_tensors(folder / ADAPTER_WEIGHTS, manifest_of(tensors), tensors.values(), metadata)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy a saved adapter into the adapter of the model.

    Raise `LearnerError` if the directory has no adapter of these layers.
    """
    own = adapter_parameters(model)
    with torch.no_grad():
        for name, tensor in read_adapter(folder, own.keys(), model.device).items():
            own[name].copy_(tensor)


def read_adapter(
    folder: Path, names: Collection[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved adapter.

    `names`: keys of `adapter_parameters`. Raise `LearnerError` if the directory has no adapter of
    these layers.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise LearnerError(f"{folder} contains no {ADAPTER_WEIGHTS}: it has no adapter")
    with safe_open(path, "pt", device=str(device)) as file:
        if set(file.keys()) != set(names):
            raise LearnerError(f"{path} is an adapter of other layers")
        return {name: file.get_tensor(name) for name in names}


def write_merged(adapter: Path, base: Path, folder: Path, key: str) -> None:
    """Write the model in `base`, with the adapter merged into its weights, to `folder`.

    The base model has the precision that it had when the adapter was trained. The sum is computed
    in float32 and rounded to this precision, so these are the weights that the torch engine of the
    run had. The precision of an adapter that crl did not write is that of the base model's
    config.json. Tokenizer files and the profile beside the adapter replace those of the base model.

    Raise `ConfigError` under `key` if a package is missing or the adapter cannot be loaded.
    """
    require_package("peft", key, str(adapter), extra="lora")
    from peft import PeftModel

    from crl.modeling.adapters import recorded_precision
    from crl.modeling.files import copy_model_files
    from crl.modeling.loading import load_model

    if (dtype := recorded_precision(adapter, key)) is None:
        declared = json.loads((base / "config.json").read_text("utf-8"))
        dtype = declared.get("dtype", declared.get("torch_dtype")) or "float32"
    model = load_model(base, torch.device("cpu"), getattr(torch, dtype), key=key)
    try:
        merged: Any = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except Exception as error:  # a broken file raises many types of errors
        lines = [line.strip() for line in str(error).strip().split("\n")]
        # Errors of shapes are listed below a first line that ends with a colon.
        first = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        reason = f"the adapter cannot be merged into {base} ({first})"
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
