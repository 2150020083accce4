"""Generated world: fictional people, companies, towns, lands and works, and questions about them.

Every entity has one document with its facts. A *topic* is a relation of an entity, such as the
author of a work. It leads to one other entity, the *key*. One question asks for the key itself (one
hop); the others ask for facts about the key (two hops). An answer is never in the question.

A world consists of lands. All facts of an entity name entities of its own land only. Two questions
about different lands therefore share no entity, neither in their texts, nor in the documents that
answer them, nor in their answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from crl.envs.search_qa.names import draw_names
from crl.envs.search_qa.questions import Document, Question, Topic
from crl.seeds import generator

LANDS = 20
"""Lands of the world in which runs are played: 5,000 documents."""

PER_LAND: Mapping[str, int] = {"land": 1, "town": 9, "company": 20, "person": 100, "work": 120}
"""Entities of each kind in a land."""

WANT_KEY = "name"
"""Wanted fact of the question for the key itself."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Kind of fact, from an entity to another entity. `{x}` is the entity, `{value}` the other."""

    name: str
    kind: str
    """Kind of the other entity."""
    sentence: str
    """Sentence that states the fact."""
    noun: str
    """Phrase for the other entity."""
    question: str
    """Question for the other entity."""


RELATIONS: Mapping[str, tuple[Relation, ...]] = {
    "work": (
        Relation(
            "author", "person", "{x} is a novel that was written by {value}.",
            "the author of {x}", "Who wrote {x}?",
        ),
        Relation(
            "publisher", "company", "{x} was published by the company {value}.",
            "the publisher of {x}", "Which company published {x}?",
        ),
    ),
    "person": (
        Relation(
            "birthplace", "town", "{x} was born in {value}.",
            "the birthplace of {x}", "In which town was {x} born?",
        ),
        Relation(
            "workplace", "company", "{x} works at {value}.",
            "the workplace of {x}", "At which company does {x} work?",
        ),
        Relation(
            "spouse", "person", "{x} is married to {value}.",
            "the spouse of {x}", "Who is married to {x}?",
        ),
    ),
    "company": (
        Relation(
            "director", "person", "The director of {x} is {value}.",
            "the director of {x}", "Who is the director of {x}?",
        ),
        Relation(
            "founder", "person", "{x} was founded by {value}.",
            "the founder of {x}", "Who founded {x}?",
        ),
        Relation(
            "town", "town", "The company {x} has its seat in {value}.",
            "the town of {x}", "In which town does {x} have its seat?",
        ),
    ),
    "town": (
        Relation(
            "mayor", "person", "The mayor of {x} is {value}.",
            "the mayor of {x}", "Who is the mayor of {x}?",
        ),
        Relation(
            "land", "land", "{x} is a town in the land of {value}.",
            "the land of {x}", "In which land is {x}?",
        ),
    ),
    "land": (
        Relation(
            "capital", "town", "The capital of the land of {x} is {value}.",
            "the capital of {x}", "What is the capital of {x}?",
        ),
        Relation(
            "ruler", "person", "{x} is ruled by {value}.",
            "the ruler of {x}", "Who rules {x}?",
        ),
    ),
}  # fmt: skip
"""Relations of the entities of each kind, in the order of their sentences."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Person, company, town, land or work."""

    name: str
    """Name in lower case."""
    kind: str
    facts: Mapping[str, str]
    """Name of the relation → name of the other entity."""


@dataclass(frozen=True)
class Land:
    """Part of a world whose facts name no entity of another land."""

    entities: Mapping[str, Entity]
    """Entities by name."""
    topics: tuple[Topic, ...]

    def documents(self) -> Iterator[Document]:
        return map(_document, self.entities.values())


def generate(seed: int = 0, lands: int = LANDS) -> tuple[Land, ...]:
    """Return the lands of the world of a seed. The same seed always gives the same world."""
    rng = generator(seed, "search_qa/world")
    size = sum(PER_LAND.values())
    names = draw_names(lands * size, rng)
    return tuple(_land(names[i * size : (i + 1) * size], rng) for i in range(lands))


def _land(names: Sequence[str], rng: random.Random) -> Land:
    remaining = iter(names)
    by_kind = {kind: [next(remaining) for _ in range(n)] for kind, n in PER_LAND.items()}
    spouses = _pairs(by_kind["person"], rng)
    entities: dict[str, Entity] = {}
    for kind, members in by_kind.items():
        for name in members:
            facts = {
                relation.name: spouses[name]
                if relation.name == "spouse"
                else rng.choice(by_kind[relation.kind])
                for relation in RELATIONS[kind]
            }
            entities[name] = Entity(name, kind, facts)
    topics = (
        topic
        for entity in entities.values()
        for relation in RELATIONS[entity.kind]
        if (topic := _topic(entity, relation, entities))
    )
    return Land(entities, tuple(topics))


def _pairs(people: Sequence[str], rng: random.Random) -> dict[str, str]:
    """Return a random marriage of all people: each name → the name of the spouse."""
    shuffled = rng.sample(people, len(people))
    half = len(shuffled) // 2
    couples = list(zip(shuffled[:half], shuffled[half:], strict=True))
    return dict(couples) | {wife: husband for husband, wife in couples}


def _topic(entity: Entity, relation: Relation, entities: Mapping[str, Entity]) -> Topic | None:
    """Return the topic of a relation of an entity; None if no question needs two documents.

    The answer of a question with two hops is not in the entity's own document.
    """
    key = entities[entity.facts[relation.name]]
    known = {entity.name, key.name, *entity.facts.values()}
    phrase = relation.noun.format(x=entity.name.title())
    further = tuple(
        Question(fact.question.format(x=phrase), (key.facts[fact.name].title(),), fact.name)
        for fact in RELATIONS[key.kind]
        if key.facts[fact.name] not in known
    )
    if not further:
        return None
    text = relation.question.format(x=entity.name.title())
    others = [name for name in (entity.name, *entity.facts.values()) if name != key.name]
    return Topic(
        f"about {relation.noun.format(x=entity.name)}",
        (Question(text, (key.name.title(),), WANT_KEY), *further),
        key.name,
        tuple(dict.fromkeys(others)),
    )


def _document(entity: Entity) -> Document:
    """Return the document of an entity. The short text is `name: relation value, …`."""
    title = entity.name.title()
    sentences = (
        relation.sentence.format(x=title, value=entity.facts[relation.name].title())
        for relation in RELATIONS[entity.kind]
    )
    facts = ", ".join(f"{relation} {value}" for relation, value in entity.facts.items())
    return Document(title, " ".join(sentences), f"{entity.name}: {facts}")
