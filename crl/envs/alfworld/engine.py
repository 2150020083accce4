"""TextWorld's engine for one game at a time, without the work that it does twice. Not thread-safe: TextWorld shares a parser."""

from __future__ import annotations

import json
import re
import sys
from functools import cache, lru_cache
from typing import Any

import fast_downward  # pyright: ignore[reportMissingImports]
import textworld  # pyright: ignore[reportMissingImports]
import textworld.envs  # pyright: ignore[reportMissingImports]
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler  # pyright: ignore[reportMissingImports]
from textworld.envs.pddl import logic, textgen  # pyright: ignore[reportMissingImports]
from textworld.envs.pddl.textgen import ContextSensitiveGrammar  # pyright: ignore[reportMissingImports]
from textworld.logic import Rule  # pyright: ignore[reportMissingImports]

from crl.envs.alfworld.pddl import GameData

_HANDLED = 64
"""Games whose translation is kept: members of a group play one game, evaluations play a set several times."""

_take_arguments_and_translate = fast_downward.pddl2sas
_CHORE = re.compile(r'"Your task is to: ([^"\\]*)"')
"""Where games that follow one grammar differ in it."""

_parsed: Any = lru_cache(maxsize=_HANDLED)(logic._parse_and_convert)


class Engine:
    """`start` a game, then `do` commands of `admissible` until it says that the game is won."""

    def __init__(self) -> None:
        _without_repetition()
        self._env = AlfredDemangler(
            textworld.envs.PddlEnv(textworld.EnvInfos(admissible_commands=True)), shuffle=False
        )
        self._state: Any = None
        self._loaded: GameData | None = None

    def start(self, data: GameData) -> str:
        """Starts the game from its beginning; returns TextWorld's first text."""
        if data != self._loaded:
            self._loaded = None  # which a game that cannot be loaded leaves half there
            self._env.load(data)
            self._loaded = data
        self._state = self._env.reset()
        return self._state.feedback

    @property
    def admissible(self) -> tuple[str, ...]:
        """The commands that do something, sorted."""
        return tuple(self._state["admissible_commands"])

    def do(self, command: str) -> tuple[str, bool]:
        """What TextWorld says, and whether the game is won."""
        self._state, _, _ = self._env.step(command)
        return self._state.feedback, bool(self._state["won"])

    def close(self) -> None:
        self._env.close()


def plan_length(data: GameData) -> int | None:
    """How many actions the planner needs to win the game; None when it finds no way."""
    _, problem = _pddl2sas(data["pddl_domain"], data["pddl_problem"], optimize=True)  # type: ignore[arg-type]
    library = _planner()
    if not library.solve_sas(problem.encode(), False):
        return None
    return library.get_last_plan_length()


def _pddl2sas(domain: str, problem: str, optimize: bool = False) -> Any:
    """Fast Downward's translation, which reads its options from the process's arguments and so sets them; here they stay as they were."""
    arguments = sys.argv
    try:
        return _take_arguments_and_translate(domain, problem, optimize=optimize)
    finally:
        sys.argv = arguments


_translate = lru_cache(maxsize=_HANDLED)(_pddl2sas)


@cache
def _planner() -> Any:
    return fast_downward.load_lib()


@cache
def _without_repetition() -> None:
    """TextWorld parses a grammar for every game and its expressions at every use, copies what they are about in depth, and translates a
    game's problem four times: twice when it is loaded, twice when it is reset, every second time for a planner that plays no part here.
    The texts are the same without."""
    textgen._parse_and_convert = lru_cache(maxsize=4096)(textgen._parse_and_convert)
    textgen.copy_context = _copied
    logic._parse_and_convert = _grammar
    Rule.parse_conjunctive_query = staticmethod(
        lru_cache(maxsize=4096)(Rule.parse_conjunctive_query)
    )  # type: ignore[method-assign]
    fast_downward.pddl2sas = lambda domain, problem, verbose=False, optimize=False: _translate(
        domain, problem
    )


def _copied(context: dict[str, Any]) -> dict[str, Any]:
    """A context of its own for a symbol; expressions read the entities that it names and change none."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def _grammar(text: str, rule_name: str) -> tuple[Any, ContextSensitiveGrammar]:
    """A game's actions and grammar; what it has in common with other games' is parsed once."""
    chore = _CHORE.search(text)
    if chore is None:
        return _parsed(text, rule_name=rule_name)
    actions, common = _parsed(_CHORE.sub('"Your task is to: "', text), rule_name=rule_name)
    own = ContextSensitiveGrammar.parse(
        json.dumps({"task": [{"rhs": f"Your task is to: {chore[1]}"}]})
    )
    grammar = ContextSensitiveGrammar()
    grammar._rules |= {**common._rules, **own._rules}
    return actions, grammar
