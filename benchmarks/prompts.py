"""Replies of a model to every prompt of a run, before any training.

    python benchmarks/prompts.py --model smollm2 --out benchmarks/results/prompts.json

The scripted players of the environments play the first training episodes of each task. Each episode
then gives one prompt of every kind, as a run of the method complementary writes it, and the model
replies to it once, at the temperature of training:

* first turn: the actor acts after the first observation.
* later turn: the actor acts in the middle of the episode, after the replies of the scripted player.
* advice: the first turn of a guided episode.
* may ask: the same with the tool search_and_ask.
* distil: the extractor distils the episode. In half of the prompts, advice guided it.
* refine: the extractor answers a fixed question of the agent, asked at the later turn.
* merge: the extractor merges a chunk of a bank with the advice of all episodes.
* critic: the actor judges advice. It is told that it wins half of its episodes without advice.

Advice is that of the environment's advisor. It is right and wrong in turn. A task without advisor
has only the prompts without advice.

--out is written after each kind of prompts. The same command continues an interrupted run, and
other tasks and kinds are added to the file.

Metrics, as means over the replies of a kind:

* usable: share of replies that a run can use, with the 95 % interval of Wilson: a valid action in
  the situation (an action or a question for *may ask*), at least one valid operation, or a verdict;
* tokens of prompt and reply;
* cut off: share of replies that reached the limit of tokens;
* content: number of actions, operations, verdicts and defects per reply. The verdicts are counted
  separately for right and wrong advice.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import commit, processor, saved_rows, write_results
from prompt_episodes import Episode, bank, conversation_before, record

from crl.config import RunConfig, load
from crl.embedders import open_embedder
from crl.envs.base import EnvSpec
from crl.intervals import wilson_interval
from crl.manager import DistilRequest, Generation
from crl.manager.distillation.distil import Distiller
from crl.manager.distillation.extractor import Extractor
from crl.manager.distillation.merge import Chunker, Merger
from crl.manager.distillation.refine import Refiner
from crl.manager.keys import KeyEmbedder
from crl.manager.records import Distilled, Entry, Merged, Refined
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.tokens import ChatRenderer, Conversation
from crl.planning import tasks
from crl.planning.context import bank_prompts, critic_prompt
from crl.planning.gpu_plan import assigned_gpus
from crl.planning.methods import build_method
from crl.protocols import EnvironmentPool, Question
from crl.rollout.critic import read_critique
from crl.rollout.decoding import Decoding
from crl.rollout.waves import DirectSampler
from crl.run.models import actor_model, extractor_model, open_role_engine
from crl.seeds import generator
from crl.types import (
    Completion,
    Observation,
    Task,
)

GROUP = 4
"""Members of a group, which play the same task."""
QUESTION = "I do not know what to do next to reach the goal. What should I do?"
"""Question that the extractor answers."""
RATE = 0.5
"""Success rate without advice that the critic is told."""
KINDS = (
    "first turn", "later turn", "advice", "may ask", "distil", "refine", "merge", "critic",
)  # fmt: skip
"""Kinds of prompts."""
BATCH = 16
"""Replies that are sampled together. It limits the memory; `--set engine.max_batch` replaces it."""
EXAMPLES = 6
"""Replies of each kind and task in the raw results."""


@dataclass(frozen=True)
class Reply:
    """Reply of the model to one prompt."""

    task: str
    kind: str
    """Kind of the prompt."""
    prompt_tokens: int
    reply_tokens: int
    """Sampled tokens, with the stop token."""
    cut_off: bool
    """True if the reply reached the limit of tokens."""
    usable: bool
    content: tuple[str, ...]
    """Names of the actions, operations, verdicts and defects of the reply."""
    text: str


# ── replies ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Asker:
    """Client of actor and extractor: it writes prompts, samples replies and parses them."""

    config: RunConfig
    context: ChatContext
    decoding: Decoding
    """Decoding of the actor."""
    pool: EnvironmentPool
    distiller: Distiller
    refiner: Refiner
    merger: Merger
    extractor_renderer: ChatRenderer

    async def act(
        self, kind: str, episode: Episode, conversation: Conversation, turn: int,
        *, may_ask: bool = False,
    ) -> Reply:  # fmt: skip
        """Return the actor's reply after `turn` replies of the episode."""
        task, prompt = episode.task, conversation.prompt()
        completion = await self._complete(
            prompt, self.config.tasks[task.name].max_response_tokens, kind, episode
        )
        text = conversation.add_completion(completion)
        response = self.context.parse(task, text)
        if may_ask and response.query is not None:
            found = "question"
        else:
            valid = await self._is_valid(episode, turn, response.action)
            found = "action" if valid else None
        return self._actor_reply(kind, episode, prompt, completion, text, found)

    async def first_turn(self, episode: Episode) -> Reply:
        return await self.act("first turn", episode, self._recorded(episode, 0), 0)

    async def later_turn(self, episode: Episode) -> Reply:
        turn = episode.later_turn
        return await self.act("later turn", episode, self._recorded(episode, turn), turn)

    async def with_advice(self, episode: Episode) -> Reply:
        return await self.act("advice", episode, self._guided(episode, 0), 0)

    async def with_tool(self, episode: Episode) -> Reply:
        conversation = self._guided(episode, self.config.ask.questions)
        return await self.act("may ask", episode, conversation, 0, may_ask=True)

    async def distil(self, episode: Episode) -> Reply:
        """Return the distillation. The advice guided episodes 0 and 1 of every four episodes."""
        request = DistilRequest.from_trajectory("prompts", episode.trajectory)
        if episode.advice and episode.number % 4 < 2:
            request = replace(request, shown=(episode.advice,))
        distilled = await self.distiller.distil(request)
        return self._extractor_reply("distil", episode.task, distilled, ops(distilled))

    async def refine(self, episode: Episode) -> Reply:
        assert episode.advice
        segments = episode.before(episode.later_turn)
        question = Question(f"prompts/{episode.number}", episode.task, QUESTION, segments)
        refined = await self.refiner.refine(question, episode.advice)
        return self._extractor_reply("refine", episode.task, refined, ops(refined))

    async def merge(self, episode: Episode, chunk: Sequence[Entry]) -> Reply:
        merged = await self.merger.merge(f"prompts/{episode.task.name}/{episode.number}", chunk)
        return self._extractor_reply("merge", episode.task, merged, ops(merged))

    async def criticise(self, episode: Episode) -> Reply:
        """Return the actor's verdict, which is read as by `crl.rollout.critic.Critic`."""
        assert episode.advice
        config, renderer = self.config, self.decoding.renderer
        write = critic_prompt(config.profile("actor"), config.prompts.files)
        rendered = renderer.text(write(episode.task, episode.advice, RATE))
        limit = config.critic.max_response_tokens
        limit = limit or config.tasks[episode.task.name].max_response_tokens
        prompt = renderer.encode(rendered)
        completion = await self._complete(prompt, limit, "critic", episode)
        critique = read_critique(completion, renderer, rendered)
        found = None if critique.malformed else f"{critique.verdict} {episode.advice_kind}"
        text = answer_text(renderer, completion)
        return self._actor_reply("critic", episode, prompt, completion, text, found)

    async def _complete(
        self, prompt: Sequence[int], limit: int, kind: str, episode: Episode
    ) -> Completion:
        name = f"prompts/{kind}/{episode.task.name}/{episode.number}"
        completion = await self.decoding.complete(
            prompt, limit, session=name, draw=("prompts", name)
        )
        assert completion, "the prompt fills actor.max_context_tokens"
        return completion

    def _recorded(self, episode: Episode, turn: int) -> Conversation:
        window = self.config.tasks[episode.task.name].window
        return conversation_before(episode, turn, self.decoding.renderer, window)

    def _guided(self, episode: Episode, questions: int) -> Conversation:
        observation = next(s.text for s in episode.trajectory.segments if s.origin == "env")
        advice = [episode.advice] if episode.advice else []
        opening = self.context.opening(
            episode.task, Observation(observation), advice, max_questions=questions
        )
        conversation = Conversation(self.decoding.renderer)
        conversation.add(opening)
        return conversation

    async def _is_valid(self, episode: Episode, turn: int, action: str) -> bool:
        """Return whether the game accepts the action after `turn` recorded replies."""
        game = await self.pool.acquire(episode.task)
        try:
            await game.reset(episode.task)
            for answer in episode.answers[:turn]:
                await game.step(self.context.parse(episode.task, answer).action)
            return (await game.step(action)).valid
        finally:
            await self.pool.release(game)

    def _actor_reply(
        self, kind: str, episode: Episode, prompt: Sequence[int], completion: Completion,
        text: str, found: str | None,
    ) -> Reply:  # fmt: skip
        """Return the reply. `found` is the decision in it, None without a usable one."""
        cut_off = completion.finish == "length"
        content = (found or ("no verdict" if kind == "critic" else "no valid action"),)
        return Reply(
            episode.task.name, kind, len(prompt), len(completion.ids), cut_off, found is not None,
            content, text,
        )  # fmt: skip

    def _extractor_reply(
        self, kind: str, task: Task, answer: Distilled | Refined | Merged, content: Sequence[str]
    ) -> Reply:
        generation: Generation = answer.generation
        completion = generation.completion
        cut_off = completion.finish == "length"
        text = answer_text(self.extractor_renderer, completion)
        return Reply(
            task.name, kind, len(generation.prompt), len(completion.ids), cut_off,
            not answer.malformed, tuple(content), text,
        )  # fmt: skip


