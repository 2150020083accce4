"""Periodic merge of the bank (CRL §3.2.1).

The bank is processed in chunks. For each chunk, the extractor says which entries to keep, to merge
and to discard. A chunk has as many entries as its token budget allows, in the order in which they
were written.

The entries that remain of a chunk are carried over into the next one, so that every entry is
compared with earlier ones. **Ours**: carried entries fill at most half a chunk, merged entries
first. Entries that the extractor does not mention are kept. A chunk without a usable answer changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from crl.manager.distillation.extractor import Extractor
from crl.manager.distillation.ops import Op, ParsedOps, parse_merge
from crl.manager.distillation.schemas import merge_schema
from crl.manager.keys import KeyEmbedder
from crl.manager.records import Entry, Merged, UnitKey, Write
from crl.types import Segment

MergePromptWriter = Callable[[Sequence[Entry]], Sequence[Segment]]
"""Function that writes the prompt of a chunk. It numbers the entries from 1, in order."""


class Chunker:
    """Splitter of entries into chunks of at most `budget` tokens, including carried entries.

    `cost` returns the tokens of an entry. The first new entry of a chunk may exceed the budget.
    """

    def __init__(self, entries: Iterable[Entry], budget: int, cost: Callable[[Entry], int]) -> None:
        self._remaining, self._budget, self._cost = list(entries), budget, cost

    def next(self, carried: Sequence[Entry]) -> list[Entry]:
        """Return the next chunk, or an empty list if no new entry is left.

        The chunk starts with the entries of `carried` that fit into half of the budget. At least
        one new entry follows.
        """
        if not self._remaining:
            return []
        chunk = self._take_fitting(carried, self._budget // 2)
        budget = self._budget - sum(map(self._cost, chunk))
        added = self._take_fitting(self._remaining, budget) or self._remaining[:1]
        self._remaining = self._remaining[len(added) :]
        return chunk + added

    def _take_fitting(self, entries: Sequence[Entry], budget: int) -> list[Entry]:
        fitting: list[Entry] = []
        for entry in entries:
            budget -= self._cost(entry)
            if budget < 0:
                break
            fitting.append(entry)
        return fitting


class Merger:
    """Client of the extractor for chunks. It does not change the bank."""

    def __init__(self, extractor: Extractor, keys: KeyEmbedder, prompt: MergePromptWriter) -> None:
        self._extractor, self._keys, self._prompt = extractor, keys, prompt

    @cached_property
    def _base_tokens(self) -> int:
        return self._extractor.tokens(self._prompt([]))

    def cost(self, entry: Entry) -> int:
        """Return approximately how many tokens the entry adds to the prompt of a chunk."""
        return self._extractor.tokens(self._prompt([entry])) - self._base_tokens

    async def merge(self, name: str, chunk: Sequence[Entry]) -> Merged:
        """Ask the extractor about a chunk and return its answer.

        `name` becomes the id of the generation. Raise `RolloutError` if the engine cannot serve the
        request, and `EngineError` if it has failed.
        """

        def parse(completion: str, thinking: bool) -> ParsedOps:
            return parse_merge(completion, len(chunk), thinking=thinking)

        answer = await self._extractor.answer(
            "merge", name, self._prompt(chunk), parse, merge_schema(len(chunk))
        )
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
