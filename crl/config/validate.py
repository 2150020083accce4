"""Validation of settings against the schema.

Every error of pydantic becomes one `ConfigError` with a dotted key and a remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from crl.config.layers import first_leaf
from crl.config.method import BUNDLED_METHODS, method_spec
from crl.config.renamed import current_key
from crl.config.schema import DEFAULT_EMBEDDERS, RunConfig, run_config_type
from crl.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

TRUNCATION_OPTIONS = frozenset({"top_p", "top_k", "min_p"})
"""Options of truncated sampling. Those of other sections than actor and extractor are refused."""


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
        details = sorted(
            error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden"
        )[0]
        path = [str(part) for part in details["loc"] if part != "[key]"]
        key = ".".join([prefix, *path] if prefix else path)
        origin = _origin(key, origins or {})
        if details["type"] == "extra_forbidden":
            raise _unknown_key(model, path, key, details["input"], origin) from None
        raise _bad_value(model, path, key, details, origin) from None


def run_config(data: Mapping[str, Any], *, origins: Mapping[str, str] | None = None) -> RunConfig:
    """Return `data` as the validated configuration of a run.

    The section of a bundled method that is not the run's is validated and left out, so that the
    same settings serve several methods. An embedder that is left to the profile of the actor is
    filled in. `origins`: origin of values, by dotted key.

    Raise `ConfigError` for the first error.
    """
    method = data.get("method", RunConfig.model_fields["method"].default)
    if not isinstance(method, str):
        return validated(RunConfig, data, origins=origins)  # raises the error
    spec, data = method_spec(method), dict(data)
    for other in BUNDLED_METHODS:
        settings = method_spec(other).settings if other != spec.name and other in data else None
        if settings:
            validated(settings, data.pop(other), prefix=other, origins=origins)
    return _with_embedder(validated(run_config_type(spec), data, origins=origins))


def _with_embedder(config: RunConfig) -> RunConfig:
    """Return the config with the embedder that "auto" stands for."""
    if config.embedder.model != "auto":
        return config
    model = DEFAULT_EMBEDDERS[config.profile("actor")]
    embedder = config.embedder.model_copy(update={"model": model})
    return config.model_copy(update={"embedder": embedder})


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
    if leaf in TRUNCATION_OPTIONS:
        return ConfigError(
            key,
            value,
            "is not supported: only top_p and top_k of actor and extractor truncate sampling, "
            "because the trainer renormalises over the tokens that they keep",
            "Remove it, or use top_p and top_k of actor or extractor",
        )
    source = f" (from {origin})" if origin and not origin.startswith("-") else ""
    if current := current_key(key):
        return ConfigError(key, value, f"was renamed{source}", f"Use {current}")
    siblings = list(_section(model, path[:-1]))
    close = [
        key.removesuffix(leaf) + sibling
        for sibling in difflib.get_close_matches(leaf, siblings, n=1)
    ]
    close = close or [known for known in dotted_keys() if known.rpartition(".")[2] == leaf]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    inner, value = first_leaf(key, value)
    reason = (
        "is not a setting" if inner == key else f"is not a setting, because {key} is not a section"
    )
    return ConfigError(inner, value, f"{reason}{source}", f"{hint}Available: {', '.join(siblings)}")


def _bad_value(
    model: type[BaseModel], path: Sequence[str], key: str, details: Any, origin: str | None
) -> ConfigError:
    """Return the error for a value that pydantic rejected."""
    description = _description(model, path)
    explanation = f" ({description})" if description else ""
    if details["type"] == "missing":
        remedy = f"Add it to {origin}" if origin else f"Give it with --set {key}=VALUE"
        return ConfigError(key, None, "is missing", f"{remedy}{explanation}")
    if details["type"] in ("model_type", "model_attributes_type"):
        keys = ", ".join(f"{key}.{name}" for name in _section(model, path))
        return ConfigError(
            key, details["input"], "is a section, not a value", f"Set one of its keys: {keys}"
        )
    reason = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    remedy = f"Correct it in {origin}" if origin else f"Give another value with --set {key}=VALUE"
    reason = reason[0].lower() + reason[1:]
    return ConfigError(key, details["input"], reason, f"{remedy}{explanation}")


def _section(kind: Any, path: Sequence[str]) -> Mapping[str, Any]:
    """Return the fields of the section at `path`.

    In the table of tasks, every name is one section.
    """
    for part in path:
        kind = get_args(kind)[1] if get_origin(kind) is dict else kind.model_fields[part].annotation
    return getattr(kind, "model_fields", {})


def _description(model: type[BaseModel], path: Sequence[str]) -> str | None:
    """Return the first paragraph of the description of the field at `path`.

    The description is the docstring under the field in the schema. The paragraph is on one line and
    has no final full stop.
    """
    field = _section(model, path[:-1]).get(path[-1]) if path else None
    if field is None or field.description is None:
        return None
    return " ".join(field.description.split("\n\n")[0].split()).rstrip(".")


def bundled_config_type() -> type[RunConfig]:
    """Return a configuration type with the settings of all bundled methods."""
    return run_config_type(*map(method_spec, BUNDLED_METHODS))


def dotted_keys() -> Iterator[str]:
    """Yield the dotted key of every setting. The settings of a task are listed under tasks.NAME."""
    yield from _keys(bundled_config_type(), "")


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if get_origin(kind) is dict:
            yield from _keys(get_args(kind)[1], f"{prefix}{name}.NAME.")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
