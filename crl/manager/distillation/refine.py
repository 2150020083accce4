"""Refinement for search_and_ask (CRL §3.2.2).

The extractor rewrites the retrieved experience for the situation of the asking agent. A refinement
is not an entry of the bank. Its generation earns the credit of the episode. The retrieved entry
earns this credit only if it is returned unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crl.manager.distillation.extractor import Extractor
from crl.manager.distillation.ops import ParsedOps, parse_refine
from crl.manager.distillation.schemas import refine_schema
from crl.manager.records import Refined
from crl.protocols import Hit, Question
from crl.types import Segment

RefinePromptWriter = Callable[[Question, Hit], Sequence[Segment]]
"""Function that writes the prompt for a question and the experience that was retrieved for it.

It raises `RolloutError` if no prompt is possible.
"""


class Refiner:
    """Client of the extractor for questions. It does not change the bank."""

    def __init__(self, extractor: Extractor, prompt: RefinePromptWriter) -> None:
        self._extractor, self._prompt = extractor, prompt

    async def refine(self, question: Question, hit: Hit) -> Refined:
        """Ask the extractor to refine `hit` for a question and return its answer.

        Raise `RolloutError` if the question cannot be answered, and `EngineError` if the engine has
        failed.
        """

        def parse(completion: str, thinking: bool) -> ParsedOps:
            return parse_refine(completion, thinking=thinking)

        answer = await self._extractor.answer(
            "refine", question.name, self._prompt(question, hit), parse, refine_schema()
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
