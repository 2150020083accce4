"""Worker processes that play the toy game."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crl.envs.base import EnvSpec
from crl.envs.hosting.processes import ProcessEnvironment, ProcessHost
from crl.types import Task
from support.toy_games import SPEC

TASK = Task("toy", seed=3, split="train", goal="Guess.")


@asynccontextmanager
async def hosting(
    spec: EnvSpec = SPEC, processes: int = 2, timeout: float = 60.0
) -> AsyncIterator[ProcessHost]:
    host = ProcessHost({"toy": (spec, "full")}, processes=processes, timeout=timeout)
    try:
        yield host
    finally:
        await host.aclose()


async def acquire_and_reset(host: ProcessHost) -> ProcessEnvironment:
    environment = await host.acquire(TASK)
    await environment.reset(TASK)
    return environment


async def worker_pid(environment: ProcessEnvironment) -> int:
    return int((await environment.step("where")).text.split()[0])
