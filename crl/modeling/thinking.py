"""Formats of thinking in completions, and the start of the answer after it.

* Tags: `<think>…</think>`, then the answer. The chat templates of some models open the thinking at
  the end of the prompt, so their completions contain only `</think>`.
* Channels of the harmony format (gpt-oss): the answer is in the channel `final`, as in
  `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`.
"""

from __future__ import annotations

import re

THINK_START, THINK_END = "<think>", "</think>"

CHANNEL = "<|channel|>"
"""Control token of the harmony format before the name of a channel."""

FINAL_CHANNEL = f"{CHANNEL}final<|message|>"
"""Header of the answer in the harmony format."""

_ANSWER_HEADER = re.compile(
    rf"{re.escape(THINK_END)}|{re.escape(CHANNEL)}final\b[^\n]*?{re.escape('<|message|>')}"
)
_OPENED = re.compile(rf"{re.escape(THINK_START)}\s*\Z")


def opened_thinking(prompt: str) -> str:
    r"""Return the end of a prompt that opens the thinking, such as `<think>\n`; "" if it does not.

    The completion continues the thinking.
    """
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def answer_start(completion: str, *, thinking: bool = False) -> int | None:
    """Return the position at which the answer starts; None if the thinking did not end.

    `thinking`: True if the prompt opened the thinking.
    """
    headers = list(_ANSWER_HEADER.finditer(completion))
    if headers:
        return headers[-1].end()
    return None if thinking or THINK_START in completion or CHANNEL in completion else 0
