"""Demonstrations as training samples: conversations whose answers a model learns to imitate.

Demonstrations are tokenised by the same code as rollouts (`Conversation`), so token sequences in RL
have the same form as in supervised training.
"""

from __future__ import annotations

from collections.abc import Sequence

from crl.modeling.tokens import ChatRenderer, Conversation
from crl.types import SAMPLED_ORIGINS, Completion, Segment, TokenTrace

Demonstration = Sequence[Segment]
"""Conversation that a model learns to imitate.

The segments of the demonstrator have the origin policy or tool_call.
"""

PlacedDemonstration = tuple[str, Demonstration]
"""Place and demonstration."""


def demonstrated_traces(
    demonstration: Demonstration, renderer: ChatRenderer, *, window: int | None = None,
    turns: int | None = None,
) -> tuple[TokenTrace, ...]:  # fmt: skip
    """Return the training samples of a demonstration.

    It is one sample, unless the template or `window` starts new ones.

    The mask selects the tokens of the demonstrator and their stop tokens. Log-probs are 0. `window`
    is that of `Conversation`. `turns`: number of the demonstrator's segments that are trained, from
    the first; None = all.
    """
    conversation = Conversation(renderer, window)
    answers = 0
    for segment in demonstration:
        if segment.origin not in SAMPLED_ORIGINS:
            conversation.add([segment])
            continue
        conversation.prompt()
        ids = renderer.answer_ids(segment.text)
        conversation.add_completion(
            Completion(ids, (0.0,) * len(ids), (0,) * len(ids), "stop"),
            trained=turns is None or answers < turns,
        )
        answers += 1
    return conversation.traces
