"""Lookup of models, and reading of their metadata without loading them. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, cast

from crl.config.catalog import PACKAGE, did_you_mean
from crl.config.models.packaged import PACKAGED_MODELS, imported_folder, imported_models
from crl.config.models.shapes import PUBLISHED_SHAPES
from crl.errors import ConfigError

Profile = Literal["full", "compact"]
"""Profile of a model: full for language models, compact for tiny models."""

PROFILE_FILE = "crl.json"
"""File in a model's directory that declares its profile."""

_METADATA = "__metadata__"
"""Entry for the metadata in the header of a safetensors file."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def bundled_models() -> list[str]:
    """Return the names of the models that are part of the package."""
    return sorted(path.parent.name for path in (PACKAGE / "tiny").glob("*/config.json"))


def resolve_model(name: str, key: str = "actor.model") -> Path:
    """Return the directory or the GGUF file of a model.

    `name` is a bundled or an imported model, a model in the Hugging Face cache, a directory, or a
    GGUF file. A directory with one GGUF file stands for this file.

    Raise `ConfigError` under `key` if there is no such model, or if it is not downloaded.
    """
    if (path := find_model(name, key)) is None:
        raise not_downloaded(name, key)
    return path


OUTPUT_HEAD = "lm_head.weight"
"""Name of the weights of the output head."""

ADAPTER_CONFIG = "adapter_config.json"
"""File of a saved adapter (`crl.modeling.lora`) that names its base model."""


def find_model(name: str, key: str = "actor.model") -> Path | None:
    """Return the directory or the GGUF file of a model. The directory may hold an adapter.

    Return None for a model of a preset that is not downloaded. A run can be planned with this
    model, but not started.

    Raise `ConfigError` under `key` if there is no such model.
    """
    if name in bundled_models():
        return PACKAGE / "tiny" / name
    if name in imported_models():
        return imported_folder(name).resolve()
    path = Path(os.path.expanduser(name))
    if is_adapter(path) or (path / "config.json").is_file():
        return path.resolve()
    if file := _gguf_file(path, key):
        return file.resolve()
    if path.is_dir():
        raise ConfigError(
            key,
            name,
            "the directory contains no config.json",
            "Give a directory in Hugging Face format",
        )
    if (cached := cached_model(name)) or name in PUBLISHED_SHAPES:
        return cached
    known = [*bundled_models(), *imported_models(), *PACKAGED_MODELS]
    remedy = (
        f"{did_you_mean(name, dict.fromkeys(known), unlisted=PUBLISHED_SHAPES)}; or give a "
        "directory in Hugging Face format (crl does not download models from hubs)"
        f"{download_hint(name)}"
    )
    raise ConfigError(key, name, "is neither a known model nor a directory", remedy)


def positions(path: Path) -> int | None:
    """Return the number of tokens that the positions of the model in a directory cover.

    Return None if its config.json does not tell.
    """
    try:
        limit = json.loads((path / "config.json").read_text("utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return limit if isinstance(limit, int) else None


def is_adapter(path: Path) -> bool:
    """Return whether a directory holds an adapter."""
    return (path / ADAPTER_CONFIG).is_file()


def adapter_base(path: Path, key: str = "actor.model") -> Path:
    """Return the directory or the GGUF file of the base model of the adapter in `path`.

    Raise `ConfigError` under `key` if adapter_config.json does not name a model on this machine, or
    if the adapter is its own base.
    """
    base, seen = _named_base(path, key), {path.resolve()}
    link = base
    while is_adapter(link):
        if link.resolve() in seen:
            reason = f"its {ADAPTER_CONFIG} names the adapter itself as its base model"
            raise ConfigError(key, str(path), reason, "Correct base_model_name_or_path")
        seen.add(link.resolve())
        link = _named_base(link, key)
    return base


def base_name(path: Path, key: str = "actor.model") -> str:
    """Return the name or the path of the base model that the adapter in `path` names.

    Raise `ConfigError` under `key` if its adapter_config.json cannot be read.
    """
    try:
        name = json.loads((path / ADAPTER_CONFIG).read_text("utf-8"))["base_model_name_or_path"]
        if not isinstance(name, str):
            raise TypeError(f"base_model_name_or_path is {name!r}")
    except (ValueError, KeyError, TypeError) as error:
        reason = f"its {ADAPTER_CONFIG} cannot be read ({type(error).__name__}: {error})"
        raise ConfigError(key, str(path), reason, "Restore the file") from error
    return name


def _named_base(path: Path, key: str) -> Path:
    """Return the directory or the GGUF file of the base model that the adapter in `path` names.

    The base model may be an adapter. Raise `ConfigError` under `key` as `adapter_base` does.
    """
    name = base_name(path, key)
    try:
        return resolve_model(name, key)
    except ConfigError as error:
        reason = f"the base model of this adapter, {error.value}, {error.reason}"
        remedy = (
            f"Correct base_model_name_or_path in its {ADAPTER_CONFIG}; of a checkpoint, in a copy "
            "that crl export makes"
        )
        raise ConfigError(key, str(path), reason, remedy) from error


def _gguf_file(path: Path, key: str) -> Path | None:
    """Return the GGUF file that `path` names: the file, or the only GGUF file in a directory.

    Return None if there is none. Raise `ConfigError` under `key` if there are several.
    """
    if is_gguf(path):
        return path
    files = gguf_files(path) if path.is_dir() else []
    if len(files) > 1:
        reason = f"the directory contains several GGUF files ({', '.join(f.name for f in files)})"
        raise ConfigError(key, str(path), reason, "Give the path of one of them")
    return files[0] if files else None


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a file with the suffix of GGUF files, in small or large letters."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files in a directory, sorted by name."""
    return sorted(filter(is_gguf, folder.iterdir()))