def answer_text(renderer: ChatRenderer, completion: Completion) -> str:
    """Return the text of a completion, without its stop token."""
    cut_off = completion.finish == "length"
    return renderer.decode(completion.ids if cut_off else completion.ids[:-1])


def ops(answer: Distilled | Refined | Merged) -> list[str]:
    """Return the names of the operations in an answer, and the reasons of those refused."""
    if isinstance(answer, Distilled):
        found = ["update" if write.targets else "add" for write in answer.writes]
        found += ["return"] * answer.returns
    elif isinstance(answer, Merged):
        found = ["merge"] * len(answer.merges) + ["discard"] * len(answer.discards)
        found = found or ([] if answer.malformed else ["keep"])
    else:
        found = [] if answer.malformed else ["refine" if answer.text else "return"]
    return found + [reason for reason, n in answer.dropped.items() for _ in range(n)]


async def open_asker(
    config: RunConfig, specs: Mapping[str, EnvSpec], stack: AsyncExitStack
) -> Asker:
    """Open the engines of actor and extractor, and the environments. `stack` closes them."""
    gpus = assigned_gpus(config, learners=False)
    context = build_method(config, specs).context
    assert isinstance(context, ChatContext)
    actor, extractor = actor_model(config), extractor_model(config)
    sampler = DirectSampler(await open_role_engine(config, gpus, actor, stack))
    section = config.actor
    decoding = Decoding(
        sampler, actor.renderer, section.max_context_tokens, section.temperature, config.run.seed,
        section.top_p, section.top_k,
    )  # fmt: skip
    client = Extractor(
        await open_role_engine(config, gpus, extractor, stack), extractor.renderer,
        config.extractor, seed=config.run.seed, threaded=False,
    )  # fmt: skip
    embedder = await stack.enter_async_context(open_embedder(config.embedder))
    keys = KeyEmbedder(embedder, config.bank.key_text_weight)
    prompts = bank_prompts(config, specs, extractor.renderer)
    assert prompts.refine
    return Asker(
        config, context, decoding, tasks.environment_pool(config, specs, stack),
        Distiller(client, keys, prompts.distil, votes=False), Refiner(client, prompts.refine),
        Merger(client, keys, prompts.merge), extractor.renderer,
    )  # fmt: skip


