"""Values of files that change."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from crl.serve.cache import COST_SHARE, LEAST_S, Cache, version_of


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_value_is_read_again_after_a_change(tmp_path: Path):
    file, cache = tmp_path / "file", Cache(4)

    def get() -> str:
        return cache.get("key", [file], lambda: file.read_text() if file.exists() else "none")

    assert get() == "none"
    for text in ("one", "three"):
        file.write_text(text)
        assert get() == text
    file.unlink()
    assert get() == "none"


def test_an_unchanged_value_is_read_once(tmp_path: Path):
    cache, reads = Cache(4), []
    for _ in range(3):
        cache.get("key", [tmp_path], lambda: reads.append(1))
    assert reads == [1]


def test_live_values_are_kept_for_a_share_of_the_time():
    clock = Clock()
    cache = Cache(4, clock=clock, work=clock)

    def slow() -> float:
        clock.now += 3
        return clock.now

    value, name = cache.live("key", (1,), slow)
    clock.now += COST_SHARE * 3 - 1
    assert cache.expected("key", (2,)) == name
    assert cache.live("key", (2,), slow) == (value, name)
    clock.now += 1
    due = cache.expected("key", (2,))
    assert due != name
    assert cache.live("key", (2,), slow) == (clock.now, due)


def test_the_last_change_is_not_lost():
    """After a busy time, the version of the last change is expected although nothing changes."""
    clock = Clock()
    cache = Cache(4, clock=clock)
    cache.live("key", (1,), lambda: "old")
    assert cache.live("key", (2,), lambda: "new")[0] == "old"
    clock.now += LEAST_S
    expected = cache.expected("key", (2,))
    assert cache.live("key", (2,), lambda: "new") == ("new", expected)


def test_many_values():
    cache = Cache(2)
    reads = []
    for key in (1, 2, 3, 3, 1):
        cache.live(key, (), lambda key=key: reads.append(key))
    assert reads == [1, 2, 3, 1]


def test_an_error_is_not_kept():
    cache = Cache(2)
    with pytest.raises(ZeroDivisionError):
        cache.live("key", (1,), lambda: 1 / 0)
    assert cache.live("key", (1,), lambda: "value")[0] == "value"


def test_simultaneous_requests_wait_for_one_read():
    cache, reads, begun = Cache(2), [], threading.Event()

    def read() -> int:
        begun.wait(5)
        reads.append(1)
        return len(reads)

    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.live("key", (), read)[0]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join(5)
    assert found == [1] * 8


def test_versions_of_files(tmp_path: Path):
    file = tmp_path / "file"
    versions = [version_of([file])]
    file.write_text("a")
    versions.append(version_of([file]))
    file.write_text("bb")
    versions.append(version_of([file]))
    assert len(set(versions)) == 3
    assert version_of([file]) == versions[-1]
