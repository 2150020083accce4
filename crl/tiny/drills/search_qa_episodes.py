"""Scripted episodes of compact question answering: good and bad play, and episodes for extractors.

The episodes use separately generated worlds. Names and facts are drawn anew in each of them, so an
answer can be found only by searching, not from memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from crl.envs.search_qa.game import SearchGame
from crl.envs.search_qa.lessons import LESSONS, lesson
from crl.envs.search_qa.library import Library, Topics, generated_topics
from crl.envs.search_qa.player import Request, facts
from crl.envs.search_qa.questions import Topic
from crl.envs.search_qa.retrieval import BM25Retriever
from crl.envs.search_qa.tasks import SMALL
from crl.envs.search_qa.world import WANT_KEY, generate
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_NO_RESULT
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills.drill import OFFER, Episode, as_hit, asking_turn, weighted_choice
from crl.types import Observation, Segment, Task

TURNS, TOP_K = 4, 1
"""Turn limit and documents per search, as in tasks/search_qa.toml."""

WORLD_SEEDS, LANDS = range(1, 9), 3
"""Seeds of the generated worlds, and number of lands in each; a world has 750 documents."""

CONTEXT = ChatContext({SMALL: ""})
OTHER_KINDS = [kind for kind in LESSONS if kind != "search"]
REPLIES = (("right", 0.60), ("random", 0.10), ("other", 0.10), ("nothing", 0.20))
"""Shares of the replies to a question."""

Play = Generator[str, str, None]
"""Generator that yields actions and receives the resulting observations."""
Persona = Callable[[Request, random.Random], Play]
"""Function that starts to play, from the question."""


# ── personas ──────────────────────────────────────────────────────────────────────────────────────


def solve(request: Request, rng: random.Random) -> Play:
    """Search the subject, then its key, and answer with the wanted fact."""
    text = yield _search(request.subject)
    key = _fact(text, request.relation) or _any_name(text, request.subject, rng)
    if request.wanted == WANT_KEY:
        yield _answer(key)
    yield from ask_for(key)(request, rng)


def take_wrong_key(request: Request, rng: random.Random) -> Play:
    """Search the subject, then another name of its document than the key."""
    text = yield _search(request.subject)
    key = _fact(text, request.relation)
    others = [name for name in _values(text) if name != key]
    yield from ask_for(rng.choice(others or [request.subject]))(request, rng)


def answer_first(request: Request, rng: random.Random) -> Play:
    """Search the subject, and answer with the first name of its document."""
    text = yield _search(request.subject)
    yield _answer(next(iter(_values(text)), request.subject))


def guess(request: Request, rng: random.Random) -> Play:
    """Answer at once."""
    yield _answer(request.subject)


def wander(request: Request, rng: random.Random) -> Play:
    """Search one name after the other, and answer nothing."""
    name = request.subject
    while True:
        text = yield _search(name)
        name = _any_name(text, name, rng)


def ask_for(name: str) -> Persona:
    """Return a persona that searches a name, as if it were the key, and answers."""

    def persona(request: Request, rng: random.Random) -> Play:
        if request.wanted == WANT_KEY:
            yield _answer(name)
        text = yield _search(name)
        yield _answer(_fact(text, request.wanted) or _any_name(text, name, rng))

    return persona


def avoider(name: str) -> Persona:
    """Return a persona that searches the subject, then any name except the one to avoid."""

    def persona(request: Request, rng: random.Random) -> Play:
        text = yield _search(request.subject)
        others = [value for value in _values(text) if value != name]
        yield from ask_for(rng.choice(others or [request.subject]))(request, rng)

    return persona


def persona_for_lesson(kind: str, name: str, fallback: Persona) -> Persona:
    """Return the persona that follows a lesson, or `fallback` if the lesson cannot be followed.

    `crl.envs.search_qa.lessons` lists the kinds.
    """
    match kind:
        case "search":
            return ask_for(name)
        case "skip":
            return avoider(name)
        case "twice":
            return solve
        case "first":
            return answer_first
    return fallback


def _search(name: str) -> str:
    return f"search[ {name}]"


def _answer(name: str) -> str:
    """Return the action. A space precedes a name, so that it has the same tokens everywhere."""
    return f"answer[ {name}]"


def _fact(text: str, relation: str) -> str | None:
    return next((value for _, name, value in facts(text) if name == relation), None)


def _values(text: str) -> list[str]:
    return [value for _, _, value in facts(text)]


def _any_name(text: str, other: str, rng: random.Random) -> str:
    return rng.choice(_values(text) or [other])


# ── episodes ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SearchEpisodes:
    """Episodes of compact question answering."""

    personas: tuple[tuple[Persona, float], ...]
    """Shares of the personas that play without advice, or ignore it."""
    advice: tuple[tuple[str, float], ...]
    """Shares of the advice at the start.

    The kinds are no advice ("none"), to search the key ("right"), to search the key or a name that
    may be taken for it ("random"), or a lesson of another kind ("other").
    """
    fidelity: float = 0.85
    """Probability that advice of kind "other" is followed; "right" and "random" always are."""
    offer: bool = False
    """True if the agent may ask; some agents do so at the start."""
    turns: int = TURNS
    """Maximal turns of an episode."""
    world_seeds: range = WORLD_SEEDS
    """Seeds of the generated worlds."""

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return (episode.segments for episode in self.episodes(rng, n))

    def episodes(self, rng: random.Random, n: int) -> Iterator[Episode]:
        libraries = demonstration_libraries(self.world_seeds)
        games = [SearchGame("compact", library, TOP_K) for library in libraries]
        for _ in range(n):
            number = rng.randrange(len(libraries))
            yield self._episode(games[number], libraries[number].topics, rng)

    def _episode(self, game: SearchGame, topics: Topics, rng: random.Random) -> Episode:
        task = demonstration_task(topics, rng)
        topic = topics.topic(int(task.params["lgen"]))
        advice = self._draw_advice(topic, rng)
        hint = as_hit(lesson(*advice), task) if advice else None
        persona = weighted_choice(self.personas, rng)
        if advice and (advice[0] == "search" or rng.random() < self.fidelity):
            persona = persona_for_lesson(*advice, persona)
        observation = game.reset(task)
        *head, first = CONTEXT.opening(task, Observation(observation), [hint] if hint else [])
        segments = [*head, *([OFFER] if self.offer else []), first]
        if self.offer and asking_turn(rng, advised=bool(advice)) is not None:
            reply, persona = question_reply(topic, persona, rng)
            segments += [
                Segment("assistant", COMPACT_CALL, "tool_call"),
                Segment("user", reply, "tool_result"),
            ]
        play = persona(Request.read(task.goal, observation), rng)
        action, success = next(play), False
        for turn in range(self.turns):
            result = game.step(action)
            segments += [Segment("assistant", action, "policy"), *CONTEXT.feedback(result)]
            if result.done:
                success = result.success
                break
            if turn < self.turns - 1:
                action = play.send(result.text)
        return Episode(task, hint, tuple(segments), success)

    def _draw_advice(self, topic: Topic, rng: random.Random) -> tuple[str, str] | None:
        """Return kind and name of the lesson at the start, or None."""
        advice = weighted_choice(self.advice, rng)
        if advice == "none":
            return None
        names = (topic.key, *topic.distractors)
        kind = rng.choice(OTHER_KINDS) if advice == "other" else "search"
        return kind, topic.key if advice == "right" else rng.choice(names)


def question_reply(topic: Topic, fallback: Persona, rng: random.Random) -> tuple[str, Persona]:
    """Return the reply to a question and the persona that follows it.

    The reply is to search the key, to search any name, another lesson, or nothing.
    """
    reply = weighted_choice(REPLIES, rng)
    if reply == "nothing":
        return COMPACT_NO_RESULT, fallback
    kind = rng.choice(OTHER_KINDS) if reply == "other" else "search"
    name = topic.key if reply == "right" else rng.choice((topic.key, *topic.distractors))
    return lesson(kind, name), persona_for_lesson(kind, name, fallback)


@cache
def demonstration_libraries(seeds: range) -> tuple[Library, ...]:
    worlds = (generate(seed, LANDS) for seed in seeds)
    return tuple(
        Library(
            generated_topics(lands, {}),
            BM25Retriever(list(chain.from_iterable(land.documents() for land in lands))),
        )
        for lands in worlds
    )


def demonstration_task(topics: Topics, rng: random.Random) -> Task:
    """Return a task about one of the topics."""
    lgen, core = rng.randrange(1 << 30), rng.randrange(1 << 30)
    goal = topics.topic(lgen).goal
    return Task(SMALL, core, "unseen", goal, {"lgen": lgen, "core": core, "place": goal})


def random_names(rng: random.Random) -> Sequence[str]:
    """Return the names that the texts of a random topic contain: the key, and others."""
    topics = rng.choice(demonstration_libraries(WORLD_SEEDS)).topics
    topic = rng.choice(topics.train)
    return (topic.key, *topic.distractors)


PERSONAS: tuple[tuple[Persona, float], ...] = (
    (solve, 0.35),
    (take_wrong_key, 0.30),
    (answer_first, 0.20),
    (wander, 0.10),
    (guess, 0.05),
)
ACTOR_EPISODES = SearchEpisodes(
    PERSONAS, advice=(("none", 0.38), ("right", 0.27), ("random", 0.13), ("other", 0.22))
)
CHOICE_EPISODES = replace(
    ACTOR_EPISODES, advice=(("none", 0.20), ("right", 0.40), ("random", 0.40)), turns=2
)
"""Episodes of two turns. The actor must first learn to copy a name into an action."""
ASKING_EPISODES = replace(
    ACTOR_EPISODES,
    advice=(("none", 0.55), ("right", 0.20), ("random", 0.10), ("other", 0.15)),
    offer=True,
)
EXTRACTOR_EPISODES = replace(
    ACTOR_EPISODES, advice=(("none", 0.50), ("right", 0.15), ("random", 0.20), ("other", 0.15))
)
