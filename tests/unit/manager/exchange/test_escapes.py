"""Untrusted texts in Markdown, parsed with HTML, tables and strikethrough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from crl.manager.exchange.escapes import (
    markdown,
    markdown_lines,
    plain,
    plain_text,
    visible,
    visible_line,
)
from support.hostile import HOSTILE, texts

MARKDOWN = MarkdownIt("gfm-like", {"html": True, "linkify": False})
TEXT = {"inline", "text", "text_special", "paragraph_open", "paragraph_close", "hardbreak"}


def kinds(tokens: Sequence[Token]) -> Iterator[str]:
    for token in tokens:
        yield token.type
        yield from kinds(token.children or [])


@given(texts)
@settings(max_examples=500, deadline=None)
def test_a_text_is_shown_as_text(text: str):
    shown = visible(text)
    lines = markdown_lines(shown)
    assert set(kinds(MARKDOWN.parse("\n".join(lines)))) <= TEXT
    assert plain_text(lines) == shown == visible(shown)
    assert all(c.isprintable() or c == "\n" for c in "\n".join(lines))


@given(texts)
@settings(max_examples=500, deadline=None)
def test_a_goal_stays_in_its_heading(text: str):
    line = visible_line(text)
    start, inline, end = MARKDOWN.parse(f"### Goal: {markdown(line)}")
    assert (start.type, end.type) == ("heading_open", "heading_close")
    assert set(kinds([inline])) <= TEXT
    assert plain(inline.content.removeprefix("Goal:").strip()) == line


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Use snake_case and 2 > 1 - it works.", "Use snake_case and 2 > 1 - it works."),
        ("<b>", "\\<b>"),
        ("_a_ *b*", "\\_a\\_ \\*b\\*"),
        ("12. go\n- west", "12\\. go\\\n\\- west"),
        ("a\u202eb\x1b", "a\\u202eb\\x1b"),
    ],
)
def test_only_markup_is_escaped(text: str, source: str):
    assert "\n".join(markdown_lines(visible(text))) == source


@given(st.text())
def test_lone_surrogates_are_escaped(text: str):
    "\n".join(markdown_lines(visible(f"\ud800{text}"))).encode()
    markdown(visible_line(f"\ud800{text}")).encode()


def test_hostile_texts_are_known_to_act():
    """Check that most of the hostile texts would be markup if they were not escaped."""
    acting = [text for text in HOSTILE if not set(kinds(MARKDOWN.parse(text))) <= TEXT]
    assert len(acting) >= 10
