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

from crl.config.models import not_downloaded
from crl.config.shapes import KNOWN
from crl.errors import ConfigError

KEY = "embedder.model"
"""Config key that errors name."""

Pooling = Literal["mean", "cls", "lasttoken"]

POOLINGS = ("mean", "cls", "lasttoken")
"""Supported poolings."""

FLAGS = {"mean_tokens": "mean", "cls_token": "cls"}
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
    lower: bool = False
    """Whether texts are converted to lower case."""
    max_tokens: int | None = None
    """Maximal tokens of a text; None for the model's limit."""

    def prepared(self, texts: Sequence[str]) -> list[str]:
        """Return the texts in the form that the tokenizer receives."""
        # Some tokenizers make no token of an empty text.
        texts = [self.prompt + text or " " for text in texts]
        return [text.lower() for text in texts] if self.lower else texts

    def fingerprint(self, limit: int, weights: int) -> int:
        """Return a checksum of everything that determines the vectors.

        `limit`: maximal tokens of a text. `weights`: checksum of the weights.
        """
        crc = zlib.crc32(repr((self.pooling, self.prompt, self.lower, limit)).encode(), weights)
        file = self.folder / "tokenizer.json"
        return zlib.crc32(file.read_bytes(), crc) if file.is_file() else crc


def read_recipe(path: Path) -> EncoderSettings:
    """Return the recipe of the encoder in directory `path`. Without modules.json, pooling is mean.

    Raise `ConfigError` if there is no encoder, a file cannot be read, or a module is not supported.
    """
    if not path.is_dir():
        if str(path) in KNOWN:
            raise not_downloaded(str(path), KEY)
        remedy = (
            "Use hash, the URL of an endpoint, or a directory with an encoder in Hugging Face "
            "format (crl downloads nothing)"
        )
        raise ConfigError(KEY, str(path), "is neither hash nor a URL, and no directory", remedy)
    modules = _read(path / "modules.json") or []
    try:
        kinds = {module["type"].rpartition(".")[2]: path / module["path"] for module in modules}
    except (TypeError, KeyError, AttributeError) as error:
        raise _unreadable(path / "modules.json", error) from error
    if others := sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"}):
        raise ConfigError(
            KEY,
            str(path),
            f"its modules.json has a module that is not served: {', '.join(others)}",
            "Use another encoder",
        )
    folder = kinds.get("Transformer", path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            KEY,
            str(folder),
            "that directory holds no config.json",
            "Give a directory in Hugging Face format",
        )
    limits = _table(folder / "sentence_bert_config.json")
    return EncoderSettings(
        folder,
        _pooling(kinds["Pooling"]) if "Pooling" in kinds else "mean",
        _prompt(path / "config_sentence_transformers.json"),
        bool(limits.get("do_lower_case")),
        limits.get("max_seq_length"),
    )


def _pooling(folder: Path) -> Pooling:
    table = _table(folder / "config.json")
    flags = [
        name.removeprefix("pooling_mode_")
        for name, on in table.items()
        if name.startswith("pooling_mode_") and on
    ]
    modes = [FLAGS.get(flag, flag) for flag in flags] or [table.get("pooling_mode", "mean")]
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise ConfigError(
            KEY,
            str(folder),
            f"its pooling is {' and '.join(map(str, modes))}",
            f"Use an encoder with {', '.join(POOLINGS)}",
        )
    return cast(Pooling, modes[0])


def _prompt(file: Path) -> str:
    """Return the default prompt, empty if there is none.

    All texts are embedded in the same way. Therefore a prompt for queries only, or for documents
    only, is not used.
    """
    table = _table(file)
    name, prompts = table.get("default_prompt_name"), table.get("prompts") or {}
    if name is not None and not isinstance(prompts.get(name), str):
        raise ConfigError(
            KEY,
            str(file),
            f"its default_prompt_name, {name!r}, is none of its prompts",
            "Mend the file",
        )
    return prompts[name] if name is not None else ""


def _table(file: Path) -> dict[str, Any]:
    table = _read(file) or {}
    if not isinstance(table, dict):
        raise _unreadable(file, TypeError("it holds no object"))
    return table


def _read(file: Path) -> Any:
    """Return the parsed JSON file, or None if it does not exist."""
    try:
        return json.loads(file.read_text("utf-8")) if file.is_file() else None
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        KEY,
        str(file),
        f"it cannot be read ({type(error).__name__}: {error})",
        "Download or make the encoder again",
    )
