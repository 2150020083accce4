"""Episodes of scripted players, and advice for them, for the prompts of `prompts.py`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from crl.config import RunConfig
from crl.envs.base import EnvSpec
from crl.manager.records import Entry
from crl.modeling.tokens import ChatRenderer, Conversation
from crl.protocols import Hit
from crl.records.reader import read_episodes
from crl.run.halves.commands import play_episodes
from crl.seeds import generator
from crl.types import Completion, ExperienceUse, Place, Provenance, Segment, Task, Trajectory


@dataclass(frozen=True)
class Episode:
    """Recorded episode with advice for it."""

    number: int
    """Number among the episodes of the task, from 0."""
    trajectory: Trajectory
    advice: Hit | None
    """Advice for the episode, right if the number is even. None without an advisor."""

    @property
    def task(self) -> Task:
        return self.trajectory.task

    @property
    def advice_kind(self) -> str:
        return "wrong" if self.number % 2 else "right"

    @cached_property
    def answers(self) -> list[str]:
        """Replies of the agent in the episode."""
        return [s.text for s in self.trajectory.segments if s.origin == "policy"]

    @property
    def later_turn(self) -> int:
        """Number of replies before the later turn."""
        return len(self.answers) // 2

    def before(self, turn: int) -> tuple[Segment, ...]:
        """Return the segments before the reply number `turn`, counted from 0."""
        segments = self.trajectory.segments
        replies = [i for i, segment in enumerate(segments) if segment.origin == "policy"]
        return segments[: replies[turn]]


def record(config: RunConfig, specs: Mapping[str, EnvSpec], number: int) -> list[list[Episode]]:
    """Let the scripted players play `number` episodes of each task. Return them by task.

    Raise `RuntimeError` if an episode ends with an error.
    """
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with redirect_stdout(sys.stderr):
            play_episodes(config, run, scripted=True)
        played = list(read_episodes(run))
    if errors := [f"{t.task.name}: {t.error}" for t in played if t.error is not None]:
        raise RuntimeError(
            f"{len(errors)} of {len(played)} episodes ended with an error. {errors[0]}"
        )
    found = []
    for name, spec in specs.items():
        of_task = [t for t in played if t.task.name == name][:number]
        found.append([Episode(i, t, advice(spec, t.task, i)) for i, t in enumerate(of_task)])
    return found


def advice(spec: EnvSpec, task: Task, number: int) -> Hit | None:
    """Return the advice for the episode `number`: right for even numbers, wrong for odd ones."""
    advisor = spec.curriculum.advisor
    if advisor is None:
        return None
    draws = generator(0, "prompts/advice", number)
    text = advisor.wrong(task, draws) if number % 2 else advisor.right(task)
    return Hit(text, ExperienceUse(f"{task.name}-{number}", 1, "advisor", "start"), task.goal)


def bank(episodes: Sequence[Episode]) -> list[Entry]:
    """Return the advice of all episodes as entries, without repetitions."""
    hits = {(hit.goal, hit.text): hit for hit in (episode.advice for episode in episodes) if hit}
    source = Provenance("advisor", (0, 1))
    task = episodes[0].task.name
    return [
        Entry(hit.use.uid, hit.use.version, hit.text, Place(task, hit.goal), source)
        for hit in hits.values()
    ]


def conversation_before(
    episode: Episode, turn: int, renderer: ChatRenderer, window: int | None
) -> Conversation:
    """Return the conversation of a recorded episode before the reply number `turn`."""
    conversation = Conversation(renderer, window)
    for segment in episode.before(turn):
        if segment.origin == "policy":
            conversation.prompt()
            ids = renderer.answer_ids(segment.text)
            unused = (0,) * len(ids)
            conversation.add_completion(Completion(ids, unused, unused, "stop"))
        else:
            conversation.add([segment])
    return conversation
