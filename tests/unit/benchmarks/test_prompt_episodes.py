"""Episodes of the scripted players that the benchmarks of prompts record."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from crl.config import load
from support.paths import benchmark

prompt_episodes = benchmark("prompt_episodes")


def test_episodes_that_ended_with_an_error_are_not_left_out(monkeypatch: pytest.MonkeyPatch):
    played = [
        SimpleNamespace(task=SimpleNamespace(name="room"), error=error) for error in (None, "lost")
    ]
    monkeypatch.setattr(prompt_episodes, "play_episodes", lambda *args, **options: None)
    monkeypatch.setattr(prompt_episodes, "read_episodes", lambda run: iter(played))
    with pytest.raises(RuntimeError, match=r"1 of 2 episodes ended with an error\. room: lost"):
        prompt_episodes.record(load(["room"]), {}, 2)
