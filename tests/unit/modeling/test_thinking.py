"""Start of the answer after the thinking."""

from __future__ import annotations

import pytest

from crl.modeling.thinking import answer_start, opened_thinking

HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("go", "go"),
        ("", ""),
        ("<think>hm</think>go", "go"),
        ("hm</think>go", "go"),
        ("<think>a</think>b<think>c</think>go", "go"),
        ("<think>hm", None),
        (f"{HARMONY}<|channel|>final<|message|>go", "go"),
        ("<|channel|>final<|message|>go", "go"),
        (f"{HARMONY}<|channel|>final <|constrain|>json<|message|>[]", "[]"),
        (HARMONY, None),
        ("<|channel|>commentary to=functions.f<|message|>{}", None),
    ],
)
def test_the_answer_is_the_text_after_the_thinking(completion: str, answer: str | None) -> None:
    start = answer_start(completion)
    assert (None if start is None else completion[start:]) == answer


def test_thinking_that_the_prompt_opened_must_end() -> None:
    assert answer_start("perhaps go", thinking=True) is None
    assert answer_start("hm</think>go", thinking=True) == len("hm</think>")


def test_a_prompt_opens_the_thinking_at_its_end() -> None:
    assert opened_thinking("…<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert opened_thinking("<think>\n\n</think>\n\n") == ""
    assert opened_thinking("Write <think> first.<|im_start|>assistant\n") == ""
