"""TextWorld's engine for one game at a time, without repeated work.

Not thread-safe, because TextWorld shares a parser.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import fast_downward  # pyright: ignore[reportMissingImports]
import textworld  # pyright: ignore[reportMissingImports]
import textworld.envs  # pyright: ignore[reportMissingImports]
from alfworld.agents.environment.alfred_tw_env import (  # pyright: ignore[reportMissingImports]
    AlfredDemangler,
)
from textworld.envs.pddl import logic, textgen  # pyright: ignore[reportMissingImports]
from textworld.envs.pddl.textgen import (  # pyright: ignore[reportMissingImports]
    ContextSensitiveGrammar,
)
from textworld.logic import Rule  # pyright: ignore[reportMissingImports]

from crl.envs.alfworld.pddl import GameData

_CACHED_GRAMMARS = 64
"""Number of grammars whose parse is cached. Many games share one."""

_CACHED_CHARACTERS = 12 << 20
"""Maximum number of characters of the cached translations.

These are about 500 small houses, which take 80 MB of memory, or 70 large ones, which take 40 MB.
The members of a group play the same game. Evaluations play the same games several times, before and
after a run.
"""

_original_pddl2sas = fast_downward.pddl2sas
_CHORE = re.compile(r'"Your task is to: ([^"\\]*)"')
"""Only part in which the games of one grammar differ."""

_cached_parse: Any = lru_cache(maxsize=_CACHED_GRAMMARS)(logic._parse_and_convert)


class PddlEngine:
    """Engine that runs one game at a time.

    `start` a game, then `execute` commands of `admissible` until the game is won.
    """

    def __init__(self) -> None:
        _patch_textworld()
        self._env = AlfredDemangler(
            textworld.envs.PddlEnv(textworld.EnvInfos(admissible_commands=True)), shuffle=False
        )
        self._state: Any = None
        self._loaded: GameData | None = None

    def start(self, data: GameData) -> str:
        """Start the game from its beginning. Return TextWorld's first text."""
        if data != self._loaded:
            self._loaded = None  # a failed load leaves the old game half replaced
            self._env.load(data)
            self._loaded = data
        self._state = self._env.reset()
        return self._state.feedback

    @property
    def admissible(self) -> tuple[str, ...]:
        """Commands that have an effect, sorted."""
        return tuple(self._state["admissible_commands"])

    def execute(self, command: str) -> tuple[str, bool]:
        """Execute a command. Return TextWorld's text, and whether the game is won."""
        self._state, _, _ = self._env.step(command)
        return self._state.feedback, bool(self._state["won"])

    def close(self) -> None:
        self._env.close()


def plan_length(data: GameData) -> int | None:
    """Return the number of actions with which the planner wins the game.

    Return None if the planner finds no solution.
    """
    _, problem = _pddl2sas(
        data["pddl_domain"],  # type: ignore[arg-type]
        data["pddl_problem"],  # type: ignore[arg-type]
        optimize=True,
    )
    library = _planner()
    if not library.solve_sas(problem.encode(), False):
        return None
    return library.get_last_plan_length()


def _pddl2sas(domain: str, problem: str, optimize: bool = False) -> Any:
    """Return Fast Downward's translation of a problem.

    Fast Downward sets `sys.argv`, because it reads its options from there. This function restores
    `sys.argv`.
    """
    arguments = sys.argv
    try:
        return _original_pddl2sas(domain, problem, optimize=optimize)
    finally:
        sys.argv = arguments


class TranslationCache:
    """Translations of the games that were played last, with at most `limit` characters."""

    def __init__(self, translate: Callable[[str, str], Any], limit: int) -> None:
        self._translate, self._limit = translate, limit
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._characters = 0

    def get(self, domain: str, problem: str) -> Any:
        """Return the translation of a problem. The last one is kept even if it is too large."""
        key = hashlib.sha256(f"{domain}\0{problem}".encode()).digest()
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]
        translation = self._translate(domain, problem)
        self._entries[key] = translation, (size := _characters(translation))
        self._characters += size
        while self._characters > self._limit and len(self._entries) > 1:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._characters -= dropped
        return translation


def _characters(translation: Any) -> int:
    """Return the number of characters of all texts in nested tuples and lists."""
    if isinstance(translation, tuple | list):
        return sum(map(_characters, translation))
    return len(translation) if isinstance(translation, str) else 0


_translations = TranslationCache(_pddl2sas, _CACHED_CHARACTERS)


@cache
def _planner() -> Any:
    return fast_downward.load_lib()


@cache
def _patch_textworld() -> None:
    """Patch TextWorld so that it does not repeat work. Its texts do not change.

    Without the patch, TextWorld parses a grammar for every game, and the grammar's expressions at
    every use. It makes deep copies of their contexts. It translates a game's problem four times:
    twice when the game is loaded, and twice when it is reset. Every second translation is for a
    planner that is not used here.
    """
    textgen._parse_and_convert = lru_cache(maxsize=4096)(textgen._parse_and_convert)
    textgen.copy_context = _copy_context
    logic._parse_and_convert = _parse_game_grammar
    Rule.parse_conjunctive_query = staticmethod(
        lru_cache(maxsize=4096)(Rule.parse_conjunctive_query)
    )  # type: ignore[method-assign]
    fast_downward.pddl2sas = lambda domain, problem, verbose=False, optimize=False: (
        _translations.get(domain, problem)
    )


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a context for one symbol.

    Expressions only read the entities of the context, so these are shared.
    """
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def _parse_game_grammar(text: str, rule_name: str) -> tuple[Any, ContextSensitiveGrammar]:
    """Return a game's actions and its grammar.

    The part that the game shares with other games is parsed only once.
    """
    chore = _CHORE.search(text)
    if chore is None:
        return _cached_parse(text, rule_name=rule_name)
    actions, common = _cached_parse(_CHORE.sub('"Your task is to: "', text), rule_name=rule_name)
    task_grammar = ContextSensitiveGrammar.parse(
        json.dumps({"task": [{"rhs": f"Your task is to: {chore[1]}"}]})
    )
    grammar = ContextSensitiveGrammar()
    grammar._rules |= {**common._rules, **task_grammar._rules}
    return actions, grammar
