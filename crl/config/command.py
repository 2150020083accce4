"""Command line that is saved with a run, compared with the settings of the run.

The settings differ from the command after `crl resume --steps`, `--set` and `crl fork --set`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from crl.config.layers import leaves, parse_set
from crl.config.load import load
from crl.config.resume import Change
from crl.config.schema import RunConfig
from crl.errors import ConfigError

SEED = "run.seed"

MAX_CHARACTERS = 100_000
"""Maximum length of a command that is compared. Longer ones count as unknown."""


def command_line(
    command: str, options: Mapping[str, str | float | None], sets: Sequence[str]
) -> str:
    """Return the command line of `crl COMMAND` with these options, without the seed.

    An option of None or False is left out. True is an option without a value.
    """
    words = ["crl", command]
    for option, value in options.items():
        if value is not None and value is not False:
            words += [option] if value is True else [option, str(value)]
    for text in sets:
        if text.partition("=")[0].strip() != SEED:
            words += ["--set", text]
    return shlex.join(words)


def changes_since(command: str, config: RunConfig) -> list[Change] | None:
    """Return the settings of `config`, except the seed, that differ from those of `command`.

    `command` is that of `crl.config.load.SavedRun`. A setting of the command that is no longer
    valid has changed, for example a model that was moved. Return None if the command is unknown, or
    if it cannot be resolved for another reason, for example because the file of a task is gone.
    """
    own = _settings(config)
    invalid: dict[str, Any] = {}
    while True:
        try:
            given = _settings(_config(command, [_set(key, own[key]) for key in invalid])) | invalid
            break
        except ConfigError as error:
            if error.key in invalid or own.get(error.key) is None:
                return None
            invalid[error.key] = error.value
        except (KeyError, ValueError, OSError):
            return None
    return [
        Change(key, given.get(key), own.get(key))
        for key in dict.fromkeys((*given, *own))
        if given.get(key) != own.get(key)
    ]


def repeated(command: str, config: RunConfig) -> str:
    """Return the command that trains with the settings of `config`, except the seed.

    It is `command` itself if no setting has changed, or if this is unknown.
    """
    changes = changes_since(command, config)
    if not changes:
        return command
    words = shlex.split(command)
    for key, _, value in changes:
        if key == "run.steps" and not any(word.startswith("run.steps=") for word in words):
            if "--steps" in words:
                words[words.index("--steps") + 1] = str(value)
            else:
                words += ["--steps", str(value)]
        elif value is not None:  # otherwise it cannot be given
            words += ["--set", _set(key, value)]
    return shlex.join(words)


def _set(key: str, value: Any) -> str:
    """Return the argument of --set that sets `key` to `value`."""
    text = value if isinstance(value, str) and _is_bare(value) else json.dumps(value)
    return f"{key}={text}"


def _is_bare(text: str) -> bool:
    """Return whether --set reads a text without quotes as this text, and not as a number."""
    try:
        return parse_set(f"x={text}").data == {"x": text}
    except ConfigError:
        return False


def _config(command: str, sets: Sequence[str]) -> RunConfig:
    """Return the resolved config of a command of `crl train` with further arguments of --set.

    All options of the command have a value. Raise `ValueError` if the command is no such command,
    or longer than `MAX_CHARACTERS`.
    """
    if len(command) > MAX_CHARACTERS:  # the parser's time is quadratic
        raise ValueError("the command is too long")
    words = shlex.split(command)[2:]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    options = dict(pairs)
    given: dict[str, Any] = {"method": options["--method"]} if "--method" in options else {}
    if "--steps" in options:
        given["run.steps"] = int(options["--steps"])
    return load(
        options["--tasks"].split(","),
        preset=options.get("--preset", "cpu"),
        options=given,
        sets=[*(value for name, value in pairs if name == "--set"), *sets],
    )


def _settings(config: RunConfig) -> dict[str, Any]:
    settings = dict(leaves(config.model_dump(mode="json")))
    del settings[SEED]
    return settings
