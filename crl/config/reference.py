"""Reference of all settings: type, default, description, and bundled changes of the default.

Everything is read from the schema, from the bundled methods and from the bundled TOML files.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from crl.config.catalog import mixture, presets, task_file, tasks
from crl.config.layers import leaves, read_toml
from crl.config.load import preset_layers
from crl.config.method import BUNDLED_METHODS, method_spec
from crl.config.renamed import current_key
from crl.config.schema import run_config_type
from crl.config.validate import bundled_config_type
from crl.errors import ConfigError

TASK = "tasks.NAME"
"""Key under which the settings of every task are listed."""

NO_DEFAULT = "none, every task file sets it"
"""Default of the settings that every task must have. No other setting is required."""

TEXT_DEFAULTS = {f"{TASK}.name": "name of the task file"}
"""Defaults that are not in the schema, by key."""

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Setting:
    """Setting of the schema."""

    key: str
    """Dotted key. Those of tasks begin with `tasks.NAME`."""
    type: str
    """Type and limits, in words."""
    default: str
    """Default as JSON, `NO_DEFAULT`, or a text of `TEXT_DEFAULTS`."""
    description: str
    """Docstring under the field."""

    @property
    def section(self) -> str:
        """Key without its last part. Empty for top-level keys."""
        return self.key.rpartition(".")[0]


@dataclass(frozen=True)
class Change:
    """Value that a bundled file or method gives to a setting."""

    origin: str
    """Example: `preset cpu, compact profile`."""
    value: str
    """Value as JSON."""


def settings(method: str | None = None) -> list[Setting]:
    """Return all settings in the order of the schema.

    The sections of methods are those of all bundled methods, or that of `method`.
    """
    config_type = run_config_type(method_spec(method)) if method else bundled_config_type()
    schema = config_type.model_json_schema()
    return list(_settings(schema, schema["$defs"], ""))


def sections() -> dict[str, str]:
    """Return the description of every section, by its key, in the order of the schema."""
    schema = bundled_config_type().model_json_schema()
    return dict(_sections(schema, schema["$defs"], ""))


def explained(key: str, method: str | None = None) -> tuple[Setting, list[Change]]:
    """Return a setting and the bundled files and methods that change it.

    The settings of a task can be named by `tasks.NAME.…` with any name. `method` is as in
    `settings`. Raise `ConfigError` if there is no such setting.
    """
    parts = key.split(".")
    if parts[0] == "tasks" and len(parts) > 2:
        key = ".".join([TASK, *parts[2:]])
    known = {setting.key: setting for setting in settings(method)}
    if current := current_key(key):
        raise ConfigError("KEY", key, "was renamed", f"Use {current}")
    if key not in known:
        inside = [name for name in known if name.startswith(f"{key}.")]
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        remedy = f"{hint}crl config reference lists all settings"
        remedy = f"Give one of: {', '.join(inside)}" if inside else remedy
        reason = "is a section, not a setting" if inside else "is not a setting"
        raise ConfigError("KEY", key, reason, remedy)
    return known[key], changes().get(key, [])


def changes() -> dict[str, list[Change]]:
    """Return the changes that bundled presets, methods and tasks make, by key."""
    found: dict[str, list[Change]] = {}
    for origin, key, value in _bundled_values():
        text = json.dumps(value, ensure_ascii=False)
        found.setdefault(key, []).append(Change(origin, text))
    return found


def _bundled_values() -> Iterator[tuple[str, str, Any]]:
    """Yield (origin, key, value) of everything that bundled files and methods set."""
    for name in presets():
        # The last file is the preset's own. Those before it are listed under their own names.
        own = preset_layers(name)[-1]
        for key, value in leaves(own.settings.data):
            yield f"preset {name}", key, value
        for key, value in leaves(own.compact.data):
            yield f"preset {name}, compact profile", key, value
    for name in BUNDLED_METHODS:
        for key, value in leaves(method_spec(name).defaults):
            yield f"method {name}", key, value
    for name in tasks():
        path = task_file(name)
        if mixture(path):
            continue
        data = read_toml(path, "tasks")
        compact = data.pop("compact", {})
        for key, value in leaves(data):
            yield f"task {name}", f"{TASK}.{key}", value
        for key, value in leaves(compact):
            yield f"task {name}, compact profile", f"{TASK}.{key}", value


# ── the schema ──────────────────────────────────────────────────────────────────────────────────


def _settings(
    section: Mapping[str, Any],
    definitions: Mapping[str, Any],
    prefix: str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Setting]:
    """Yield the settings of a section. `defaults`: those that differ from the section's own."""
    required = section.get("required", [])
    for name, field in section["properties"].items():
        if subsection := _subsection(field, definitions):
            part, model = subsection
            own = field.get("default") or {}
            yield from _settings(model, definitions, f"{prefix}{name}{part}.", own)
            continue
        value = defaults.get(name, field.get("default"))
        key, description = f"{prefix}{name}", field.get("description", "")
        default = NO_DEFAULT if name in required else json.dumps(value)
        yield Setting(key, _type_text(field), TEXT_DEFAULTS.get(key, default), description)


