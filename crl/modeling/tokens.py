"""Conversion of segments to tokens with the model's chat template.

Sampled tokens are recorded as they were sampled and are never tokenised again.

`ChatRenderer` wraps a tokenizer. `Conversation` represents one episode: it converts segments to
prompts and records every token once, in `TokenTrace`s. The next prompt starts a new trace in two
cases: the template rewrites an earlier turn (thinking models drop old thoughts), or the context
policy is a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from crl.modeling.thinking import (
    CHANNEL,
    FINAL_CHANNEL,
    THINK_END,
    THINK_START,
    answer_start,
    opened_thinking,
)
from crl.types import SAMPLED_ORIGINS, Completion, Segment, TokenTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PINNED_ORIGINS = frozenset({"task", "experience", "tool_spec"})
"""Origins of the opening segments that a window never drops."""

LONG_PROMPT = 4_096
"""Number of characters that are tokenised in about 2 ms."""

TEMPLATE_DATE = datetime(2025, 1, 1)
"""Current date for chat templates that print it (Llama 3.2, gpt-oss).

It is fixed, because the prompts of a run must not depend on the day.
"""

PROBE = (
    Segment("system", "You play games.", "task"),
    Segment("user", "Go north?", "env"),
    Segment("assistant", "Stay here.", "policy"),
    Segment("user", "Then south?", "env"),
)
"""Conversation that every chat template must render."""


class ChatRenderer:
    """Renderer of segments with a tokenizer's chat template.

    Control tokens in text that the policy did not write are escaped, for example `<|im_end|>` in an
    observation. Their text stays readable, but it is no longer tokenised as a control token.

    Families differ in these points, which the renderer finds out once, from probes:

    * System messages: if the template refuses or omits them, they become part of the first message
      of the user.
    * Thinking: if the template opens it at the end of prompts, `thinking_start` is the text that
      does so.
    * Harmony (gpt-oss): the template accepts only the final channel of earlier answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        """Create a renderer. The first of `stop_ids` ends the answers of demonstrators."""
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        # `all_special_tokens` only lists tokens with a role (eos, pad, …). It does not list Llama's
        # turn headers.
        added = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self._control = tuple(
            sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        )
        system, user, *_ = PROBE
        self._accepts_system = system.text in self._probe(system, user)
        self._harmony = CHANNEL in self._control
        self.thinking_start = opened_thinking(self._probe(user))
        r"""Text such as `<think>\n` that ends every prompt; empty if prompts open no thinking."""

    def messages(self, segments: Iterable[Segment]) -> list[dict[str, str]]:
        """Return chat messages. Neighbouring segments of the same role are joined by a newline."""
        messages: list[dict[str, str]] = []
        for segment in segments:
            text = (
                self._sampled_content(segment.text)
                if segment.origin in SAMPLED_ORIGINS
                else self._escape_control_tokens(segment.text)
            )
            role = segment.role
            if role == "system" and not self._accepts_system:
                role, text = "user", text + "\n"  # a blank line after the instructions
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += "\n" + text
            else:
                messages.append({"role": role, "content": text})
        return messages

    def text(self, segments: Iterable[Segment]) -> str:
        """Return the prompt as text, ending where the assistant's turn begins."""
        return self._render(self.messages(segments))

    def control_token(self, text: str) -> str | None:
        """Return a control token that `text` contains, or None."""
        return next((token for token in self._control if token in text), None)

    def end_of_turn(self) -> str | None:
        """Return the control token with which the template ends the last answer of a conversation.

        Return None if there is none. Harmony ends earlier answers with another token.
        """
        _, user, answer, _ = PROBE
        end = self._probe(user, answer, prompt=False).rpartition(answer.text)[2].lstrip()
        return next((token for token in self._control if end.startswith(token)), None)

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a demonstrator's answer, with the stop token.

        If prompts open the thinking, the answer continues it, with an empty thought if it has none.
        In the harmony format, an answer without a channel is in the final channel.
        """
        if self._harmony and CHANNEL not in text:
            text = FINAL_CHANNEL + text
        if self.thinking_start and THINK_END not in text:
            text = f"\n{THINK_END}\n\n{text}"
        elif self.thinking_start:
            text = text.removeprefix(self.thinking_start).removeprefix(THINK_START)
        return (*self.encode(text), self.stop_ids[0])

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`. No special tokens are added."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _render(self, messages: Sequence[dict[str, str]], *, prompt: bool = True) -> str:
        """Return rendered messages. `prompt`: end where the next answer of the assistant begins."""
        rendered = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt,
            strftime_now=TEMPLATE_DATE.strftime,
        )  # fmt: skip
        assert isinstance(rendered, str)
        return rendered

    def _probe(self, *segments: Segment, prompt: bool = True) -> str:
        """Return segments as rendered messages; an empty text if the template refuses them."""
        messages = [{"role": segment.role, "content": segment.text} for segment in segments]
        try:
            return self._render(messages, prompt=prompt)
        except Exception:  # a template raises errors of many types
            return ""

    def _sampled_content(self, text: str) -> str:
        """Return the content of a message that the policy wrote.

        The harmony format has a new prompt for every answer, and only the final channel of the
        earlier ones. Its template refuses channels within the content.
        """
        if not self._harmony:
            return text
        start = answer_start(text)
        return "" if start is None else self._escape_control_tokens(text[start:])

    def _escape_control_tokens(self, text: str) -> str:
        """Return `text` with a space after the first character of every control token."""
        for token in self._control:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


class Conversation:
    """Conversation of one episode.

    Call `add` with new segments, `prompt` for the next prompt, and `add_completion` with the
    completion.
    """

    def __init__(self, renderer: ChatRenderer, window: int | None = None) -> None:
        """Start an empty conversation.

        Without `window`, the whole episode is one sequence. With a window of n, each prompt is
        rendered anew from the last n turns.
        """
        self._renderer = renderer
        self._window = window
        self._turns: list[list[Segment]] = [[]]
        self._finished: list[TokenTrace] = []
        self._trace = TokenTrace()
        self._text = ""  # text of the current trace

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments so far."""
        return tuple(segment for turn in self._turns for segment in turn)

    @property
    def traces(self) -> tuple[TokenTrace, ...]:
        """Training samples so far. Each one ends with its last sampled token.

        A trace without sampled tokens is not a sample.
        """
        samples = (trace.until_last_sampled() for trace in [*self._finished, self._trace])
        return tuple(sample for sample in samples if sample.ids)

    @property
    def is_long(self) -> bool:
        """True if the next prompt takes milliseconds: call `prompt` in a thread then.

        The template renders all of the conversation, and the new segments are tokenised, which
        takes about ten times as long per character.
        """
        new = self._turns if self._window else self._turns[-1:]
        characters = sum(len(segment.text) for turn in new for segment in turn)
        return characters + len(self._text) // 10 > LONG_PROMPT

    def add(self, segments: Iterable[Segment]) -> None:
        """Add segments that precede the agent's next completion."""
        self._turns[-1].extend(segments)

    def prompt(self) -> tuple[int, ...]:
        """Return the token ids of the next prompt and record its new tokens as context."""
        text = self._renderer.text(self._prompt_segments())
        if self._window is None and text.startswith(self._text):
            self._trace = self._trace.with_context(self._renderer.encode(text[len(self._text) :]))
        else:  # a window, or the template rewrote an earlier turn
            self._finished.append(self._trace)
            self._trace = TokenTrace().with_context(self._renderer.encode(text))
        self._text = text
        return self._trace.ids

    def add_completion(self, completion: Completion, *, trained: bool = True) -> str:
        """Record a completion and return its text without the stop token.

        If the prompt opened the thinking, the text begins with this opening. If `trained` is false,
        the completion is recorded as context and is not trained.
        """
        self._trace = (
            self._trace.with_sampled(completion)
            if trained
            else self._trace.with_context(completion.ids)
        )
        stopped = completion.finish == "stop"
        text = self._renderer.decode(completion.ids[:-1] if stopped else completion.ids)
        self._text += text + (self._renderer.decode(completion.ids[-1:]) if stopped else "")
        text = self._renderer.thinking_start + text
        self._turns[-1].append(Segment("assistant", text, "policy"))
        self._turns.append([])
        return text

    def mark_tool_call(self) -> None:
        """Mark the last completion as a tool call. The turn continues."""
        self._turns.pop()
        call = self._turns[-1].pop()
        self._turns[-1].append(replace(call, origin="tool_call"))

    def _prompt_segments(self) -> list[Segment]:
        """Return the segments of the next prompt."""
        if self._window is None or len(self._turns) <= self._window:
            return list(self.segments)
        pinned = [segment for segment in self._turns[0] if segment.origin in PINNED_ORIGINS]
        return pinned + [segment for turn in self._turns[-self._window :] for segment in turn]
