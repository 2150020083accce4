"""Hostile texts of models, environments, users and files."""

from __future__ import annotations

LONG = 10 << 20
"""Characters of a very long text."""

HOSTILE = {
    "markup": "[red]not red[/red] [link=http://x]",
    "ansi": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \x1b[?1049l\x1b[2J\x1b]52;c;ZXZpbA==\x07",
    "lines": "one\ntwo\r\nthree\ttab\x0bvertical\x0cpage\x85next\u2028line\u2029paragraph",
    "wide": "広い文字" * 50,
    "bidirectional": "👩‍👩‍👧‍👦 e\u0301\u0301 \u202edlrow\u202c \u2066hidden\u2069 \u200b\ufeff",
    "surrogates": "lone \ud800 and \udfff, private \ue000, tag \U000e0041",
    "nul": "a\x00b\x00" * 10,
    "script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "format": ":smile: {braces} {0.__class__} %s %n \\[escaped] $(touch /tmp/x) `id`",
    "long": "x" * LONG,
    "long line of wide characters": "広" * 100_000,
    "many lines": "line\n" * 100_000,
    "many escapes": "\x1b[2J" * 100_000,
}

FORBIDDEN = frozenset(
    "\r\t\x00\x07\x0b\x0c\x85\x9b\u2028\u2029\u202e\u202c\u2066\u2069\u200b\u200d\ufeff\U000e0041"
)
"""Characters that a terminal would interpret or hide."""
