"""From segments to tokens. The model's own chat template renders; what the engine sampled is never tokenised again.

`ChatRenderer` wraps a tokenizer. `Conversation` is one episode: it turns segments into prompts and records every token
once, in `TokenTrace`s. Where the template would rewrite an earlier turn (thinking models drop old thoughts), or where the
context policy is a window, the next prompt starts a new trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from crl.types import Completion, Segment, TokenTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEAD_ORIGINS = frozenset({"task", "experience", "tool_spec"})
"""Opening segments that a window never drops."""

SAMPLED_ORIGINS = frozenset({"policy", "tool_call"})
"""What the policy wrote itself."""


class ChatRenderer:
    """Renders segments with a tokenizer's chat template.

    Control tokens in text that the policy did not write (`<|im_end|>` in an observation, say) are defused: they stay
    readable and are no longer tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        # `all_special_tokens` has only those that a role was given (eos, pad, …); Llama's turn headers are not among them.
        added = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self._control = tuple(
            sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        )

    def messages(self, segments: Iterable[Segment]) -> list[dict[str, str]]:
        """Chat messages: neighbouring segments of one role are joined by a newline."""
        messages: list[dict[str, str]] = []
        for segment in segments:
            text = (
                segment.text if segment.origin in SAMPLED_ORIGINS else self._defused(segment.text)
            )
            if messages and messages[-1]["role"] == segment.role:
                messages[-1]["content"] += "\n" + text
            else:
                messages.append({"role": segment.role, "content": text})
        return messages

    def text(self, segments: Iterable[Segment]) -> str:
        """The prompt as text, ending where the assistant is to speak."""
        rendered = self.tokenizer.apply_chat_template(
            self.messages(segments), tokenize=False, add_generation_prompt=True
        )
        assert isinstance(rendered, str)
        return rendered

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _defused(self, text: str) -> str:
        for token in self._control:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


class Conversation:
    """One episode's conversation: give it segments, take prompts, tell it what was sampled.

    `window`: None keeps the whole episode in one sequence; n renders each turn anew with the last n turns.
    """

    def __init__(self, renderer: ChatRenderer, window: int | None = None) -> None:
        self._renderer = renderer
        self._window = window
        self._turns: list[list[Segment]] = [[]]
        self._finished: list[TokenTrace] = []
        self._trace = TokenTrace()
        self._text = ""  # what the current trace says

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for turn in self._turns for segment in turn)

    @property
    def traces(self) -> tuple[TokenTrace, ...]:
        """The training samples so far, each up to its last sampled token; a prompt that nothing was sampled from is no sample."""
        samples = (trace.until_last_sampled() for trace in [*self._finished, self._trace])
        return tuple(sample for sample in samples if sample.ids)

    def add(self, segments: Iterable[Segment]) -> None:
        """What the agent is told before it speaks next."""
        self._turns[-1].extend(segments)

    def prompt(self) -> tuple[int, ...]:
        """The token ids to sample from."""
        text = self._renderer.text(self._visible())
        if self._window is None and text.startswith(self._text):
            self._trace = self._trace.with_context(self._renderer.encode(text[len(self._text) :]))
        else:  # a window, or the template rewrote an earlier turn
            self._finished.append(self._trace)
            self._trace = TokenTrace().with_context(self._renderer.encode(text))
        self._text = text
        return self._trace.ids

    def sampled(self, completion: Completion, *, trained: bool = True) -> str:
        """Records what the engine sampled; returns its text without the stop token. trained = False: it is nobody's sample."""
        self._trace = (
            self._trace.with_sampled(completion)
            if trained
            else self._trace.with_context(completion.ids)
        )
        stopped = completion.finish == "stop"
        text = self._renderer.decode(completion.ids[:-1] if stopped else completion.ids)
        self._text += text + (self._renderer.decode(completion.ids[-1:]) if stopped else "")
        self._turns[-1].append(Segment("assistant", text, "policy"))
        self._turns.append([])
        return text

    def asked(self) -> None:
        """What was sampled last is a call of the tool: the turn goes on."""
        self._turns.pop()
        call = self._turns[-1].pop()
        self._turns[-1].append(replace(call, origin="tool_call"))

    def _visible(self) -> list[Segment]:
        if self._window is None or len(self._turns) <= self._window:
            return list(self.segments)
        head = [segment for segment in self._turns[0] if segment.origin in HEAD_ORIGINS]
        return head + [segment for turn in self._turns[-self._window :] for segment in turn]
