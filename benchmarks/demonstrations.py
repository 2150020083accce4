"""Demonstrations in the full rendering: a reply to every prompt of a run, for `crl sft`.

The scripted players play the training episodes of a run. Each won episode gives one conversation of
the actor. In half of the conversations the agent is guided: it has the right advice, or it has
wrong advice and asks a question first, whose answer is the right advice. In a task without advisor,
there is no advice, and a question has no answer.

For tasks with an advisor, the episodes also give the replies of every other kind:

* actor, of the other half: a verdict, which accepts right advice and rejects wrong advice.
* extractor, of all: the distillation `add` with the right advice, the answer to a question with it,
  and a merge of the right and the wrong advice of the place into the right one.

Advice is right and wrong in turn, as in `prompts.py`. The places are those of another seed than
the run's, so a model learns the form of the replies and not the places of its training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_episodes import Episode, bank, record
from prompts import QUESTION, RATE

from crl.config import RunConfig
from crl.manager import DistilRequest
from crl.methods.parts.rollouts import ChatContext
from crl.planning import tasks
from crl.planning.context import bank_prompts, critic_prompt
from crl.planning.methods import build_method
from crl.protocols import Hit, Question
from crl.run.models import extractor_model
from crl.types import Observation, RoleName, Segment

OTHER_SEED = 1000
"""Difference between the seeds of the demonstrations and of the run."""

Conversation = Mapping[str, Any]


def conversation(segments: Sequence[Segment], reply: str) -> Conversation:
    """Return the segments as the messages of a conversation, which ends with the reply."""
    messages = [{"role": s.role, "content": s.text} for s in segments]
    return {"messages": [*messages, {"role": "assistant", "content": reply}]}


def actor_conversations(config: RunConfig, episodes: Sequence[Episode]) -> Iterator[Conversation]:
    """Yield the demonstrations of the actor, of the episodes of one task."""
    context = build_method(config, tasks.specs(config)).context
    assert isinstance(context, ChatContext)
    judge = critic_prompt("full", config.prompts.files)
    right = right_advice(episodes)
    for episode in episodes:
        if episode.trajectory.outcome.success:
            yield won_conversation(episode, context, right, config.ask.questions)
        if (hit := episode.advice) and not is_guided(episode):
            verdict = "accept" if episode.advice_kind == "right" else "reject"
            yield conversation(judge(episode.task, hit, RATE), f"<answer>{verdict}</answer>")


def won_conversation(
    episode: Episode, context: ChatContext, right: Mapping[str, Hit], questions: int
) -> Conversation:
    """Return a won episode, whose agent may be guided.

    `right`: right advice by goal. `questions`: maximum number of questions.
    """
    last = len(episode.answers) - 1
    segments, reply = episode.before(last), episode.answers[last]
    if not is_guided(episode):
        return conversation(segments, reply)
    first = next(i for i, segment in enumerate(segments) if segment.origin == "env")
    task, observation = episode.task, Observation(segments[first].text)
    hits = [episode.advice] if episode.advice else []
    opening = [*context.opening(task, observation, hits, max_questions=questions)]
    if episode.advice_kind == "wrong":
        question = f"<search_and_ask>{QUESTION}</search_and_ask>"
        opening += [Segment("assistant", question, "tool_call")]
        opening += context.reply(task, right.get(task.goal))
    return conversation([*opening, *segments[first + 1 :]], reply)


def is_guided(episode: Episode) -> bool:
    """Return whether the agent of a demonstration is guided: in the first two of four episodes."""
    return episode.number % 4 < 2


def right_advice(episodes: Sequence[Episode]) -> dict[str, Hit]:
    """Return the right advice for each goal."""
    return {hit.goal: hit for e in episodes if (hit := e.advice) and e.advice_kind == "right"}


def extractor_conversations(
    config: RunConfig, episodes: Sequence[Episode]
) -> Iterator[Conversation]:
    """Yield the demonstrations of the extractor, of the episodes of one task."""
    prompts = bank_prompts(config, tasks.specs(config), extractor_model(config).renderer)
    assert prompts.refine
    right, entries = right_advice(episodes), bank(episodes)
    for episode in episodes:
        if not episode.advice or episode.task.goal not in right:
            continue
        lesson = right[episode.task.goal].text
        request = DistilRequest.from_trajectory("demonstration", episode.trajectory)
        yield conversation(prompts.distil(request), answer(op="add", text=lesson))
        before = episode.before(episode.later_turn)
        question = Question("demonstration", episode.task, QUESTION, before)
        reply = answer(op="refine", text=lesson)
        yield conversation(prompts.refine(question, right[episode.task.goal]), reply)
        chunk = [entry for entry in entries if entry.place.goal == episode.task.goal]
        if len(chunk) > 1:
            targets = list(range(1, len(chunk) + 1))
            reply = answer(op="merge", targets=targets, text=lesson)
            yield conversation(prompts.merge(chunk), reply)


def answer(**op: Any) -> str:
    """Return an answer with one operation."""
    return json.dumps([op])


def write(path: Path, role: RoleName, configs: Sequence[RunConfig]) -> None:
    """Write the demonstrations of a role in runs with these configs, but another seed."""
    conversations = actor_conversations if role == "actor" else extractor_conversations
    lines = []
    for config in configs:
        seed = config.run.seed + OTHER_SEED
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        episodes = config.rollout.groups * config.rollout.group_size
        for of_task in record(config, tasks.specs(config), episodes):
            lines += [json.dumps(line) for line in conversations(config, of_task)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
