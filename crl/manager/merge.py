"""The periodic merge (CRL §3.2.1): chunk by chunk the extractor says which entries of the bank to keep, to merge and to discard.

Entries are taken in the order in which they were written, as many as a chunk has tokens for. What a chunk leaves is carried into the
next one, so that every entry meets what came before; **ours**: at most half a chunk of it, what was merged first. What the extractor
does not mention stays, and a chunk whose answer cannot be used changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from crl.manager.embed import Keys
from crl.manager.extractor import Extractor
from crl.manager.ops import Op, OpLimits, ParsedOps, parse_merge
from crl.manager.records import Entry, Merged, UnitKey, Write
from crl.types import Segment

MergePromptWriter = Callable[[Sequence[Entry]], Sequence[Segment]]
"""Writes the prompt of a chunk; it numbers the entries from 1, in order."""


@dataclass(slots=True)
class MergeStats:
    """What a merge did. chunks: that the extractor was asked about; failed: of these, those without a usable answer; made: entries
    that took the place of others; removed: entries that were merged into them or discarded."""

    chunks: int = 0
    failed: int = 0
    made: int = 0
    removed: int = 0


class Chunker:
    """Cuts entries into chunks of at most `budget` tokens, what was carried over included. cost: the tokens of an entry."""

    def __init__(self, entries: Iterable[Entry], budget: int, cost: Callable[[Entry], int]) -> None:
        self._rest, self._budget, self._cost = list(entries), budget, cost

    def next(self, carried: Sequence[Entry]) -> list[Entry]:
        """The next chunk: of `carried` what fits into half of it, then at least one new entry; empty when none is left."""
        if not self._rest:
            return []
        chunk = self._fitting(carried, self._budget // 2)
        fresh = (
            self._fitting(self._rest, self._budget - sum(map(self._cost, chunk))) or self._rest[:1]
        )
        self._rest = self._rest[len(fresh) :]
        return chunk + fresh

    def _fitting(self, entries: Sequence[Entry], room: int) -> list[Entry]:
        fitting: list[Entry] = []
        for entry in entries:
            room -= self._cost(entry)
            if room < 0:
                break
            fitting.append(entry)
        return fitting


class Merger:
    """Asks the extractor about chunks. Touches no bank."""

    def __init__(
        self, extractor: Extractor, keys: Keys, prompt: MergePromptWriter, limits: OpLimits
    ) -> None:
        self._extractor, self._keys, self._prompt, self._limits = extractor, keys, prompt, limits

    @cached_property
    def _frame(self) -> int:
        return self._extractor.tokens(self._prompt([]))

    def cost(self, entry: Entry) -> int:
        """Tokens that the entry adds to a chunk's prompt, about."""
        return self._extractor.tokens(self._prompt([entry])) - self._frame

    async def merge(self, name: str, chunk: Sequence[Entry]) -> Merged:
        """name: becomes the generation's id. Raises `RolloutError` when the engine cannot serve it, `EngineError` when it is gone."""

        def parse(completion: str, thinking: bool) -> ParsedOps:
            return parse_merge(completion, len(chunk), thinking=thinking, limits=self._limits)

        answer = await self._extractor.answer("merge", name, self._prompt(chunk), parse)
        merging = [(i, op) for i, op in enumerate(answer.ops) if op.kind == "merge"]
        vectors = await self._keys.embed(
            [(chunk[op.targets[0]].goal, op.text) for _, op in merging]
        )
        merges = [
            Write(i, op.text, answer.spans[i], vector, _units(chunk, op))
            for (i, op), vector in zip(merging, vectors, strict=True)
        ]
        discards = [
            (i, _units(chunk, op)) for i, op in enumerate(answer.ops) if op.kind == "discard"
        ]
        return Merged(
            answer.generation,
            tuple(merges),
            tuple(discards),
            answer.dropped,
            malformed=not answer.ops,
        )


def _units(chunk: Sequence[Entry], op: Op) -> tuple[UnitKey, ...]:
    return tuple(chunk[target].unit for target in op.targets)
