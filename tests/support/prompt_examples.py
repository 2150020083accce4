"""Examples of answers in the bundled prompts."""

from __future__ import annotations

import json

from crl.prompts import prompt


def prompt_examples(name: str) -> list[str]:
    """Return the JSON lists in a prompt of the extractor, in order."""
    text, position, examples = prompt(name), 0, list[str]()
    while (position := text.find("\n[", position)) >= 0:
        start = position + 1
        position = json.JSONDecoder().raw_decode(text, start)[1]
        examples.append(text[start:position])
    return examples
