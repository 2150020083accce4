"""Points in the calls to a running vLLM engine at which a test can go on."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM


async def in_flight(llm: AsyncLLM) -> None:
    """Return as soon as `llm` has an unfinished request. Raise TimeoutError after 10 s."""
    for _ in range(1000):
        if llm.get_num_unfinished_requests():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def pause_sent(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set when `llm` has been told to pause its requests."""
    sent, pause = asyncio.Event(), llm.engine_core.pause_scheduler_async

    async def pause_and_tell(*arguments: Any, **named: Any) -> None:
        call = asyncio.ensure_future(pause(*arguments, **named))
        await asyncio.sleep(0)
        sent.set()
        await call

    monkeypatch.setattr(llm.engine_core, "pause_scheduler_async", pause_and_tell)
    return sent
