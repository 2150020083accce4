"""Example of a custom environment: eight doors, of which the same one is open at every visit."""

from crl.envs.actions import COMPASS, moves, parse_choice
from crl.envs.base import ActionSpace, EnvSpec
from crl.envs.curriculum import Curriculum
from crl.envs.places import Places
from crl.types import StepResult

DOORS, PLACES = tuple(COMPASS), Places("doors", "Doors: the {place}. Find the way out.")


class Doors:
    def reset(self, task):  # the same task always gives the same episode
        # "lgen" determines the layout of the place; task.seed differs at every visit.
        self.way_out = DOORS[task.params["lgen"] % len(DOORS)]
        return "eight doors, all shut."

    def step(self, action):
        door = parse_choice(action, DOORS)
        if door is None:  # the agent sees the text, and the game does not advance
            return StepResult("unknown door.", valid=False)
        won = door == self.way_out
        return StepResult("out." if won else "locked.", reward=float(won), done=won, success=won)

    def close(self): ...


def digest(segments):
    # The bundled extractor reads this summary; language models read the whole episode instead.
    tried, won = moves(segments, DOORS), segments[-1].text == "out."
    return f"{tried}\nstairs {f'{tried.split()[-1]} of the start' if won else 'not seen'}"


SPEC = EnvSpec(
    name="doors",
    make_game=lambda rendering: Doors(),
    tasks=PLACES.tasks,
    actions=ActionSpace(DOORS),
    turns=2,
    curriculum=Curriculum(digest=digest),  # optional, for tiny models
)