async def ask_all(
    config: RunConfig, recorded: Sequence[Sequence[Episode]], kinds: Sequence[str],
    done: Collection[tuple[str, str]], finished: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Give the prompts of all episodes to the model, of these kinds.

    `done`: tasks and kinds that are left out. `finished` is called with the row of each other one.
    """
    async with AsyncExitStack() as stack:
        asker = await open_asker(config, tasks.specs(config), stack)
        for episodes in recorded:
            available, task = askers(config, asker, episodes), episodes[0].task.name
            for kind in kinds:
                if kind in available and (task, kind) not in done:
                    finished(row(await asyncio.gather(*map(available[kind], episodes))))
                    print(f"{task}, {kind}: done", file=sys.stderr)


def askers(
    config: RunConfig, asker: Asker, episodes: Sequence[Episode]
) -> Mapping[str, Callable[[Episode], Awaitable[Reply]]]:
    """Return the functions that give an episode's prompt to the model, by kind."""
    without_advice = {
        "first turn": asker.first_turn,
        "later turn": asker.later_turn,
        "distil": asker.distil,
    }
    entries = bank(episodes)
    if not entries:
        return without_advice
    costs = {entry.uid: asker.merger.cost(entry) for entry in entries}

    async def merge(episode: Episode) -> Reply:
        draws = generator(0, "prompts/bank", episode.number)
        order = draws.sample(entries, len(entries))
        chunker = Chunker(order, config.extractor.merge_tokens, lambda entry: costs[entry.uid])
        return await asker.merge(episode, chunker.next(()))

    return {
        **without_advice,
        "advice": asker.with_advice,
        "may ask": asker.with_tool,
        "refine": asker.refine,
        "merge": merge,
        "critic": asker.criticise,
    }


# ── output ────────────────────────────────────────────────────────────────────────────────────────


def row(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the metrics of replies of one task and kind."""
    usable = fmean(reply.usable for reply in replies)
    content = Counter(itertools.chain.from_iterable(reply.content for reply in replies))
    return {
        "task": replies[0].task,
        "kind": replies[0].kind,
        "processor": processor(),
        "commit": commit(),
        "replies": len(replies),
        "usable": usable,
        "usable_interval": wilson_interval(usable, len(replies)),
        "prompt_tokens": fmean(reply.prompt_tokens for reply in replies),
        "reply_tokens": fmean(reply.reply_tokens for reply in replies),
        "cut_off": fmean(reply.cut_off for reply in replies),
        "content": {name: n / len(replies) for name, n in content.most_common()},
        "examples": [
            {"usable": reply.usable, "content": reply.content, "text": reply.text}
            for reply in replies[:EXAMPLES]
        ],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| task | prompt | replies | usable | prompt tokens | reply tokens | cut off | content |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["usable_interval"]
        content = ", ".join(f"{name} {mean:.2f}" for name, mean in row["content"].items())
        lines.append(
            f"| {row['task']} | {row['kind']} | {row['replies']} "
            f"| {row['usable']:.2f} [{low:.2f}, {high:.2f}] | {row['prompt_tokens']:.0f} "
            f"| {row['reply_tokens']:.0f} | {row['cut_off']:.2f} | {content} |"
        )
    return "\n".join(lines)


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """Return the config of a run with the model, in which all kinds of prompts occur."""
    names = arguments.tasks
    groups = -(-arguments.episodes // GROUP) * len(names)
    sets = [
        "ask.enabled=true", "critic.enabled=true", "embedder.model=hash", "run.steps=1",
        f"engine.max_batch={BATCH}",
        f"rollout.groups={groups}", f"rollout.group_size={GROUP}",
    ]  # fmt: skip
    if arguments.model:
        sets += [f"{role}.model={arguments.model}" for role in ("actor", "extractor")]
    if arguments.tokens:
        keys = ("extractor", *(f"tasks.{name}" for name in names))
        sets += [f"{key}.max_response_tokens={arguments.tokens}" for key in keys]
    return load(names, sets=[*sets, *arguments.set])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="model of actor and extractor")
    parser.add_argument("--tasks", nargs="+", default=["room", "webshop"])
    parser.add_argument("--episodes", type=int, default=200, help="episodes of each task")
    parser.add_argument("--prompts", nargs="+", choices=KINDS, default=KINDS, help="kinds")
    parser.add_argument("--tokens", type=int, help="limit of a reply; default: that of the task")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument("--quick", action="store_true", help="4 episodes, the bundled tiny models")
    parser.add_argument("--out", type=Path, help="JSON file for the raw numbers")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.episodes = None, 4
    names = ("model", "episodes", "tokens", "set")
    settings = {name: getattr(arguments, name) for name in names}
    rows = saved_rows(arguments.out, settings)

    def finished(row: dict[str, Any]) -> None:
        rows.append(row)
        if arguments.out:
            write_results(arguments.out, {"settings": settings, "rows": rows})

    config = config_of(arguments)
    recorded = record(config, tasks.specs(config), arguments.episodes)
    done = {(row["task"], row["kind"]) for row in rows}
    asyncio.run(ask_all(config, recorded, arguments.prompts, done, finished))
    print(table(rows))


if __name__ == "__main__":
    main()
