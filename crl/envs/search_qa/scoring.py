"""Exact match of answers after the usual normalisation (SQuAD, Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation, articles and extra white space.

    **Ours**: a text that consists of articles keeps them, and a text of punctuation keeps it. In
    the original, the answers "A", "The The" and "!!!" are empty and therefore equal.
    """
    lower = text.lower()
    words = lower.translate(_PUNCTUATION)
    forms = (" ".join(form.split()) for form in (_ARTICLES.sub(" ", words), words, lower))
    return next(filter(None, forms), "")


def exact_match(answer: str, gold: Iterable[str]) -> bool:
    """Return whether the answer equals any of the gold answers after normalisation.

    An empty answer is never right.
    """
    text = normalised(answer)
    return bool(text) and any(text == normalised(other) for other in gold)
