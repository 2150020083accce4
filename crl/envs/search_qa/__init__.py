"""`search_qa` and `search_qa_small`: questions that are answered with a search tool.

`search_qa` follows Search-R1 (Jin et al. 2025): an agent searches a corpus and ends with an answer,
which must match a gold answer exactly. It plays the official questions if the user has them,
otherwise those of a generated world (see `world`). Every question is a place of its own.

`search_qa_small` is for tiny models. It always plays the generated world. Its places are topics,
such as the author of a work; each visit asks another question about the topic. It is then worth
learning which document answers the questions of a topic.

This module declares the environments. Questions and documents are loaded when the first task is
drawn.
"""

from __future__ import annotations

from dataclasses import replace

from crl.config.schema import EmbedderSection, SearchSection
from crl.envs.base import ActionSpace, EmbedTexts, EnvSpec, Game, OpenEmbed, Rendering, Runtime
from crl.envs.curriculum import Curriculum
from crl.envs.search_qa.lessons import TopicAdvisor, digest
from crl.envs.search_qa.library import Libraries
from crl.envs.search_qa.player import SearchPlayer
from crl.envs.search_qa.tasks import NAME, SMALL, TopicTasks
from crl.errors import ConfigError


def configured(section: SearchSection, open_embed: OpenEmbed) -> EnvSpec:
    """Return `search_qa` with these settings."""
    libraries = Libraries(section, open_embed, official=True)
    return replace(
        _spec(NAME, libraries),
        tasks=TopicTasks(NAME, libraries).env_tasks(official=True),
        curriculum=Curriculum(SearchPlayer),
        runtime=Runtime(configured=configured),
    )


def configured_small(section: SearchSection, open_embed: OpenEmbed) -> EnvSpec:
    """Return `search_qa_small` with these settings.

    Raise `ConfigError` if they choose sets of the official questions.
    """
    for name in ("train_sets", "test_sets"):
        if (sets := getattr(section, name)) != getattr(SearchSection(), name):
            reason = "has no effect: tiny models always play the generated world"
            raise ConfigError(name, sets, reason, "Leave it out, or use a language model")
    libraries = Libraries(section, open_embed, official=False)
    tasks = TopicTasks(SMALL, libraries)
    advisor = TopicAdvisor(lambda: libraries.open().topics)
    return replace(
        _spec(SMALL, libraries),
        curriculum=Curriculum(SearchPlayer, digest, advisor, tasks.probe_tasks),
        runtime=Runtime(configured=configured_small),
    )


def _spec(name: str, libraries: Libraries) -> EnvSpec:
    def make_game(rendering: Rendering) -> Game:
        from crl.envs.search_qa.game import SearchGame

        return SearchGame(rendering, libraries.open(), libraries.section.top_k)

    return EnvSpec(
        name=name,
        make_game=make_game,
        tasks=TopicTasks(name, libraries).env_tasks(official=False),
        actions=ActionSpace(
            description="<search>keywords</search> to find documents, and "
            "<answer>answer</answer> to end with a short answer",
            example="<search>capital of France</search>",
            tagged=True,
        ),
        turns=4,
    )


def no_embedder(section: EmbedderSection) -> EmbedTexts:
    """Raise `ConfigError`: no model embeds documents."""
    reason = "cannot be opened for an environment without a task"
    raise ConfigError("search.embedder.model", section.model, reason, "Use the retriever bm25")


SPEC = configured(SearchSection(), no_embedder)
SMALL_SPEC = configured_small(SearchSection(), no_embedder)