def cached_model(name: str) -> Path | None:
    """Return the directory of a hub model in the Hugging Face cache.

    Return None if it is not cached, or if `name` is not the name of a hub model.
    """
    if not _HUB_NAME.fullmatch(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def download_hint(name: str) -> str:
    """Return the command that downloads a hub model, as the end of a remedy.

    Return an empty text if `name` is not the name of a hub model.
    """
    return f"; or download it: hf download {name}" if _HUB_NAME.fullmatch(name) else ""


def download_command(name: str) -> str:
    """Return the command that downloads a model of a preset."""
    return f"crl models get {name}" if name in PACKAGED_MODELS else f"hf download {name}"


def not_downloaded(name: str, key: str) -> ConfigError:
    """Return the error for a model that must be downloaded first."""
    reason = "is not downloaded"
    if name not in PACKAGED_MODELS:
        reason += ", and crl does not download models from hubs"
    remedy = f"Run {download_command(name)}, or give the directory of a model"
    return ConfigError(key, name, reason, remedy)


def profile_of(name: str, key: str = "actor.model") -> Profile:
    """Return the profile of a model by its name; "full" for a model that is not downloaded.

    Raise `ConfigError` under `key`.
    """
    path = find_model(name, key)
    return model_profile(path, key) if path else "full"


def model_profile(path: Path, key: str = "actor.model") -> Profile:
    """Return the rendering that the model was made for: {"profile": ...} in its crl.json, or "full"
    without that file.

    Raise `ConfigError` under `key` if crl.json cannot be read or names another profile.
    """
    profile_file = path / PROFILE_FILE
    if not profile_file.is_file():
        return "full"
    try:
        profile = json.loads(profile_file.read_text("utf-8")).get("profile", "full")
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            key,
            str(path),
            f"its crl.json cannot be read ({error})",
            'Write {"profile": "full"} or remove it',
        ) from error
    if profile not in ("full", "compact"):
        raise ConfigError(
            key, str(path), f'its crl.json declares the profile "{profile}"', "Use full or compact"
        )
    return cast(Profile, profile)


def write_profile(path: Path, profile: Profile) -> None:
    """Declare the profile of the model in the directory `path`."""
    (path / PROFILE_FILE).write_text(json.dumps({"profile": profile}) + "\n", "utf-8")


@dataclass(frozen=True)
class ModelSize:
    """Size of a model's weights."""

    parameters: int
    bytes: int


def model_size(path: Path, key: str = "actor.model") -> ModelSize | None:
    """Return the size of a model's weights, read from the headers of its safetensors files.

    Return None if there are no such files.

    Raise `ConfigError` under `key` if a header cannot be read.
    """
    if not (tensors := _tensors(path, key).values()):
        return None
    parameters = sum(prod(tensor["shape"]) for tensor in tensors)
    return ModelSize(
        parameters, sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors)
    )


def weight_shapes(path: Path, key: str = "actor.model") -> dict[str, list[int]]:
    """Return the shapes of a model's weights, by name. Raise `ConfigError` like `model_size`.

    The output head is left out, because a file may contain it although it is tied.
    """
    tensors = _tensors(path, key)
    return {name: entry["shape"] for name, entry in tensors.items() if name != OUTPUT_HEAD}


def _tensors(path: Path, key: str) -> dict[str, dict]:
    """Return the header entries of all tensors of a model, by name; none for an adapter."""
    if is_adapter(path):
        return {}
    files = [file for file in weight_files(path) if file.suffix == ".safetensors"]
    headers = [_safetensors_header(file, key) for file in files]
    return {
        name: entry for header in headers for name, entry in header.items() if name != _METADATA
    }


def weight_files(path: Path) -> list[Path]:
    """Return the files with the weights of a model that is no adapter, in order.

    `path` is a directory or a GGUF file. Files in safetensors come first: they are used if there
    are some.
    """
    if path.is_file():
        return [path]
    patterns = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
    return next((files for name in patterns if (files := sorted(path.glob(name)))), [])


def safetensors_metadata(file: Path, key: str) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raise `ConfigError` like `model_size`."""
    return _safetensors_header(file, key).get(_METADATA, {})


def _safetensors_header(file: Path, key: str) -> dict[str, dict]:
    """Return the header: an entry for each tensor, and the metadata.

    The file starts with the length of the header as a little-endian u64, followed by the header as
    JSON. Raise `ConfigError` also if the file is shorter than its header says.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            size = file.stat().st_size
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != _METADATA]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise ConfigError(
            key,
            str(file),
            f"is not a safetensors file ({error})",
            "Download or create the model again",
        ) from error
    if size < whole:
        reason = f"is incomplete: it has {size:,} of {whole:,} bytes"
        raise ConfigError(key, str(file), reason, "Download or create the model again")
    return header
