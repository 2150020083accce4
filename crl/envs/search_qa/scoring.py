"""Exact match of answers after the usual normalisation (SQuAD, Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: Iterable[str]) -> bool:
    """Return whether the answer equals any of the gold answers after normalisation."""
    text = normalised(answer)
    return any(text == normalised(other) for other in gold)
