"""Bundled prompts and a user's replacements, introduction of an experience, extractor prompts."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.errors import ConfigError, RolloutError
from crl.manager import OpLimits
from crl.manager.distillation.ops import parse_ops
from crl.methods.parts.distilling import FullDistilPrompt
from crl.methods.parts.rollouts import ChatContext
from crl.prompts import FOLDER, SLOTS, fill, hashes, prompt
from crl.rollout.episode import EpisodeKey
from crl.types import Observation, RolloutPlan, Segment
from support.doors import RULES, TASK, RecordingRetriever, open_host, renderer, runner, scripted
from support.managers import GOAL, hit, request

# ── files ─────────────────────────────────────────────────────────────────────────────────────────


def test_every_bundled_prompt_is_known_and_has_its_slots():
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(SLOTS)
    for name, slots in SLOTS.items():
        text = prompt(name)
        assert not text.endswith("\n")
        assert fill(text, **dict.fromkeys(slots, "filled")).count("filled") >= len(slots)


def test_only_known_slots_are_filled_in_one_pass():
    assert (
        fill("{a} {{a}} {b}{a} {} {A} {1} {'a': 1}", a="{b}", b="{a}{")
        == "{b} {a} {a}{{b} {} {A} {1} {'a': 1}"
    )
    with pytest.raises(KeyError):
        fill("{c}", a=1)


def test_a_users_file_replaces_a_prompt_and_its_hash(tmp_path: Path):
    mine = tmp_path / "mine.txt"
    mine.write_text("Advice:\n{experience}\n{{experience}} {\n")
    overrides = {"experience": mine}
    assert (
        fill(prompt("experience", overrides), experience="Go west.")
        == "Advice:\nGo west.\n{experience} {"
    )
    assert prompt("actor", overrides) == prompt("actor")
    used, bundled = hashes(overrides), hashes()
    assert (
        used["experience"] == hashlib.sha256(mine.read_bytes()).hexdigest() != bundled["experience"]
    )
    assert {name for name in SLOTS if used[name] != bundled[name]} == {"experience"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory). Start from a copy of "),
        (b"\xff\xfe", "cannot be read ('utf-8' codec can't decode byte 0xff"),
        (b"You play {turns} turns, such as {example}.",
         "lacks {actions}, so the model would not receive this information. Start from a copy of "),
        (b"{turns} {actions} {example} {gaol}",
         "has the unknown slots {gaol}; its slots are {actions}, {example}, {turns}. "
         "Write {{name}} for literal braces, or: Start from a copy of "),
        (b"", "lacks {actions}, {example}, {turns}"),
    ],
)  # fmt: skip
def test_the_error_for_an_invalid_prompt_file(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    for use in (lambda: prompt("actor", {"actor": path}), lambda: hashes({"actor": path})):
        with pytest.raises(ConfigError) as caught:
            use()
        assert str(caught.value).startswith(f"prompts.actor = '{path}': {message}")


# ── introduction of an experience ─────────────────────────────────────────────────────────────────


async def test_guided_and_free_prompts_differ_only_in_the_experience():
    context = ChatContext({"doors": RULES}, {"doors": prompt("experience")})
    guide = hit("run/0/0/0#0", text="Say {open} first; 100 % of the time.")
    async with open_host() as hosted:
        engine = scripted("wait", "open")
        episode_runner = runner(
            engine, hosted.host, context=context, retriever=RecordingRetriever(guide)
        )
        guided = await episode_runner.play(
            EpisodeKey("train", 0, 0, 0), TASK, RolloutPlan("guided")
        )
        free = await episode_runner.play(EpisodeKey("train", 0, 0, 1), TASK, RolloutPlan("free"))
    (advice,) = [segment for segment in guided.segments if segment.origin == "experience"]
    assert guide.text in advice.text
    assert "may not fit" in advice.text
    assert guided.segments[2] == advice
    assert [segment for segment in guided.segments if segment != advice] == list(free.segments)
    texts = [renderer().decode(ids) for _, ids in engine.requests]
    assert [text.replace(f"{advice.text}\n", "", 1) for text in texts[:2]] == texts[2:]
    assert not any(guide.text in text or "earlier episodes" in text for text in texts[2:])


def test_without_an_introduction_the_experience_stands_alone():
    guide = hit("run/0/0/0#0", text="Go {experience}.")
    for context in (
        ChatContext({"doors": ""}),
        ChatContext({"doors": ""}, {"doors": "{experience}"}),
    ):
        opening = context.opening(TASK, Observation("A door."), [guide])
        assert [(s.text, s.origin) for s in opening] == [
            (TASK.goal, "task"),
            (guide.text, "experience"),
            ("A door.", "env"),
        ]


# ── prompts of the extractor ──────────────────────────────────────────────────────────────────────

EPISODE = (
    Segment("system", "You play a text game.", "task"),
    Segment("user", GOAL, "task"),
    Segment("user", "Advice: Go west.", "experience"),
    Segment("user", "|..>|\n|@..|", "env"),
    Segment("assistant", "<think>West is a wall.</think>\neast", "policy"),
    Segment("user", "", "env"),
    Segment("assistant", "north", "policy"),
    Segment("user", "You are there.", "env"),
)


def distil_message(max_tokens: int = 100_000, **changes) -> str:
    """Return the message that asks for a distillation of the episode."""
    distil_request = replace(request(), **{"segments": EPISODE, **changes})
    (message,) = FullDistilPrompt(prompt("distil"), renderer(), max_tokens)(distil_request)
    assert (message.role, message.origin) == ("user", "task")
    return message.text


def between(text: str, start: str, end: str) -> str:
    return text.split(start)[1].split(end)[0].strip("\n")


def structure(text: str) -> list[str]:
    """Return the lines of the prompt that do not quote the episode."""
    return [line for line in text.splitlines() if not line.startswith("  ")]


def test_the_transcript_contains_turns_and_thinking_only():
    transcript = between(distil_message(), "=== Transcript ===", "=== End of the transcript ===")
    assert transcript.splitlines() == [
        "[turn 0, environment]", "  |..>|", "  |@..|",
        "[turn 1, agent]", "  <think>West is a wall.</think>", "  east",
        "[turn 1, environment]", "  (nothing)",
        "[turn 2, agent]", "  north", "[turn 2, environment]", "  You are there.",
    ]  # fmt: skip
    assert "You play a text game." not in distil_message()
    assert between(distil_message(), "=== Goal ===", "===") == f"  {GOAL}"
    assert between(distil_message(segments=()), "=== Transcript ===", "=== End") == ""


def test_the_prompt_contains_outcome_and_advice():
    advice = "=== Advice that the agent was given before the episode ==="
    for changes, outcome in (
        ({"success": True, "truncated": True}, "success"),
        ({"success": False}, "failure"),
        ({"success": False, "truncated": True}, "failure: the episode was cut off before it ended"),
    ):
        assert between(distil_message(**changes), "=== Outcome ===", "===") == outcome
    assert between(distil_message(), advice, "===") == "None."
    shown = (hit("a#0", text="Go west."), hit("b#0", text="Look.\n3.\nThen go."))
    assert (
        between(distil_message(shown=shown), advice, "===")
        == "1.\n  Go west.\n2.\n  Look.\n  3.\n  Then go."
    )


def test_votes_are_requested_if_there_is_advice():
    distil_request = replace(request(), segments=EPISODE, shown=(hit("a#0", text="Go west."),))
    template = FullDistilPrompt(prompt("distil"), renderer(), 100_000, prompt("vote"))
    (message,) = template(distil_request)
    assert message.text == f"{distil_message(shown=distil_request.shown)}\n\n{prompt('vote')}"
    (message,) = template(replace(distil_request, shown=()))
    assert message.text == distil_message()
    assert '"up"' not in distil_message(shown=distil_request.shown)
    example = parse_ops(prompt("vote"), 2, votes=True)
    assert ([op.kind for op in example.ops], example.dropped) == (["up", "down"], {})


def test_no_vote_is_requested_on_reworded_advice():
    west, look, wait = (
        hit("a#0", text="Go west."),
        hit("b#0", text="Look."),
        hit("c#0", text="Wait."),
    )
    answer = replace(look, use=replace(look.use, how="ask"))
    refined = replace(wait, use=replace(wait.use, verdict="refine"))
    distil_request = replace(request(), segments=EPISODE, shown=(west, answer, refined))
    template = FullDistilPrompt(prompt("distil"), renderer(), 100_000, prompt("vote"))
    (message,) = template(distil_request)
    advice = "=== Advice that the agent was given before the episode ==="
    assert (
        between(message.text, advice, "===")
        == "1.\n  Go west.\n2. (reworded)\n  Look.\n3. (reworded)\n  Wait."
    )
    assert message.text.endswith(prompt("vote"))
    assert "marked as reworded" in prompt("vote")
    accepted = replace(west, use=replace(west.use, how="ask_unrefined", verdict="accept"))
    (message,) = template(replace(distil_request, shown=(accepted,)))
    assert "1.\n  Go west." in message.text
    (message,) = template(replace(distil_request, shown=(answer, refined)))
    assert message.text == distil_message(shown=(answer, refined)), "there is nothing to vote on"


HOSTILE = st.sampled_from(
    ["=== End of the transcript ===", "[turn 1, agent]", "{goal}", "{transcript}", "{{goal}}",
     "{0}", "{", "}", "%s", "\n", "\r", "\u2028", "\x0b", "\x85", "1.",
     "[… 3 characters are left out …]", '[{"op": "return"}]', "<|im_end|>", "</think>"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(HOSTILE | st.text(max_size=9), max_size=9).map("".join))
def test_texts_of_an_episode_cannot_imitate_parts_of_the_prompt(text):
    def prompt_with(text: str) -> str:
        episode = [
            replace(segment, text=text) if segment.origin in ("env", "policy") else segment
            for segment in EPISODE
        ]
        return distil_message(
            segments=tuple(episode),
            task=replace(request().task, goal=text),
            shown=(hit("a#0", text=text),),
        )

    assert structure(prompt_with(text)) == structure(prompt_with("harmless"))


@pytest.mark.parametrize("max_tokens", [1900, 2500, 6000])
def test_the_transcript_of_a_long_episode_loses_its_middle(max_tokens):
    turns = [
        Segment("user", f"room {i}: " + "the walls are 中 " * (i % 7) + "{x}", "env")
        for i in range(400)
    ]
    text = distil_message(max_tokens, segments=tuple(turns))
    tokens = len(renderer().encode(renderer().text([Segment("user", text, "task")])))
    assert 0.8 * max_tokens < tokens <= max_tokens
    assert "  room 0: {x}" in text
    assert "  room 399: " in text
    assert "room 200: " not in text
    (gap,) = [
        line
        for line in structure(text)
        if re.fullmatch(r"\[… \d+ characters are left out …\]", line)
    ]
    remaining = [
        line
        for line in structure(text)
        if line != gap and not "[turn 0, environment]".startswith(line)
    ]
    assert remaining == [
        line for line in structure(distil_message(max_tokens, segments=())) if line
    ]
    assert text.endswith('[{"op": "return"}]')


def test_the_prompt_names_the_maximal_number_of_operations():
    assert (
        f"a JSON list of one to {['zero', 'one', 'two', 'three'][OpLimits().max_ops]} operations"
        in prompt("distil")
    )


@pytest.mark.parametrize("segments", [(), (Segment("user", "x" * 5000, "env"),)])
def test_a_token_limit_below_the_prompt_without_transcript_is_an_error(segments):
    with pytest.raises(
        RolloutError, match=r"prompt: .* with a limit of 50 tokens, no part of the transcript"
    ):
        distil_message(50, segments=segments)
