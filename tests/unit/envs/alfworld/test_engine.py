"""Cache of translations: bounded by size, the last games are kept."""

from __future__ import annotations

import pytest

pytest.importorskip("alfworld")

from crl.envs.alfworld.engine import TranslationCache


def test_the_last_translations_are_kept_within_the_limit() -> None:
    calls: list[str] = []

    def translate(domain: str, problem: str) -> tuple[str, list[str]]:
        calls.append(problem)
        return problem, [problem * 9]

    cache = TranslationCache(translate, 30)
    for problem in ("a", "b", "c", "a", "d", "a", "b"):  # each has ten characters
        assert cache.get("domain", problem) == (problem, [problem * 9])
    assert calls == ["a", "b", "c", "d", "b"], "d replaced b, the least recently used one"


def test_domain_and_problem_are_told_apart_and_a_large_game_is_played() -> None:
    cache = TranslationCache(lambda domain, problem: domain + "|" + problem, 1)
    assert [cache.get("ab", "c"), cache.get("a", "bc")] == ["ab|c", "a|bc"]
