"""Validation of settings against the schema.

Every error of pydantic becomes one `ConfigError` with a dotted key and a remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from crl.config.schema import RunConfig
from crl.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

TRUNCATING = frozenset({"top_p", "top_k", "min_p"})
"""Options of truncated sampling. They are refused with a specific explanation."""


def validated(
    model: type[Model],
    data: Mapping[str, Any],
    *,
    prefix: str = "",
    origins: Mapping[str, str] | None = None,
) -> Model:
    """Return `data` as a validated `model`.

    `prefix`: dotted key of `data` in the config. `origins`: origin of values, by dotted key.

    Raise `ConfigError` for the first error. Unknown keys are reported first, because a misspelt key
    often causes the other errors.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = sorted(
            error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden"
        )[0]
        path = [str(part) for part in found["loc"] if part != "[key]"]
        key = ".".join([prefix, *path] if prefix else path)
        origin = _origin(key, origins or {})
        if found["type"] == "extra_forbidden":
            raise _unknown_key(model, path, key, found["input"], origin) from None
        raise _bad_value(model, path, key, found, origin) from None


def _origin(key: str, origins: Mapping[str, str]) -> str | None:
    """Return the origin of the key, of a key below it, or of the nearest table above it."""
    within = [origin for known, origin in origins.items() if known.startswith(f"{key}.")]
    if key not in origins and within:
        return within[-1]
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key)


def _unknown_key(
    model: type[BaseModel], path: Sequence[str], key: str, value: object, origin: str | None
) -> ConfigError:
    """Return the error for a key that is not a setting."""
    leaf = path[-1]
    if leaf in TRUNCATING:
        return ConfigError(
            key,
            value,
            "is refused because sampling is by temperature only: with top_p, top_k or min_p the "
            "engine renormalises over the tokens that survive, and importance ratios against the "
            "trainer's whole softmax are wrong",
            "Remove it; actor.temperature is the one setting of sampling",
        )
    siblings = list(_section(model, path[:-1]))
    close = [
        key.removesuffix(leaf) + sibling
        for sibling in difflib.get_close_matches(leaf, siblings, n=1)
    ]
    close = close or [known for known in dotted_keys() if known.rpartition(".")[2] == leaf]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    in_file = f" (from {origin})" if origin and not origin.startswith("-") else ""
    return ConfigError(
        key, value, f"is not a setting{in_file}", f"{hint}Available: {', '.join(siblings)}"
    )


def _bad_value(
    model: type[BaseModel], path: Sequence[str], key: str, found: Any, origin: str | None
) -> ConfigError:
    """Return the error for a value that pydantic rejected."""
    where = f"Correct it in {origin}" if origin else f"Give another value with --set {key}=VALUE"
    if found["type"] == "missing":
        return ConfigError(key, None, "is missing", where)
    if found["type"] in ("model_type", "model_attributes_type"):
        keys = ", ".join(f"{key}.{name}" for name in _section(model, path))
        return ConfigError(
            key, found["input"], "is a section, not a value", f"Set one of its keys: {keys}"
        )
    reason = found["msg"].removeprefix("Value error, ").removeprefix("Input ")
    about = _description(model, path)
    return ConfigError(
        key,
        found["input"],
        reason[0].lower() + reason[1:],
        f"{where} ({about})" if about else where,
    )


def _section(kind: Any, path: Sequence[str]) -> Mapping[str, Any]:
    """Return the fields of the section at `path`.

    In the table of tasks, every name is one section.
    """
    for part in path:
        kind = get_args(kind)[1] if get_origin(kind) is dict else kind.model_fields[part].annotation
    return getattr(kind, "model_fields", {})


def _description(model: type[BaseModel], path: Sequence[str]) -> str | None:
    """Return the description of the field at `path`: the docstring under it in the schema."""
    field = _section(model, path[:-1]).get(path[-1]) if path else None
    return field.description if field is not None else None


def dotted_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting. The settings of a task are listed under tasks.NAME."""
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if get_origin(kind) is dict:
            yield from dotted_keys(get_args(kind)[1], f"{prefix}{name}.NAME.")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from dotted_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
