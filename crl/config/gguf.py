"""Models in GGUF files, converted once to directories in Hugging Face format.

A converted model is in $XDG_CACHE_HOME/crl/gguf, under the name of its file and a hash of path,
size and modification time. Everything else in crl reads this directory like any other model. Torch,
transformers and gguf are imported only for a conversion.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from crl.errors import ConfigError


def gguf_file(path: Path, key: str) -> Path | None:
    """Return the GGUF file that `path` names: the file, or the only GGUF file in a directory.

    Return None if there is none. Raise `ConfigError` under `key` if there are several.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) > 1:
        reason = f"the directory contains several GGUF files ({', '.join(f.name for f in files)})"
        raise ConfigError(key, str(path), reason, "Give the path of one of them")
    return files[0] if files else None


def converted(file: Path, key: str) -> Path:
    """Return the directory of the model in a GGUF file. The first call converts the file.

    Quantized weights are converted to float32, which holds their values exactly.

    Raise `ConfigError` under `key` if a package is missing, if the file cannot be converted, or if
    the directory cannot be written.
    """
    file = file.resolve()
    status = file.stat()
    identity = f"{file}\n{status.st_size}\n{status.st_mtime_ns}"
    folder = cache_folder() / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec("gguf") is None:
        reason = "a GGUF file needs the package gguf, which is not installed"
        raise ConfigError(key, str(file), reason, "Run pip install 'crl[gguf]'")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError as error:
        reason = f"its conversion cannot be written to {folder.parent} ({error.strerror})"
        raise ConfigError(
            key, str(file), reason, "Set XDG_CACHE_HOME to a writable folder"
        ) from error
    try:
        _convert(file, partial)
        partial.rename(folder)
    except Exception as error:  # a broken file raises many types of errors
        if not (folder / "config.json").is_file():  # another process has not converted it either
            first_line = str(error).strip().split("\n")[0]
            raise ConfigError(
                key,
                str(file),
                f"the GGUF file cannot be converted ({first_line})",
                "Give a GGUF file of a language model that transformers supports, or a directory "
                "in Hugging Face format",
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "crl" / "gguf"


def _convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to `folder` in Hugging Face format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    source = {"gguf_file": file.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    # The weights are not quantized any more, but transformers refuses to save them otherwise.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)
