"""Finding a model and reading what it says about itself, without loading it (no torch here)."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, cast

from crl.config.catalog import PACKAGE, did_you_mean
from crl.errors import ConfigError

Profile = Literal["full", "compact"]


def bundled_models() -> list[str]:
    """Names of the models that are part of the package."""
    return sorted(path.parent.name for path in (PACKAGE / "models").glob("*/config.json"))


def resolve_model(name: str, key: str = "actor.model") -> Path:
    """The directory of a bundled model, or `name` itself when it is a directory with a config.json. Raises `ConfigError`."""
    if name in bundled_models():
        return PACKAGE / "models" / name
    path = Path(os.path.expanduser(name))
    if (path / "config.json").is_file():
        return path.resolve()
    if path.is_dir():
        raise ConfigError(key, name, "that directory holds no config.json", "Give a directory in Hugging Face format")
    remedy = f"{did_you_mean(name, bundled_models())}; or give a directory in Hugging Face format (crl downloads nothing)"
    raise ConfigError(key, name, "is neither a bundled model nor a directory", remedy)


def model_profile(path: Path, key: str = "actor.model") -> Profile:
    """Which rendering the model was made for: {"profile": ...} in its crl.json; without that file, full. Raises `ConfigError`."""
    declared = path / "crl.json"
    if not declared.is_file():
        return "full"
    try:
        profile = json.loads(declared.read_text("utf-8")).get("profile", "full")
    except (ValueError, AttributeError) as error:
        raise ConfigError(key, str(path), f"its crl.json cannot be read ({error})", 'Write {"profile": "full"} or remove it') from error
    if profile not in ("full", "compact"):
        raise ConfigError(key, str(path), f'its crl.json declares the profile "{profile}"', "Use full or compact")
    return cast(Profile, profile)


@dataclass(frozen=True)
class ModelSize:
    parameters: int
    bytes: int


def model_size(path: Path, key: str = "actor.model") -> ModelSize | None:
    """Size of the model's weights from the headers of its safetensors files; None without any. Raises `ConfigError`."""
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    if not files:
        return None
    tensors = [tensor for file in files for tensor in _safetensors_header(file, key)]
    parameters = sum(prod(tensor["shape"]) for tensor in tensors)
    return ModelSize(parameters, sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors))


def _safetensors_header(file: Path, key: str) -> list[dict]:
    """The header's entries, one a tensor: a little-endian u64 with its length, then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        return [entry for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, struct.error, AttributeError) as error:
        raise ConfigError(key, str(file), f"is not a safetensors file ({error})", "Download or make the model again") from error
