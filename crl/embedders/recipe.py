"""Settings with which a directory's encoder makes vectors, read from sentence-transformers files.

This module does not import torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from crl.config.models import download_hint, not_downloaded
from crl.config.models.shapes import PUBLISHED_SHAPES
from crl.errors import ConfigError

MODEL_KEY = "embedder.model"
"""Config key that errors name."""

Pooling = Literal["mean", "cls", "lasttoken"]

POOLINGS = ("mean", "cls", "lasttoken")
"""Supported poolings."""

FLAG_POOLINGS = {"mean_tokens": "mean", "cls_token": "cls"}
"""Pooling names of flags in older files: pooling_mode_mean_tokens, pooling_mode_cls_token.

The flag pooling_mode_lasttoken already has the pooling's name.
"""


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Settings of an encoder."""

    folder: Path
    """Folder of the model and its tokenizer."""
    pooling: Pooling = "mean"
    """Pooling of the last hidden states."""
    prompt: str = ""
    """Prefix of every text."""
    lowercase: bool = False
    """True if texts are converted to lower case."""
    max_tokens: int | None = None
    """Maximal tokens of a text; None for the model's limit."""

    def prepare(self, texts: Sequence[str]) -> list[str]:
        """Return the texts in the form that the tokenizer receives."""
        # Some tokenizers make no token of an empty text.
        texts = [self.prompt + text or " " for text in texts]
        return [text.lower() for text in texts] if self.lowercase else texts

    def fingerprint(self, max_tokens: int, weights: int) -> int:
        """Return a checksum of everything that determines the vectors.

        `max_tokens`: maximal tokens of a text. `weights`: checksum of the weights.
        """
        values = (self.pooling, self.prompt, self.lowercase, max_tokens)
        crc = zlib.crc32(repr(values).encode(), weights)
        file = self.folder / "tokenizer.json"
        return zlib.crc32(file.read_bytes(), crc) if file.is_file() else crc


def read_encoder_settings(path: Path) -> EncoderSettings:
    """Return the settings of the encoder in directory `path`.

    Without modules.json, pooling is mean.

    Raise `ConfigError` if there is no encoder, a file cannot be read, or a module is not supported.
    """
    if not path.is_dir():
        if str(path) in PUBLISHED_SHAPES:
            raise not_downloaded(str(path), MODEL_KEY)
        remedy = (
            "Use hash, wordllama, the URL of an endpoint, or a directory with an encoder in "
            "Hugging Face format (crl does not download models from hubs)"
            f"{download_hint(str(path))}"
        )
        reason = "is not hash, wordllama, a URL or a directory"
        raise ConfigError(MODEL_KEY, str(path), reason, remedy)
    modules = _read_json(path / "modules.json") or []
    try:
        module_paths = {
            module["type"].rpartition(".")[2]: path / module["path"] for module in modules
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise _unreadable(path / "modules.json", error) from error
    if unsupported := sorted(set(module_paths) - {"Transformer", "Pooling", "Normalize"}):
        raise ConfigError(
            MODEL_KEY,
            str(path),
            f"its modules.json lists a module that is not supported: {', '.join(unsupported)}",
            "Use another encoder",
        )
    folder = module_paths.get("Transformer", path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            MODEL_KEY,
            str(folder),
            "the directory contains no config.json",
            "Give a directory in Hugging Face format",
        )
    limits = _read_object(folder / "sentence_bert_config.json")
    return EncoderSettings(
        folder,
        _read_pooling(module_paths["Pooling"]) if "Pooling" in module_paths else "mean",
        _read_prompt(path / "config_sentence_transformers.json"),
        bool(limits.get("do_lower_case")),
        limits.get("max_seq_length"),
    )


def _read_pooling(folder: Path) -> Pooling:
    table = _read_object(folder / "config.json")
    flags = [
        name.removeprefix("pooling_mode_")
        for name, value in table.items()
        if name.startswith("pooling_mode_") and value
    ]
    modes = [FLAG_POOLINGS.get(flag, flag) for flag in flags] or [table.get("pooling_mode", "mean")]
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise ConfigError(
            MODEL_KEY,
            str(folder),
            f"the pooling {' and '.join(map(str, modes))} is not supported",
            f"Use an encoder whose pooling is one of {', '.join(POOLINGS)}",
        )
    return cast(Pooling, modes[0])


def _read_prompt(file: Path) -> str:
    """Return the default prompt, empty if there is none.

    All texts are embedded in the same way. Therefore a prompt for queries only, or for documents
    only, is not used.
    """
    table = _read_object(file)
    name, prompts = table.get("default_prompt_name"), table.get("prompts") or {}
    if name is not None and not isinstance(prompts.get(name), str):
        raise ConfigError(
            MODEL_KEY,
            str(file),
            f"its default_prompt_name {name!r} is not the name of one of its prompts",
            "Fix the file",
        )
    return prompts[name] if name is not None else ""


def _read_object(file: Path) -> dict[str, Any]:
    table = _read_json(file) or {}
    if not isinstance(table, dict):
        raise _unreadable(file, TypeError("the file must contain a JSON object"))
    return table


def _read_json(file: Path) -> Any:
    """Return the parsed JSON file, or None if it does not exist."""
    try:
        return json.loads(file.read_text("utf-8")) if file.is_file() else None
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        MODEL_KEY,
        str(file),
        f"cannot be read ({type(error).__name__}: {error})",
        "Download or create the encoder again",
    )
