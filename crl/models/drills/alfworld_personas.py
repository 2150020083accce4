"""The small houses' demonstrators: *personas*, each one way of doing chores for a whole episode. They see texts alone.

All do what they are told of where to look; that is where they differ least, and what makes advice worth having.
"""

from __future__ import annotations

import random

from crl.envs.alfworld.player import AlfworldPlayer


class Searcher(AlfworldPlayer):
    """Looks into every receptacle once, open ones first.

    told: the receptacle that it was told to look into; "" is none.
    """

    def __init__(self, rng: random.Random, told: str = "") -> None:
        super().__init__(rng)
        self.told = told

    def act(self) -> str:
        return short(super().act())

    def slip(self) -> str:
        """It does something else instead of what it would have done."""
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


class Opener(Searcher):
    """Looks into every receptacle once, closed ones first."""

    def _search(self) -> str:
        unseen = [place for place in reversed(self._places) if place not in self.seen]
        return self._at(unseen[0]) if unseen else "look"


class Forgetful(Searcher):
    """Looks anywhere, whether or not it was there before."""

    _bound_for = ""

    def _search(self) -> str:
        command = self._at(self._bound_for) if self._bound_for else ""
        if not command:
            self._bound_for = self._elsewhere()
        return command or self._at(self._bound_for)


class Passer(Searcher):
    """Goes anywhere, whether or not it was there before, and opens nothing to look into it."""

    def _search(self) -> str:
        return self._go(self._elsewhere())


class Hasty(Searcher):
    """Puts things where they are wanted as they are: neither clean nor hot nor cool."""

    def begin(self, goal: str, observation: str) -> None:
        super().begin(goal, observation)
        self._treated = True


class Dawdler(Searcher):
    """Looks about before everything that it does."""

    _looked = True

    def _next(self) -> str:
        self._looked = not self._looked
        return super()._next() if self._looked else self._rng.choice(["look", "inventory"])


def short(command: str) -> str:
    """A command as an agent may shorten it: a thing is taken from where it is."""
    return command.partition(" from ")[0].partition(" with ")[0]
