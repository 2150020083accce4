"""New weights from a learner to its engine."""

from __future__ import annotations

from crl.protocols import Engine, Learner


async def sync(learner: Learner, engine: Engine) -> int:
    """Returns the bytes of the weights. Raises `EngineError`, `LearnerError`."""
    from crl.sync import weight_bytes  # with torch, which a dry run does without

    handle = await learner.publish()
    try:
        await engine.update_weights(handle)
    finally:
        handle.discard()
    return weight_bytes(handle.manifest)
