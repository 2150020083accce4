"""Transfer of weights from a learner to its engine."""

from __future__ import annotations

from pathlib import Path

from crl.protocols import Engine, Learner, State


async def sync_weights(learner: Learner, engine: Engine) -> int:
    """Publish the learner's weights, load them into the engine, and return their size in bytes.

    Raise `EngineError` or `LearnerError` if this fails.
    """
    from crl.modeling.weights import weight_bytes  # needs torch; a dry run imports none

    handle = await learner.publish()
    try:
        await engine.update_weights(handle)
    finally:
        handle.discard()
    return weight_bytes(handle.manifest)


async def restore_weights(learner: Learner, engine: Engine, directory: Path, state: State) -> None:
    """Load a saved model, its optimizer and the learner's `state`. Send the weights to the engine.

    Raise `EngineError` or `LearnerError` if this fails.
    """
    await learner.load(directory)
    learner.load_state(state)
    await sync_weights(learner, engine)
