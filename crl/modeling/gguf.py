"""Models in GGUF files, and saved adapters, as directories in Hugging Face format.

The config names the GGUF file. A file has two directories in $XDG_CACHE_HOME/crl/gguf. Their names
contain the file's name and a hash of its path, size and modification time:

* the description: config.json and the tokenizer. `described` reads them from the header of the
  file. Checks and plans need nothing else.
* the model: also the weights, in float32. `converted` makes this directory at the start of a run.

Torch, transformers and gguf are imported only to make a directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from crl.config.models import ADAPTER_CONFIG, adapter_base, find_model, is_adapter
from crl.config.models.packaged import cache_folder
from crl.errors import ConfigError, is_disk_full
from crl.extras import require_package
from crl.modeling import Precision
from crl.scratch import remove_stale_folders, scratch_folder


def find_folder(name: str, key: str) -> Path | None:
    """Return the directory of the model `name`, which may lack weights, or None as `find_model`.

    Raise `ConfigError` under `key` as `find_model` and `described` do.
    """
    path = find_model(name, key)
    return path and described(path, key)


def described(path: Path, key: str) -> Path:
    """Return a directory with config.json and tokenizer of the model at `path`.

    A directory is returned unchanged. A GGUF file is described by its header, and an adapter by its
    base model. The weights are not read.

    Raise `ConfigError` under `key` if the package gguf is missing, if the file cannot be read, or
    if the directory cannot be written.
    """
    if is_adapter(path):
        return described(adapter_base(path, key), key)
    if not path.is_file():
        return path
    model = _cached_folder(path)
    if (model / "config.json").is_file():
        return model
    return made_from(path, model.with_name(f"{model.name}-header"), describe, key)


def converted(path: Path, key: str, note: Callable[[str], object]) -> Path:
    """Return a directory with the whole model at `path`. Convert a GGUF file once.

    A directory is returned unchanged. An adapter is merged into its base model, in a temporary
    directory of this process. Quantized weights are converted to float32, which holds their values
    exactly. `note` is called with a line of text before a conversion, which takes minutes.

    Raise `ConfigError` under `key` as `described` does.
    """
    if is_adapter(path):
        return _merged(path, key, note)
    if not path.is_file():
        return path
    model = _cached_folder(path)
    if not (model / "config.json").is_file():
        note(f"converting {path} to float32 in {model}")
    return made_from(path, model, convert, key)


_merged_folders: dict[tuple[Path, int], Path] = {}
"""Temporary directories of merged models, by the adapter and its time of modification."""


def _merged(adapter: Path, key: str, note: Callable[[str], object]) -> Path:
    """Return a temporary directory with the base model of an adapter and the adapter merged."""
    from crl.modeling.adapters import unchanged_base
    from crl.modeling.lora import write_merged

    address = adapter, (adapter / ADAPTER_CONFIG).stat().st_mtime_ns
    if address not in _merged_folders:
        folder = Path(tempfile.mkdtemp(dir=scratch_folder()))
        write_merged(adapter, converted(unchanged_base(adapter, key), key, note), folder, key)
        _merged_folders[address] = folder
    return _merged_folders[address]


def _cached_folder(file: Path) -> Path:
    """Return the directory of the converted model, whether or not it exists."""
    status = file.stat()
    identity = f"{file}\n{status.st_size}\n{status.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache_folder() / "gguf" / f"{file.stem}-{digest}"


def made_from(file: Path, folder: Path, write: Callable[[Path, Path], None], key: str) -> Path:
    """Return `folder`. If it does not exist, call `write(file, DIR)` and rename DIR to `folder`.

    DIR is in a scratch folder. If this process is killed, the next call removes it.

    Raise `ConfigError` under `key` if `write` fails. Value, reason and remedy of a `ConfigError`
    that `write` raises are kept.
    """
    remove_stale_folders(folder.parent)
    if (folder / "config.json").is_file():
        return folder
    require_package("gguf", key, str(file))
    try:
        unfinished = Path(tempfile.mkdtemp(dir=scratch_folder(folder.parent)))
    except OSError as error:
        reason = f"its conversion cannot be written to {folder.parent} ({error.strerror})"
        remedy = "Set XDG_CACHE_HOME to a writable folder with space"
        raise ConfigError(key, str(file), reason, remedy) from error
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # transformers draws a progress bar
            write(file, unfinished)
        unfinished.rename(folder)
    except ConfigError as error:
        raise ConfigError(key, error.value, error.reason, error.remedy) from error
    except Exception as error:  # a broken file raises many types of errors
        if not (folder / "config.json").is_file():  # no other process has made it meanwhile
            first_line = str(error).strip().split("\n")[0].rstrip(".")
            remedy = (
                "Download the file again in case it is incomplete, or give a GGUF file of a "
                "language model that transformers supports, or a directory in Hugging Face format"
            )
            if is_disk_full(error):
                remedy = f"Free some disk space in {folder.parent}, or set XDG_CACHE_HOME"
            reason = f"the GGUF file cannot be converted ({first_line})"
            raise ConfigError(key, str(file), reason, remedy) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def describe(file: Path, folder: Path) -> None:
    """Write config.json and the tokenizer of a GGUF file to `folder`. Read only its header."""
    import torch
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(file.parent, **source)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)


def convert(file: Path, folder: Path, dtype: Precision = "float32") -> None:
    """Write the model and the tokenizer of a GGUF file to `folder` in Hugging Face format.

    Raise `ConfigError` under the key "model" if weights are missing, have another shape, or are
    not read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    source = {"gguf_file": file.name, "local_files_only": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        **source,
    )
    model, report = loaded
    # The weights are not quantized any more, but transformers refuses to save them otherwise.
    model.hf_quantizer = None
    del model.config.quantization_config
    # Transformers initialises such weights with random numbers. Tied output heads are not listed.
    _require_none(file, "lacks weights", report["missing_keys"])
    # Transformers does not compare the shapes of quantized models, and so of GGUF files.
    with torch.device("meta"):
        expected = dict(AutoModelForCausalLM.from_config(model.config).named_parameters())
    mismatched = {name for name, *_ in report["mismatched_keys"]} | {
        name for name, p in model.named_parameters() if p.shape != expected[name].shape
    }
    _require_none(file, "has weights of another shape", mismatched)
    _require_none(file, "has tensors that transformers does not read", _unread(file, model))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)


