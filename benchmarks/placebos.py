"""Placebos for experience: methods like `complementary`, whose guided agents read another text.

    crl train --tasks room --method benchmarks/placebos.py:FILLER

Retrieval, bank and extractor are those of `complementary`. Only the text in the prompt differs, so
the exposure is the same: an agent reads a placebo if and only if it would have read a lesson. Texts
come from training episodes alone. They are not part of a checkpoint: a resumed run collects them
again.

* `FILLER`: one word, as often as the lesson has words.
* `SHUFFLED`: a lesson that was retrieved for another place of the task.
* `TRAJECTORY`: the actions of the best episode of the place so far.
* `RIGHT`: the truth about the place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from crl.config.method import MethodSpec
from crl.envs.registry import get_spec
from crl.methods import complementary
from crl.methods.complementary import ComplementarySection
from crl.methods.parts.rollouts import ChatContext, OutcomeReward
from crl.protocols import Hit
from crl.seeds import generator
from crl.types import Task, Trajectory

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.protocols import Method

FILLING_WORD = "the"
"""Word without meaning that is one token of the bundled models, as most words of lessons are."""
MAX_ACTIONS = 8
"""Number of actions of a trajectory that are shown."""


@dataclass(frozen=True)
class Filler(ChatContext):
    """`ContextProvider` that replaces a lesson by words without meaning."""

    def _experience_text(self, task: Task, experiences: Sequence[Hit]) -> str:
        replaced = [replace(hit, text=self.text(task, hit)) for hit in experiences]
        return super()._experience_text(task, replaced)

    def text(self, task: Task, experience: Hit) -> str:
        """Return the text that replaces a lesson."""
        return " ".join([FILLING_WORD] * len(experience.text.split()))


@dataclass(frozen=True)
class Shuffled(Filler):
    """`ContextProvider` that replaces a lesson by one that was retrieved for another place.

    Until there is one, it is a `Filler`. Of every place, the last lessons are known.
    """

    seen: defaultdict[str, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(dict))
    """Lessons by task and goal, in the order of their first retrievals."""

    def text(self, task: Task, experience: Hit) -> str:
        places = self.seen[task.name]
        known = places.setdefault(task.goal, []) if task.split == "train" else []
        if task.split == "train" and experience.text not in known:
            known.append(experience.text)
        others = sorted(goal for goal in places if goal != task.goal and places[goal])
        if not others:
            return super().text(task, experience)
        draws = generator(task.seed, "placebo", task.goal, experience.text)
        return draws.choice(places[draws.choice(others)])


@dataclass(frozen=True)
class BestTrajectory(Filler):
    """`ContextProvider` that replaces a lesson by the actions of the best episode of the place.

    The best episode has the highest reward and then the fewest turns. Until the place has been
    visited, it is a `Filler`.
    """

    best: dict[tuple[str, str], tuple[tuple[float, int], str]] = field(default_factory=dict)
    """Rank and actions of the best episode, by task and goal."""

    def text(self, task: Task, experience: Hit) -> str:
        known = self.best.get((task.name, task.goal))
        return known[1] if known else super().text(task, experience)


@dataclass(frozen=True)
class RecordedReward(OutcomeReward):
    """`RewardShaper` that shows finished episodes to a `BestTrajectory`."""

    context: BestTrajectory

    def shape(self, trajectory: Trajectory) -> Any:
        rewards = super().shape(trajectory)
        actions = [s.text.strip() for s in trajectory.segments if s.origin == "policy"]
        rank = (sum(rewards.values()), -trajectory.turns)
        place = (trajectory.task.name, trajectory.task.goal)
        known = self.context.best.get(place)
        if trajectory.task.split == "train" and (known is None or rank > known[0]):
            self.context.best[place] = rank, " ".join(actions[:MAX_ACTIONS])
        return rewards


@dataclass(frozen=True)
class Right(Filler):
    """`ContextProvider` that replaces a lesson by the truth about the place."""

    def text(self, task: Task, experience: Hit) -> str:
        curriculum = get_spec(task.name).curriculum
        assert curriculum
        assert curriculum.advisor
        return curriculum.advisor.right(task)


def placebo(name: str, kind: type[Filler]) -> MethodSpec:
    """Return the spec of the method `name`, whose agents read the texts of `kind`."""

    def build(config: RunConfig, settings: ComplementarySection, context: ChatContext) -> Method:
        method = complementary.build(config, settings, context)
        assert isinstance(method.context, ChatContext)
        parts = {part.name: getattr(method.context, part.name) for part in fields(method.context)}
        replaced = kind(**parts)
        shaper = RecordedReward(replaced) if isinstance(replaced, BestTrajectory) else method.shaper
        return replace(method, context=replaced, shaper=shaper)

    return replace(complementary.SPEC, name=name, build=build)


FILLER = placebo("filler", Filler)
SHUFFLED = placebo("shuffled", Shuffled)
TRAJECTORY = placebo("trajectory", BestTrajectory)
RIGHT = placebo("right", Right)
