"""search_and_ask (CRL §3.2.2): the extractor fits what was found to the situation of the agent that asks.

A refinement is no entry of the bank. Its generation earns what the episode earns; the entry that it was made from earns that only
where it is returned as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crl.manager.extractor import Extractor
from crl.manager.ops import OpLimits, ParsedOps, parse_refine
from crl.manager.records import Refined
from crl.protocols import Hit, Question
from crl.types import Segment

RefinePromptWriter = Callable[[Question, Hit], Sequence[Segment]]
"""Writes the prompt of a question and what was found for it. Raises `RolloutError` where there can be none."""


class Refiner:
    """prompt: what the extractor is told of a question. Touches no bank."""

    def __init__(self, extractor: Extractor, prompt: RefinePromptWriter, limits: OpLimits) -> None:
        self._extractor, self._prompt, self._limits = extractor, prompt, limits

    async def refine(self, question: Question, hit: Hit) -> Refined:
        """Raises `RolloutError` when the question cannot be answered, `EngineError` when the engine is gone."""

        def parse(completion: str, thinking: bool) -> ParsedOps:
            return parse_refine(completion, thinking=thinking, limits=self._limits)

        answer = await self._extractor.answer(
            "refine", question.name, self._prompt(question, hit), parse
        )
        refined = [
            (op.text, span)
            for op, span in zip(answer.ops, answer.spans, strict=True)
            if op.kind == "refine"
        ]
        text, span = refined[0] if refined else (None, (0, 0))
        return Refined(
            answer.generation, hit.use, text, span, answer.dropped, malformed=not answer.ops
        )
