"""Untrusted texts as Markdown that is shown as text: without markup, links and HTML.

`visible` shows characters that a reader would not see. `markdown` adds backslashes before
characters that Markdown would interpret, and `plain` removes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from crl.wording import printable

_PUNCTUATION = r"[!-/:-@\[-`{-~]"
"""Characters that a backslash escapes in Markdown (CommonMark, section 2.4)."""

_MARKUP = re.compile(
    r"^[-+=>#]"  # list, heading or its underline, quote
    r"|[`*<\[\]~|]"
    r"|(?<![^\W_])_|_(?![^\W_])"  # an underscore inside a word is no emphasis
    r"|&(?=[#\w])"  # entity
    r"|#(?=#*$)"  # end of a heading
    rf"|\\(?={_PUNCTUATION}|$)"
)
"""Characters that Markdown interprets, in a line without leading and trailing spaces."""

_LIST_NUMBER = re.compile(r"^([0-9]+)([.)])")
_ESCAPED = re.compile(rf"\\({_PUNCTUATION})")
_BLANKS = re.compile(r"\n{3,}")


def visible(text: str) -> str:
    """Return a text with escapes for characters that are not printable.

    Lines have no spaces at their ends. Blank lines at the ends and repeated ones are left out.
    """
    lines = (line.expandtabs(4) for line in text.replace("\r\n", "\n").split("\n"))
    shown = "\n".join(printable(line).strip() for line in lines)
    return _BLANKS.sub("\n\n", shown).strip("\n")


def visible_line(text: str) -> str:
    """Return `visible` text on one line. White space is collapsed."""
    return printable(" ".join(text.split()))


def markdown(line: str) -> str:
    """Return a visible line as Markdown."""
    return _LIST_NUMBER.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", line))


def markdown_lines(text: str) -> list[str]:
    """Return a visible text as Markdown. A line ends with a backslash if the paragraph goes on."""
    lines = text.split("\n")
    return [
        markdown(line) + ("\\" if line and following else "")
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
    ]


def plain(line: str) -> str:
    """Return a line of Markdown without backslash escapes."""
    return _ESCAPED.sub(r"\1", line)


def plain_text(lines: Sequence[str]) -> str:
    """Return lines of Markdown as a text without backslash escapes."""
    return "\n".join(plain(_unbroken(line.rstrip(" "))) for line in lines).strip("\n")


def _unbroken(line: str) -> str:
    """Return a line of Markdown without the backslash at its end that breaks the line."""
    backslashes = len(line) - len(line.rstrip("\\"))
    return line[:-1] if backslashes % 2 else line
