"""Prompt texts for the models of a run. Needs no torch.

A person in `crl play` reads the same texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from crl.config.models import Profile
from crl.config.schema import RunConfig, TaskConfig
from crl.envs.base import EnvSpec
from crl.manager import MergePromptWriter, Prompts
from crl.manager.distillation.distil import NoteReader
from crl.manager.failure_notes import failure_modes, read_answer
from crl.manager.keys import STATE_KEYS, StateKey
from crl.methods.parts.asking import (
    COMPACT_TOOL,
    CompactRefinePrompt,
    FullRefinePrompt,
    full_tool,
)
from crl.methods.parts.distilling import CompactDistilPrompt, FullDistilPrompt, turns_text
from crl.methods.parts.judging import CompactCriticPrompt, FullCriticPrompt
from crl.methods.parts.merging import CompactMergePrompt, FullMergePrompt
from crl.methods.parts.records import compact_record, full_record
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.tokens import ChatRenderer
from crl.prompts import NO_OVERRIDES, SLOTS, Overrides, fill, prompt
from crl.rollout.critic import CriticPromptWriter


def chat_context(
    tasks: Mapping[str, TaskConfig], specs: Mapping[str, EnvSpec],
    overrides: Overrides = NO_OVERRIDES, *,
    can_ask: bool = False, retrieve_by_goal: bool = False,
) -> ChatContext:  # fmt: skip
    """Return the context provider for `tasks`, according to each task's rendering.

    * `overrides`: prompt files that replace bundled prompts
    * `can_ask`: guided agents may ask questions (search_and_ask)
    * `retrieve_by_goal`: experiences are retrieved by their goal
    """
    full = [name for name, task in tasks.items() if task.rendering == "full"]
    tools = {
        name: full_tool(prompt("ask", overrides)) if name in full else COMPACT_TOOL
        for name in tasks
    }
    return ChatContext(
        {name: _instructions(task, specs[name], overrides) for name, task in tasks.items()},
        introductions=dict.fromkeys(full, prompt("experience", overrides)),
        tools=tools if can_ask else {},
        observation_in_query=frozenset(
            name for name, spec in specs.items() if spec.tasks.query_with_observation
        ),
        retrieve_by_goal=retrieve_by_goal,
        records={name: full_record if name in full else compact_record for name in tasks},
    )


def agent_prompts(config: RunConfig, specs: Mapping[str, EnvSpec]) -> frozenset[str]:
    """Return the names of the prompts that agents read, without the method's own prompts.

    Tiny models read no prompt files.
    """
    full = [name for name, task in config.tasks.items() if task.rendering == "full"]
    read = {_instructions_name(specs[name]) for name in full}
    if full and config.guides:
        read.add("experience")
    if full and config.ask.enabled and config.with_extractor:
        read.add("ask")
    if config.critic.enabled and config.profile("actor") == "full":
        read.add("critic")
    return frozenset(read)


def merge_prompt(profile: Profile, overrides: Overrides = NO_OVERRIDES) -> MergePromptWriter:
    """Return the writer of the extractor's merge prompts, for an extractor of this profile."""
    if profile == "compact":
        return CompactMergePrompt()
    return FullMergePrompt(prompt("merge", overrides))


def critic_prompt(profile: Profile, overrides: Overrides = NO_OVERRIDES) -> CriticPromptWriter:
    """Return the writer of the prompts with which an actor of this profile judges experience."""
    if profile == "compact":
        return CompactCriticPrompt()
    return FullCriticPrompt(prompt("critic", overrides))


def bank_prompts(
    config: RunConfig, specs: Mapping[str, EnvSpec], renderer: ChatRenderer
) -> Prompts:
    """Return the prompts for the model that writes the bank, for its profile.

    A compact model reads digests (whole texts if the environment has no digest). A full model reads
    whole episodes.
    """
    extractor, overrides = config.extractor, config.prompts.files
    profile, notes = config.profile(config.writer), config.spec.notes
    about_episode = notes.prompt if notes else "distil"
    failures = about_episode == "failure"
    if profile == "compact":
        digests = {name: spec.curriculum.digest or turns_text for name, spec in specs.items()}
        distil, refine = CompactDistilPrompt(digests), CompactRefinePrompt(digests)
    else:
        context = getattr(config, config.writer).max_context_tokens
        tokens = context - extractor.max_response_tokens
        vote = prompt("vote", overrides) if config.bank.evict_votes is not None else None
        modes = {name: failure_modes(spec.name) for name, spec in specs.items()}
        slots = {name: {"modes": "\n".join(f"- {m}" for m in modes[name])} for name in modes}
        distil = FullDistilPrompt(
            prompt(about_episode, overrides), renderer, tokens, vote, slots if failures else {}
        )
        refine = FullRefinePrompt(prompt("refine", overrides), renderer, tokens)
    return Prompts(
        distil,
        merge_prompt(profile, overrides),
        refine if config.ask.enabled else None,
        notes=notes is not None and profile == "full",
        state=_state_key(config),
        read_note=_read_failure(specs) if failures else None,
        guidance="experiences" in SLOTS[about_episode],
    )


def _state_key(config: RunConfig) -> StateKey | None:
    """Return the state by which the notes of the method are found."""
    notes = config.spec.notes
    return STATE_KEYS[notes.key(config.method_settings)] if notes and notes.key else None


def _read_failure(specs: Mapping[str, EnvSpec]) -> NoteReader:
    """Return the reader of notes on failed episodes, with the failure modes of their tasks."""
    return lambda request, answer: read_answer(answer, failure_modes(specs[request.task.name].name))


def _instructions_name(spec: EnvSpec) -> str:
    """Return the name of the prompt with the instructions of an environment's agents."""
    return "actor_tags" if spec.actions.tagged else "actor"


def _instructions(task: TaskConfig, spec: EnvSpec, overrides: Overrides) -> str:
    """Return the system prompt.

    It is empty in the compact rendering: tiny models were trained on the game's texts only.
    """
    if task.rendering == "compact":
        return ""
    choices = spec.actions.choices
    return fill(
        prompt(_instructions_name(spec), overrides),
        turns=task.max_turns,
        actions=spec.actions.description or ", ".join(choices),
        example=spec.actions.example or next(iter(choices), "your action"),
    )
