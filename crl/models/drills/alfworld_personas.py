"""The small houses' demonstrators: *personas*, each one way of doing chores for a whole episode. They see texts alone.

All do what they are told of where to look; that is where they differ least, and what makes advice worth having.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from crl.envs.alfworld.player import SHUT, AlfworldPlayer


class Searcher(AlfworldPlayer):
    """Looks into every receptacle once, open ones first.

    told: type of thing → where it is said to be; "" → where to look first, whatever for.
    """

    def __init__(self, rng: random.Random, told: Mapping[str, str]) -> None:
        super().__init__(rng)
        self._told = dict(told)

    def act(self) -> str:
        return short(super().act())

    def slip(self, action: str) -> str:
        """It does this instead of what it would have done."""
        self._last = action
        return short(action)

    def _explore(self) -> str:
        wanted = self._chore.receptacle if self._held else self._chore.thing
        for place in (self._told.get(wanted), self._told.get("")):
            if place in self._places and place not in self.seen:
                return self._at(place)
        return self._search()

    def _search(self) -> str:
        return super()._explore()


class Opener(Searcher):
    """Looks into every receptacle once, closed ones first."""

    def _search(self) -> str:
        unseen = [place for place in reversed(self._places) if place not in self.seen]
        return self._at(unseen[0]) if unseen else "look"


class Forgetful(Searcher):
    """Looks anywhere, whether or not it was there before."""

    _next_place = ""

    def _search(self) -> str:
        if self._here == self._next_place and self._here not in self._closed or not self._next_place:
            self._next_place = self._rng.choice([place for place in self._places if place != self._here])
        return self._at(self._next_place)


class Passer(Forgetful):
    """As forgetful, and opens nothing to look into it."""

    def _search(self) -> str:
        return self._go(self._rng.choice([place for place in self._places if place != self._here]))


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


__all__ = ["SHUT", "Dawdler", "Forgetful", "Hasty", "Opener", "Passer", "Searcher", "short"]
