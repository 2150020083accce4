"""Engines of the models of a run."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from crl.config.load import load
from crl.engines.backends import ServedModel
from crl.engines.scripted import ScriptedEngine
from crl.run import models
from crl.run.models import NO_GPU, actor_model, extractor_model, open_role_engine
from support.doors import renderer


async def test_only_the_extractors_engine_has_structured_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: dict[str, bool] = {}

    async def open_engine(section: Any, model: ServedModel, assigned: Any, **_: Any) -> Any:
        served[model.role] = model.structured_outputs
        return ScriptedEngine(renderer(), str)

    monkeypatch.setattr(models, "open_engine", open_engine)
    monkeypatch.setattr(models, "require_assigned", lambda *_: None)
    for structured in (True, False):
        switch = f"extractor.structured_outputs={str(structured).lower()}"
        config = load(["room"], sets=["engine.kind=vllm", "extractor.train=false", switch])
        async with AsyncExitStack() as stack:
            for role in (actor_model(config), extractor_model(config)):
                await open_role_engine(config, {"actor": NO_GPU}, role, stack)
        assert served == {"actor": False, "extractor": structured}