def _sections(
    section: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str]]:
    for name, field in section["properties"].items():
        if subsection := _subsection(field, definitions):
            part, model = subsection
            yield f"{prefix}{name}{part}", model.get("description", "")
            yield from _sections(model, definitions, f"{prefix}{name}{part}.")


def _subsection(
    field: Mapping[str, Any], definitions: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]] | None:
    """Return (".NAME" for the table of tasks, else "", schema) of a section, None for a setting."""
    part = ""
    tables = [field.get("additionalProperties"), *field.get("patternProperties", {}).values()]
    if table := next((table for table in tables if isinstance(table, dict)), None):
        part, field = ".NAME", table
    reference = field.get("$ref")
    return (part, definitions[reference.rpartition("/")[2]]) if reference else None


def _type_text(field: Mapping[str, Any]) -> str:
    """Return type and limits of a setting in words."""
    if "anyOf" in field:
        return " or ".join(_type_text(kind) for kind in field["anyOf"])
    if "enum" in field or "const" in field:
        return " or ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]))
    kind = field.get("type", "any")
    if kind == "null":
        return "unset"
    if kind == "array":
        return f"list of {_type_text(field.get('items', {}))}"
    if kind == "object":
        return f"table of {_type_text(field.get('additionalProperties', {}))}"
    limits = [f"{sign} {field[name]}" for name, sign in BOUNDS.items() if name in field]
    return " ".join([kind, " and ".join(limits)]).strip()


# ── docs/configuration.md ───────────────────────────────────────────────────────────────────────

INTRODUCTION = """\
# Configuration

<!-- Generated by `crl config reference`. Change the docstrings in crl/config/schema.py and of the
methods' sections in crl/methods, and the values in tasks/, instead. -->

All settings of a run. Later layers override earlier ones: the defaults below, a bundled preset
(`--preset`), the defaults of the method (`--method`), your own preset, the files of the tasks
(`--tasks`), options such as `--steps`, and `--set KEY=VALUE`.
A `[compact]` table of a preset or of a task applies to models with the compact profile, such as the
bundled tiny models. `crl config explain KEY` prints one setting. `crl config show` prints the
resolved settings of a run with their origins.
"""


def markdown() -> str:
    """Return the page docs/configuration.md."""
    changed, described = changes(), sections()
    lines = [INTRODUCTION]
    last = None
    for setting in sorted(settings(), key=lambda setting: bool(setting.section)):
        if setting.section != last:
            last = setting.section
            lines.append(f"## {f'`{last}`' if last else 'Top-level settings'}\n")
            if text := described.get(last, ""):
                lines.append(f"{text}\n")
        lines.append(f"### `{setting.key}`\n")
        default = setting.default
        is_text = default in (NO_DEFAULT, *TEXT_DEFAULTS.values())
        lines.append(f"{setting.type}; default: {default if is_text else f'`{default}`'}\n")
        lines.append(f"{setting.description}\n")
        lines += [f"- {change.origin}: `{change.value}`" for change in changed.get(setting.key, [])]
        if changed.get(setting.key):
            lines.append("")
    return "\n".join(lines)
