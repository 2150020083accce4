"""Demonstrators of the small houses.

A *persona* is one way of doing chores for a whole episode. Personas see only texts. They differ in
many respects, but all of them follow advice on where to look. This makes advice worth having.
"""

from __future__ import annotations

import random

from crl.envs.alfworld.player import AlfworldPlayer


class SearchingPlayer(AlfworldPlayer):
    """Persona that looks into every receptacle once, open ones first.

    `told` is the receptacle that the advice names, "" if there is none.
    """

    def __init__(self, rng: random.Random, told: str = "") -> None:
        super().__init__(rng)
        self.told = told

    def act(self) -> str:
        return short(super().act())

    def slip(self) -> str:
        """Return a random command instead of the intended one."""
        self._last = self._rng.choice(["look", "inventory", f"go to {self._elsewhere()}"])
        return self._last

    def _explore(self) -> str:
        return (
            self._at(self.told)
            if self.told in self._places and self.told not in self.seen
            else self._search()
        )

    def _search(self) -> str:
        return super()._explore()

    def _elsewhere(self) -> str:
        return self._rng.choice([place for place in self._places if place != self._here])


class Opener(SearchingPlayer):
    """Persona that looks into every receptacle once, closed ones first."""

    def _search(self) -> str:
        unseen = [place for place in reversed(self._places) if place not in self.seen]
        return self._at(unseen[0]) if unseen else "look"


class ForgetfulSearcher(SearchingPlayer):
    """Persona that looks into random receptacles, including those that it has visited."""

    _bound_for = ""

    def _search(self) -> str:
        command = self._at(self._bound_for) if self._bound_for else ""
        if not command:
            self._bound_for = self._elsewhere()
        return command or self._at(self._bound_for)


class Passer(SearchingPlayer):
    """Persona that goes to random receptacles, visited ones included, and opens none to look."""

    def _search(self) -> str:
        return self._go(self._elsewhere())


class Hasty(SearchingPlayer):
    """Persona that places things without cleaning, heating or cooling them."""

    def begin(self, goal: str, observation: str) -> None:
        super().begin(goal, observation)
        self._treated = True


class Dawdler(SearchingPlayer):
    """Persona that looks around before every action."""

    _looked = True

    def _next(self) -> str:
        self._looked = not self._looked
        return super()._next() if self._looked else self._rng.choice(["look", "inventory"])


def short(command: str) -> str:
    """Return a command in the short form: without "from …" and "with …"."""
    return command.partition(" from ")[0].partition(" with ")[0]
