"""Eight doors, one of them leads out of the place, and it is the same one at every visit: an environment of one's own."""

from functools import partial

from crl.envs.actions import COMPASS, parse_choice
from crl.envs.base import EnvSpec
from crl.envs.places import NEW_LAYOUTS, PlaceStream, fixed_tasks, known_tasks
from crl.types import StepResult

NAME, GOAL, DOORS = "doors", "Doors: the {place}. Find the way out.", tuple(COMPASS)


class Doors:
    """A `Game`: `reset(task)` twice is the same episode."""

    def reset(self, task):
        self.way_out = DOORS[task.params["lgen"] % len(DOORS)]  # the place's layout; task.seed differs at every visit
        return "eight doors, all shut."

    def step(self, action):
        door = parse_choice(action, DOORS)
        if door is None:  # told to the agent; the game does not advance
            return StepResult("unknown door.", valid=False)
        won = door == self.way_out
        return StepResult("out." if won else "locked.", reward=float(won), done=won, success=won)

    def close(self):
        pass


def eval_tasks(split, n, seed, settings):
    return known_tasks(NAME, GOAL, n, seed, settings) if split == "known" else fixed_tasks(NAME, GOAL, NEW_LAYOUTS, n)


def digest(segments):
    """An episode in the words that the bundled extractor was taught; a language model reads the whole episode and needs none."""
    moves = [segment.text.strip() for segment in segments if segment.origin == "policy"]
    won = segments[-1].text == "out."
    return f"moves {' '.join(moves)}\nstairs {f'{moves[-1]} of the start' if won else 'not seen'}"


SPEC = EnvSpec(
    name=NAME,
    hosting="threads",  # games may be stepped from several threads of one process
    turns=2,
    reward_range=(0.0, 1.0),
    actions=DOORS,
    action_format=", ".join(DOORS),
    query_with_observation=False,
    make_game=lambda rendering: Doors(),
    task_source=partial(PlaceStream, NAME, GOAL),
    eval_tasks=eval_tasks,
    digest=digest,
)
