"""New weights from a learner to its engine."""

from __future__ import annotations

import asyncio

from crl.errors import EngineError
from crl.protocols import Engine, Learner

SYNC_DEADLINE_S = 600.0
"""Seconds that one weight sync may take, both sides together."""


async def sync(learner: Learner, engine: Engine) -> int:
    """Sender and receiver run together, under one deadline. Returns the bytes of the weights. Raises `EngineError`."""
    from crl.sync import weight_bytes  # with torch, which a dry run does without

    handle = await learner.publish()
    try:
        async with asyncio.timeout(SYNC_DEADLINE_S):
            await asyncio.gather(engine.update_weights(handle), handle.done())
    except TimeoutError as error:
        raise EngineError(f"a weight sync took more than {SYNC_DEADLINE_S:.0f} s") from error
    finally:
        handle.discard()
    return weight_bytes(handle.manifest)
