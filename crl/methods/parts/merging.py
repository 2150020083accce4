"""Parts of the periodic merge: the extractor's prompts for a chunk of the bank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.manager.records import Entry
from crl.methods.parts.distilling import quoted
from crl.methods.parts.records import compact_record
from crl.prompts import fill
from crl.types import Segment


@dataclass(frozen=True)
class FullMergePrompt:
    """`MergePromptWriter` for language models: it fills the prompt `merge`.

    Experiences are indented, so that they cannot be mistaken for a line of the prompt.
    """

    template: str
    """Text of the prompt `merge`."""

    def __call__(self, entries: Sequence[Entry]) -> Sequence[Segment]:
        pieces = [
            f"{number}.{_record(entry)}\n{quoted(entry.text)}"
            for number, entry in enumerate(entries, start=1)
        ]
        return [Segment("user", fill(self.template, experiences="\n".join(pieces)), "task")]


def _record(entry: Entry) -> str:
    """Return a note on the outcomes of the episodes that the entry guided, empty without any."""
    counters = entry.counters
    if not counters.credited:
        return ""
    return f" (guided {counters.credited} episodes, of which {counters.won} succeeded)"


@dataclass(frozen=True)
class CompactMergePrompt:
    """`MergePromptWriter` for tiny extractors.

    Every line holds one entry and the outcomes of the episodes that it guided.
    """

    def __call__(self, entries: Sequence[Entry]) -> Sequence[Segment]:
        lines = [
            f"hint {number} {compact_record(entry.text, entry.counters.record)}"
            for number, entry in enumerate(entries, start=1)
        ]
        return [Segment("user", "\n".join(["merge", *lines]), "task")]
