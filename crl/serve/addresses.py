"""Addresses of pages: their query parameters, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request

Choice = TypeVar("Choice", bound=StrEnum)

MAX_QUERY_TEXT = 1000
"""Maximum number of characters of a text in a query parameter."""

MAX_INTEGER = 10**9
"""Largest integer in a query parameter."""


def address(path: str, query: Mapping[str, Any] | None = None, **changes: Any) -> str:
    """Return an address with query parameters. Parameters that are None or empty are left out.

    `changes` replace values of `query`.
    """
    values = {**(query or {}), **changes}
    kept = {name: value for name, value in values.items() if value not in (None, "")}
    text = urlencode(kept, quote_via=quote, safe="", errors="replace")
    return f"{path}?{text}" if text else path


def text_of(request: Request, name: str, *, most: int = MAX_QUERY_TEXT) -> str:
    """Return a query parameter; "" if it is not given.

    Raise `HTTPException` 400 if it is longer than `most` characters.
    """
    text = request.query_params.get(name, "")
    if len(text) > most:
        raise HTTPException(400, f"{name} has {len(text):,} characters; at most {most:,} are read.")
    return text


def integer_of(
    request: Request, name: str, *, least: int = 0, most: int = MAX_INTEGER
) -> int | None:
    """Return a query parameter as an integer; None if it is not given or empty.

    Raise `HTTPException` 400 if it is not an integer from `least` to `most`.
    """
    text = text_of(request, name).strip()
    if not text:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(most))):
        raise HTTPException(400, f"{name} = {text[:40]!r} is not an integer.")
    if not least <= (value := int(text)) <= most:
        raise HTTPException(400, f"{name} = {value} must be from {least} to {most}.")
    return value


def choice_of(request: Request, name: str, choices: type[Choice]) -> Choice | None:
    """Return a query parameter as one of `choices`; None if it is not given or empty.

    Raise `HTTPException` 400 for another value.
    """
    text = text_of(request, name)
    if not text:
        return None
    try:
        return choices(text)
    except ValueError:
        listed = ", ".join(choices)
        raise HTTPException(400, f"{name} = {text[:40]!r}: choose one of {listed}.") from None
