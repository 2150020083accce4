"""Files of saved adapters, and the base models that belong to them. Imports no torch.

The metadata of an adapter's weights record two facts about its base model in the run: the precision
and the SHA-256 of the weights. The SHA-256 shows whether a model at the path of the base model, or
at a new path, is the base model.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from crl.config.models import (
    ADAPTER_CONFIG,
    adapter_base,
    base_name,
    find_model,
    is_adapter,
    resolve_model,
    safetensors_metadata,
    weight_files,
)
from crl.errors import ConfigError
from crl.modeling import ADAPTER_WEIGHTS, BASE_PRECISION, BASE_SHA256, Precision
from crl.scratch import scratch_folder


@dataclass(frozen=True)
class BaseModel:
    """Base model that saved adapters name."""

    path: Path
    """Directory or GGUF file. The directory may hold an adapter."""
    sha256: str
    """SHA-256 of its weights."""

    @classmethod
    def of(cls, path: Path, key: str = "actor.model") -> BaseModel:
        """Return the model in `path`. Raise `ConfigError` as `weights_sha256` does."""
        return cls(path, weights_sha256(path, key))


def weights_sha256(model: Path, key: str = "actor.model") -> str:
    """Return the SHA-256 of the SHA-256 of all files of a model's weights, in order.

    `model` is a directory or a GGUF file. The files of an adapter are its own and those of its base
    model. Raise `ConfigError` under `key` if a base model does not exist.
    """
    digest = hashlib.sha256()
    while is_adapter(model):
        digest.update(_sha256(model / ADAPTER_WEIGHTS))
        model = adapter_base(model, key)
    for file in weight_files(model):
        digest.update(_sha256(file))
    return digest.hexdigest()


def _sha256(file: Path) -> bytes:
    status = file.stat()
    return _sha256_of(file.resolve(), status.st_size, status.st_mtime_ns)


@cache
def _sha256_of(file: Path, size: int, modified: int) -> bytes:
    """Return the SHA-256 of a file. A file with another size or time of change is read again."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def recorded_precision(adapter: Path, key: str = "actor.model") -> Precision | None:
    """Return the precision in which the base model of an adapter was used when it was trained.

    Return None for an adapter that crl did not write. Raise `ConfigError` under `key` if its
    weights cannot be read.
    """
    precision = _metadata(adapter, key).get(BASE_PRECISION)
    if precision not in (None, "float32", "bfloat16"):
        reason = f"its {ADAPTER_WEIGHTS} names the unknown precision {precision!r}"
        raise ConfigError(key, str(adapter), reason, "Restore the file")
    return cast("Precision | None", precision)


def merged_precision(model: Path, key: str = "actor.model") -> Precision | None:
    """Return the precision that adapters fix for the model in `model` when they are merged.

    Return None if there is no adapter, or none that crl wrote. The precision is then that of the
    base model's config.json.
    """
    while is_adapter(model):
        if precision := recorded_precision(model, key):
            return precision
        model = adapter_base(model, key)
    return None


def _metadata(adapter: Path, key: str) -> dict[str, str]:
    """Return the metadata of an adapter's weights; none if it has no weights in safetensors."""
    file = adapter / ADAPTER_WEIGHTS
    return safetensors_metadata(file, key) if file.is_file() else {}


# ── base models that have moved ───────────────────────────────────────────────────────────────────


def base_has_moved(adapter: Path, key: str = "actor.model") -> bool:
    """Return whether the base model that an adapter names is gone.

    Raise `ConfigError` under `key` if its adapter_config.json cannot be read.
    """
    name = base_name(adapter, key)
    try:
        return find_model(name, key) is None
    except ConfigError:
        return True


def require_same_base(adapter: Path, base: Path, key: str) -> None:
    """Raise `ConfigError` under `key` if `base` is not the base model of an adapter.

    Their weights must have the recorded SHA-256.
    """
    recorded = _metadata(adapter, key).get(BASE_SHA256)
    if recorded is None:
        reason = f"cannot be compared with the base model of {adapter}, which records no SHA-256"
        remedy = f"Move the base model back to {base_name(adapter, key)}, or link it there"
        raise ConfigError(key, str(base), reason, remedy)
    _compare(adapter, base, recorded, key, f"Give the new path of {base_name(adapter, key)}")


def unchanged_base(adapter: Path, key: str) -> Path:
    """Return the base model that an adapter names.

    Raise `ConfigError` under `key` if it does not exist, or if its weights do not have the SHA-256
    that the adapter records. An adapter that crl did not write records none.
    """
    base = adapter_base(adapter, key)
    if recorded := _metadata(adapter, key).get(BASE_SHA256):
        remedy = "Restore the base model at this path"
        _compare(adapter, base, recorded, key, remedy)
    return base


def _compare(adapter: Path, base: Path, recorded: str, key: str, remedy: str) -> None:
    """Raise `ConfigError` under `key` if the weights in `base` do not have this SHA-256."""
    if (found := weights_sha256(base, key)) != recorded:
        reason = (
            f"is not the base model of {adapter}: their weights differ (SHA-256 {found[:12]}… "
            f"instead of {recorded[:12]}…)"
        )
        raise ConfigError(key, str(base), reason, remedy)


def moved_base(adapter: Path, model: str, key: str) -> Path:
    """Return the base model of a run's adapter: the one that it names, or `model` if that is gone.

    `model` is the base model's name or path in the settings of the run. Raise `ConfigError` under
    `key` if it is needed and does not exist, or is another model.
    """
    if not base_has_moved(adapter, key):
        return unchanged_base(adapter, key)
    try:
        base = resolve_model(model, key)
    except ConfigError as error:
        reason = f"the base model of {adapter} {error.reason}"
        raise ConfigError(key, error.value, reason, f"Restore it. {moved_remedy(key)}") from error
    require_same_base(adapter, base, key)
    return base


def moved_remedy(key: str) -> str:
    """Return the remedy for a run whose model `key` has moved."""
    return (
        f"Add --set {key}=DIR with its new path to crl eval, crl resume or crl fork. To export a "
        "model, fork the run first"
    )


def with_base(adapter: Path, base: Path) -> Path:
    """Return a temporary directory of this process with an adapter that names another base model.

    Its other files are links to those of `adapter`.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch_folder()))
    for file in adapter.resolve().iterdir():
        (folder / file.name).symlink_to(file)
    write_base_name(folder, base)
    return folder


def write_base_name(adapter: Path, base: Path) -> None:
    """Write the path of the base model to the adapter_config.json of an adapter."""
    file = adapter / ADAPTER_CONFIG
    config = json.loads(file.read_text("utf-8")) | {"base_model_name_or_path": str(base)}
    file.unlink()  # it may be a link
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