MAX_NAMED = 3
"""Maximum number of tensors that an error names."""


def _require_none(file: Path, problem: str, names: Collection[str]) -> None:
    """Raise `ConfigError` if there are tensors with this problem."""
    if names:
        shown = ", ".join(sorted(names)[:MAX_NAMED]) + ", …" * (len(names) > MAX_NAMED)
        reason = f"the GGUF file {problem}: {shown} ({len(names)} in total)"
        remedy = "Give another GGUF file, or a directory in Hugging Face format"
        raise ConfigError("model", str(file), reason, remedy)


def _unread(file: Path, model: Any) -> set[str]:
    """Return the names of tensors in a GGUF file that transformers does not load into `model`.

    One of them is rope_freqs.weight of Llama 3.1 and 3.2, with factors of the frequencies of the
    positions. Transformers reads neither this tensor nor the settings that it was computed from
    (rope_scaling), so it is refused like the others: attention would differ at all positions.
    """
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    (number,) = (number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, model.config.num_hidden_layers)
    read = set()
    for name in model.state_dict():
        stem, dot, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            stem, dot, kind = name, "", ""
        parts = stem.split(".")
        # Transformers also loads files of a part of a model, such as BloomModel.
        found = (names.get_name(".".join(parts[begin:])) for begin in range(len(parts)))
        read |= {f"{found_name}{dot}{kind}" for found_name in found if found_name}
    return {tensor.name for tensor in reader.tensors} - read
