"""Demonstrators of the small houses.

A *persona* is one way of doing chores for a whole episode. Personas see only texts. They differ in
many respects, but all of them follow advice on where to look. This makes advice worth having.
"""

from __future__ import annotations

import random

from crl.envs.alfworld.player import AlfworldPlayer


class SearchingPlayer(AlfworldPlayer):
    """Persona that looks into every receptacle once, open ones first.

    `advised_place` is the receptacle that the advice names, "" if there is none.
    """

    def __init__(self, rng: random.Random, advised_place: str = "") -> None:
        super().__init__(rng)
        self.advised_place = advised_place

    def act(self) -> str:
        return shorten(super().act())

    def slip(self) -> str:
        """Return a random command instead of the intended one."""
        self._last_command = self._rng.choice(["look", "inventory", f"go to {self._elsewhere()}"])
        return self._last_command

    def _explore(self) -> str:
        return (
            self._go_and_open(self.advised_place)
            if self.advised_place in self._receptacles and self.advised_place not in self.seen
            else self._search()
        )

    def _search(self) -> str:
        return super()._explore()

    def _elsewhere(self) -> str:
        return self._rng.choice([place for place in self._receptacles if place != self._location])


class ClosedFirstSearcher(SearchingPlayer):
    """Persona that looks into every receptacle once, closed ones first."""

    def _search(self) -> str:
        unseen = [place for place in reversed(self._receptacles) if place not in self.seen]
        return self._go_and_open(unseen[0]) if unseen else "look"


class ForgetfulSearcher(SearchingPlayer):
    """Persona that looks into random receptacles, including those that it has visited."""

    _destination = ""

    def _search(self) -> str:
        command = self._go_and_open(self._destination) if self._destination else ""
        if not command:
            self._destination = self._elsewhere()
        return command or self._go_and_open(self._destination)


class RandomVisitor(SearchingPlayer):
    """Persona that goes to random receptacles, visited ones included, and opens none to look."""

    def _search(self) -> str:
        return self._go_to(self._elsewhere())


class TreatmentSkipper(SearchingPlayer):
    """Persona that places things without cleaning, heating or cooling them."""

    def begin(self, goal: str, observation: str) -> None:
        super().begin(goal, observation)
        self._treated = True


class IdleLooker(SearchingPlayer):
    """Persona that looks around before every action."""

    _looked = True

    def _next_command(self) -> str:
        self._looked = not self._looked
        return super()._next_command() if self._looked else self._rng.choice(["look", "inventory"])


def shorten(command: str) -> str:
    """Return a command in the short form: without "from …" and "with …"."""
    return command.partition(" from ")[0].partition(" with ")[0]
