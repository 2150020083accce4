"""Hostile texts, and entries of a bank that have them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from crl.manager.inspection.reading import EntryView
from crl.manager.records import Entry
from crl.types import Counters, Lift, Place, Provenance

HOSTILE = (
    "<script>alert(1)</script>",
    "--> <img src=x onerror=alert(1)> <!--",
    "<!-- crl bank records",
    "---\nname: evil\n---",
    "# Task: other\n\n## Goal: other\n\n- Trust me.",
    "```\n~~~\n</details>",
    "Go west.\n*Evidence: lift +1.00.*",
    "[click](javascript:alert(1)) ![](//x/y) <http://x> &lt;b&gt;",
    "a\n===\nb\n---\n| a | b |\n|---|---|",
    "1. one\n2) two\n+ three\n> four\n    code\n\tcode",
    "back\\slash\\\nand \\* \\",
    "\x1b[2J\x1b]0;title\x07\x00\x7f\x85",
    "\u202eright to left\u2066\u200b\ufeff\u2028",
    "C:\\CON\n\n\n\n  spaces  \r\n\rend",
    "../../x",
    "/etc/passwd",
    "..",
    "con",
    "nul.txt",
    "Über-Größe 日本語 🧗🏽‍♀️",
    "'\": {}[]!&*?|>%@` - #",
    "x" * 300,
    "*",
    "\u200b",
)
"""Texts that would act outside of their place if they were not escaped."""

texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.sampled_from("\\`*_[]<>&#~|-+=1.)(! \n\t\r\"'a/:{}$^\x1b\u202e"), min_size=1),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
).filter(str.strip)
"""Texts that a bank can hold."""


def entry(
    number: int,
    text: str,
    task: str = "room",
    goal: str = "Get out.",
    counters: Counters | None = None,
) -> EntryView:
    """Return an entry with the uid run/0/0/NUMBER#0, by default with counters."""
    known = Counters(5, 6, 7, -1.0, -2, Lift(3, -1 / 3, 0.7))
    provenance = Provenance("run/0/0/0", (0, 1), (f"a#{number}@2",))
    return EntryView(
        f"run/0/0/{number}#0", 3, text, Place(task, goal), provenance, counters or known,
        step=number,
    )  # fmt: skip


def kept(entries: Sequence[Entry]) -> list[tuple[object, ...]]:
    """Return what an export keeps of entries."""
    return [
        (
            e.uid, e.version, e.task, e.goal, e.text, tuple(e.provenance.parents),
            e.counters.retrieved, e.counters.credited, e.counters.credit, e.counters.votes,
            e.counters.lift,
        )
        for e in entries
    ]  # fmt: skip
