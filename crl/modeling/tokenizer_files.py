"""Tokenizer of a model's directory, read without transformers and torch.

A dry run checks tokenizers with it in milliseconds. Only common files are read: `read_tokenizer`
returns None for all others, and `crl.modeling.loading.load_tokenizer` decides about them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from crl.modeling.tokens import PROBE, ChatRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Special tokens that chat templates may use, by their names in tokenizer_config.json."""


class FileTokenizer:
    """Tokenizer with the methods that crl calls. Create it with `read_tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, template: str, special: Mapping[str, str]) -> None:
        """Compile the chat template. `special`: special tokens by name."""
        self._tokenizer, self._special = tokenizer, dict(special)
        # The settings of transformers' renderer.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(template)

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id."""
        return self._tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> Mapping[str, int]:
        """Return the ids of all tokens, added tokens included."""
        return self._tokenizer.get_vocab()

    @property
    def all_special_tokens(self) -> Sequence[str]:
        """Special tokens that have a role."""
        return list(self._special.values())

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, tokenize: bool, **variables: Any
    ) -> str:
        """Return the chat as text. `tokenize` must be false. `variables`: those of the template."""
        assert not tokenize
        return self._template.render(messages=messages, **self._special, **variables)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the text of token ids, including special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def read_tokenizer(path: Path) -> FileTokenizer | None:
    """Return the tokenizer in a model's directory.

    Return None if a file is missing or uncommon, if the tokenizer has no eos token, or if it cannot
    render, encode and decode a chat.
    """
    try:
        config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        special = {name: _text(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        if tokenizer.token_to_id(special["eos_token"]) is None:
            return None
        read = FileTokenizer(tokenizer, _template(path, config), special)
        text = ChatRenderer(cast("PreTrainedTokenizerBase", read), ()).text(PROBE)
        decoded = read.decode(read.encode(text))
    except Exception:  # a broken file raises many types of errors
        return None
    return read if all(s.text in text for s in PROBE) and "north" in decoded else None


def _text(token: str | Mapping[str, Any]) -> str:
    """Return the text of a token, which may be stored with its properties."""
    return token if isinstance(token, str) else token["content"]


def _template(path: Path, config: Mapping[str, Any]) -> str:
    """Return the chat template: a file of its own, or a text in tokenizer_config.json."""
    file = path / "chat_template.jinja"
    template = file.read_text("utf-8") if file.is_file() else config["chat_template"]
    if not isinstance(template, str) or not template:
        raise ValueError("there is no single chat template")
    return template
