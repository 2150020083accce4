"""Parsing of an extractor's answer: text around the JSON, dropped operations, token spans."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.manager.distillation import ops
from crl.manager.distillation.ops import OpLimits, parse_merge, parse_note, parse_ops, token_spans
from support.doors import renderer

ADD = '{"op": "add", "text": "Go west."}'
UPDATE = '{"op": "update", "target": 2, "text": "Go south."}'


def kinds(completion: str, shown: int = 2, **options) -> list[str]:
    return [op.kind for op in parse_ops(completion, shown, **options).ops]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (f"[{ADD}, {UPDATE}]", ["add", "update"]),
        (ADD, ["add"]),
        (f"{ADD}\n{UPDATE}", ["add", "update"]),
        (f'{{"operations": [{ADD}, {{"op": "return"}}]}}', ["add", "return"]),
        (f"Here is what I learned:\n```json\n[{ADD}]\n```\nI hope this helps!", ["add"]),
        (f"<think>Maybe {UPDATE}? No.</think>\n[{ADD}]", ["add"]),
        (f"Maybe {UPDATE}? No.\n</think>\n\n[{ADD}]", ["add"]),
        ("[]", ["return"]),
        ("<think>Nothing.</think>```json\n[ ]\n```", ["return"]),
        ('[{"op": "update", "target": "1", "text": "x"}]', ["update"]),
        ('{"op": "add", "text": "say {\\"op\\": \\"return\\"} and {x}"}', ["add"]),
        (f"The set {{a, b}} holds. {ADD}", ["add"]),
        ('{"op": "add", "text": "Go\nwest.\t"}', ["add"]),
    ],
)
def test_ops_are_found_where_models_write_them(completion, expected):
    parsed = parse_ops(completion, 2)
    assert [op.kind for op in parsed.ops] == expected
    assert parsed.dropped == {}
    assert not parsed.malformed


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("I would add that west is good.", "no op in the answer"),
        ("", "no op in the answer"),
        (f"<think>Let me see. {ADD}", "the thinking did not end"),
        ('[{"op": "add", "text": "Go we', "not JSON"),
        ("[{'op': 'add', 'text': 'Go west.'}]", "not JSON"),
        ('[{"op": "delete", "target": 1}]', "unknown op"),
        ('[{"op": ["add"], "text": "x"}]', "unknown op"),
        ('[{"op": "add"}]', "no text"),
        ('[{"op": "add", "text": 5}]', "no text"),
        ('[{"op": "add", "text": "\\ud800"}]', "no text"),
        ('[{"op": "add", "text": "  "}]', "empty text"),
        ('[{"op": "add", "text": "' + "x" * 41 + '"}]', "text too long"),
        ('[{"op": "update", "text": "x"}]', "no target"),
        ('[{"op": "update", "target": true, "text": "x"}]', "no target"),
        ('[{"op": "update", "target": 1.0, "text": "x"}]', "no target"),
        ('[{"op": "update", "target": 0, "text": "x"}]', "target out of range"),
        ('[{"op": "update", "target": 3, "text": "x"}]', "target out of range"),
    ],
)
def test_a_bad_op_is_dropped_with_its_reason(completion, reason):
    parsed = parse_ops(completion, 2, limits=OpLimits(max_chars=40))
    assert parsed.malformed
    assert parsed.dropped == {reason: 1}


UP, DOWN = '{"op": "up", "target": 1}', '{"op": "down", "target": 2}'


def test_votes_are_ops_if_voting_is_on():
    parsed = parse_ops(f"[{UP}, {DOWN}]", 2, votes=True)
    assert [(op.kind, op.targets, op.text) for op in parsed.ops] == [
        ("up", (0,), ""),
        ("down", (1,), ""),
    ]
    assert not parsed.malformed
    assert parse_ops(f"[{UP}, {DOWN}]", 2).dropped == {"unknown op": 2}
    assert parse_ops('[{"op": "up"}, {"op": "down", "target": 3}]', 2, votes=True).dropped == {
        "no target": 1,
        "target out of range": 1,
    }
    assert parse_merge(f"[{UP}]", 2).dropped == {"unknown op": 1}


def test_valid_ops_among_invalid_ones_are_kept():
    parsed = parse_ops(f'[{{"op": "drop"}}, {ADD}, {{"op": "add", "text": "cut {UPDATE}', 2)
    assert [op.kind for op in parsed.ops] == ["add", "update"]
    assert parsed.dropped == {"unknown op": 1, "not JSON": 1}


def test_ops_over_the_limit_are_dropped():
    parsed = parse_ops(f"[{ADD}, {ADD}, {ADD}]", 0, limits=OpLimits(max_ops=2))
    assert len(parsed.ops) == 2
    assert parsed.dropped == {"too many ops": 1}


def test_thinking_started_by_the_prompt_is_ignored():
    assert kinds(f"Perhaps {ADD}", thinking=True) == []
    assert kinds(f"Perhaps {UPDATE}</think>{ADD}", thinking=True) == ["add"]


def test_ops_have_spans_and_the_head_ends_at_the_first_object():
    text = f'Fine: [{{"op": "drop"}}, {ADD}, {UPDATE}]'
    parsed = parse_ops(text, 2)
    assert [text[slice(*op.span)] for op in parsed.ops] == [ADD, UPDATE]
    assert text[: parsed.head_chars] == "Fine: ["


PIECES = st.sampled_from(
    ["[", "]", "{", "}", '"', ",", ":", "\\", "op", '"op"', '"add"', '"update"', '"text"',
     '"target"', "1", "<think>", "</think>", " ", "```json\n", ADD, UPDATE, UP, DOWN,
     '{"op": "return"}', "\ud800", "中", "NaN", "1e999", '{"a": ' * 3]
)  # fmt: skip


@settings(max_examples=1000)
@given(
    st.lists(PIECES, max_size=30).map("".join) | st.text(),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_any_text_is_parsed(completion, shown, thinking, votes):
    parsed = parse_ops(completion, shown, thinking=thinking, votes=votes)
    assert 0 <= parsed.head_chars <= len(completion)
    end = parsed.head_chars
    for op in parsed.ops:
        assert end <= op.span[0] < op.span[1] <= len(completion)
        end = op.span[1]
        assert bool(op.text) == (op.kind in ("add", "update"))
        assert len(op.targets) == (op.kind in ("update", "up", "down"))
        assert all(target < shown for target in op.targets)
    assert votes or not any(op.is_vote for op in parsed.ops)
    assert parsed.ops or parsed.dropped


# ── head of a malformed answer ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("completion", "departure"),
    [
        ("", ""),
        ("Hm.", "Hm."),
        ("<think>Let me see.", ""),
        ("<think>Hm.</think>\nWest is good.", "West is good."),
        ("[", ""),
        ("```json\n[{", ""),
        ('[{"op":"add","text":"Go we', ""),
        ('[{"op":"add","text":"Go west.}]', ""),
        ('[{"op":"add","text":"Go\\u00', ""),
        ('[{"op":"add","text":nul', ""),
        ('[{"op":"add","text":"Go"west."}]', 'west."}]'),
        ("[{'op':'add'}]", "'op':'add'}]"),
        ('[{"op":"add","textual west."}]', 'ual west."}]'),
        ('[{"op":"add" "text":"x"}]', '"text":"x"}]'),
        ('[{"text":"x"}]', "]"),
        ('Here: [{"op":"add","text":x}]', "x}]"),
        ('[{"op":"advise","text":"x"}]', 'vise","text":"x"}]'),
        ('[{"op":"ad","text":"x"}]', '","text":"x"}]'),
        ('[{"op":["add"],"text":"x"}]', '["add"],"text":"x"}]'),
        ('[{"op":"add"}]', "}]"),
        ('[{"op":"add","text":5}]', "5}]"),
        ('[{"op":"add","text":""}]', '"}]'),
        ('[{"op":"add","text":"' + "x" * 41 + '"}]', 'x"}]'),
        ('[{"op":"update","text":"x"}]', "}]"),
        ('[{"op":"update","target":13,"text":"x"}]', '3,"text":"x"}]'),
        ('[{"op":"update","target":"7","text":"x"}]', '7","text":"x"}]'),
    ],
)
def test_the_head_of_a_malformed_answer_ends_where_it_becomes_invalid(
    completion: str, departure: str
) -> None:
    parsed = parse_ops(completion, 2, limits=OpLimits(max_chars=40))
    assert parsed.malformed
    assert completion[parsed.head_chars :] == departure


def test_without_shown_experiences_an_update_is_invalid_from_its_kind() -> None:
    text = '[{"op":"update","target":1,"text":"x"}]'
    assert text[parse_ops(text, 0).head_chars :].startswith("update")
    assert text[parse_ops(text.replace("update", "up"), 0, votes=True).head_chars :].startswith(
        "up"
    )


@pytest.mark.parametrize(
    ("completion", "departure"),
    [
        ('[{"op":"merge","targets":[1,7],"text":"x"}]', '7],"text":"x"}]'),
        ('[{"op":"merge","targets":[1],"text":"x"}]', '],"text":"x"}]'),
        ('[{"op":"discard"}]', "}]"),
        (f"[{ADD}]", 'add", "text": "Go west."}]'),
    ],
)
def test_the_head_of_a_malformed_merge_ends_at_its_invalid_part(
    completion: str, departure: str
) -> None:
    assert completion[parse_merge(completion, 3).head_chars :] == departure


ANSWER = st.lists(
    st.builds(lambda text: {"op": "add", "text": text}, st.text(min_size=1).filter(str.strip))
    | st.builds(
        lambda text, n: {"op": "update", "target": n, "text": text},
        st.text(min_size=1).filter(str.strip), st.integers(1, 2),
    ),
    min_size=1, max_size=2,
)  # fmt: skip


@settings(max_examples=500)
@given(ANSWER, st.booleans(), st.data())
def test_the_head_covers_what_a_usable_answer_could_share(answer, ascii_only, data) -> None:
    """Check `head_chars`, the number of characters that a usable answer could share.

    For a cut answer these are all characters. For a wrong character they include at least the
    characters before the wrong one.
    """
    text = json.dumps(answer, ensure_ascii=ascii_only)
    cut = data.draw(st.integers(0, len(text)))
    beginning = parse_ops(text[:cut], 2)
    assert not beginning.malformed or beginning.head_chars == cut
    wrong = parse_ops(text[:cut] + data.draw(st.characters()) + text[cut + 1 :], 2)
    assert not wrong.malformed or wrong.head_chars >= cut


def test_an_answer_ends_cleanly_if_no_refused_op_follows_the_last_op() -> None:
    assert parse_ops(f"```json\n[{ADD}]\n```\nI hope this helps!", 0).ends_cleanly
    assert parse_ops(f'[{{"op": "drop"}}, {ADD}]', 0).ends_cleanly
    assert not parse_ops(f'[{ADD}, {{"op": "drop"}}]', 0).ends_cleanly
    assert not parse_ops(f"[{ADD}, {ADD}]", 0, limits=OpLimits(max_ops=1)).ends_cleanly
    assert not parse_ops(f'[{ADD}, {{"op": "add", "text": "cut', 0).ends_cleanly


# ── operations on a chunk of the bank ─────────────────────────────────────────────────────────────


MERGE = '{"op": "merge", "targets": [1, 3], "text": "Go west."}'
DISCARD = '{"op": "discard", "target": 2}'


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (f"[{MERGE}, {DISCARD}]", [("merge", (0, 2)), ("discard", (1,))]),
        (
            f'<think>{MERGE}</think>```json\n[{DISCARD}, {{"op": "keep", "targets": ["1", 3]}}]```',
            [("discard", (1,)), ("keep", (0, 2))],
        ),
        ("[]", [("keep", ())]),
        ('[{"op": "discard", "targets": [1, 1]}]', [("discard", (0,))]),
    ],
)
def test_the_ops_of_a_merge(completion, expected):
    parsed = parse_merge(completion, 3)
    assert [(op.kind, op.targets) for op in parsed.ops] == expected
    assert [op.text for op in parsed.ops] == [
        "Go west." if kind == "merge" else "" for kind, _ in expected
    ]
    assert parsed.dropped == {}


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("They look fine to me.", "no op in the answer"),
        (ADD, "unknown op"),
        ('[{"op": "merge", "targets": [1], "text": "x"}]', "merge of less than two"),
        ('[{"op": "merge", "targets": [2, 2], "text": "x"}]', "merge of less than two"),
        ('[{"op": "merge", "targets": [1, 4], "text": "x"}]', "target out of range"),
        ('[{"op": "merge", "targets": [1, [2]], "text": "x"}]', "no target"),
        ('[{"op": "merge", "targets": [1, 2]}]', "no text"),
        ('[{"op": "merge", "targets": [1, 2], "text": "' + "x" * 41 + '"}]', "text too long"),
        ('[{"op": "discard"}]', "no target"),
        ('[{"op": "discard", "targets": []}]', "no target"),
    ],
)
def test_a_bad_op_of_a_merge_is_dropped_with_its_reason(completion, reason):
    parsed = parse_merge(completion, 3, limits=OpLimits(max_chars=40))
    assert parsed.malformed
    assert parsed.dropped == {reason: 1}


def test_a_target_can_be_named_only_once():
    parsed = parse_merge(f'[{MERGE}, {{"op": "discard", "target": 3}}, {DISCARD}]', 3)
    assert [op.kind for op in parsed.ops] == ["merge", "discard"]
    assert parsed.dropped == {"target named before": 1}


@given(
    completion=st.lists(
        PIECES | st.sampled_from([MERGE, DISCARD, '{"op": "keep", "targets": [1, 2]}']), max_size=12
    ).map("".join),
    shown=st.integers(1, 4),
)
def test_any_text_is_parsed_as_a_merge(completion, shown):
    parsed = parse_merge(completion, shown)
    targets = [target for op in parsed.ops for target in op.targets]
    assert len(set(targets)) == len(targets)
    assert all(0 <= target < shown for target in targets)
    assert all(len(op.targets) > 1 and op.text for op in parsed.ops if op.kind == "merge")
    assert parsed.ops or parsed.dropped


BOMBS = [
    "{" * 50_000,
    '{"a":' * 20_000,
    "[" * 50_000 + ADD,
    '{"op":' * 10_000,
    '{"op": "add", "text": ' + "9" * 9999 + "}",
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_deeply_nested_answers_are_parsed(bomb):
    assert len(parse_ops(bomb, 0).ops) <= 1


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(
        st.sampled_from(["wé go", "中文", "🙂", ADD, UPDATE, ", ", "[", "]", "\n"]), max_size=12
    ).map("".join)
)
def test_the_tokens_of_an_op_cover_its_text_tightly(text):
    ids = renderer().encode(text)
    assert renderer().decode(ids) == text
    ops = parse_ops(text, 2).ops
    spans = token_spans(renderer().decode, ids, [op.span for op in ops])
    end = 0
    for op, (start, stop) in zip(ops, spans, strict=True):
        assert end <= start < stop <= len(ids)
        end = stop
        inside = renderer().decode(ids[start:stop])
        # The opening brace may be in the previous token, together with the end of the previous op.
        assert text[slice(*op.span)].removeprefix("{") in inside
        assert len(renderer().decode(ids[start + 1 : stop - 1])) < op.span[1] - op.span[0]


def test_tokens_of_one_character_map_exactly():
    text = f"[{ADD}]"
    decode = "".join  # a tokenizer whose ids are characters
    ((start, stop),) = token_spans(
        decode,  # pyright: ignore[reportArgumentType]
        list(text),  # pyright: ignore[reportArgumentType]
        [(1, 1 + len(ADD))],
    )
    assert (start, stop) == (1, 1 + len(ADD))


@pytest.mark.parametrize("opening", ['{"a":[', '{"op":[', '{"a":{}', "{"])
def test_the_number_of_tried_braces_is_bounded(
    opening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that at most `MAX_ATTEMPTS` braces are tried.

    Each try may read the text to its end, so without the bound the time would be quadratic.
    """
    decoded: list[int] = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[object, int]:
            decoded.append(idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(ops, "DECODER", Counting(strict=False))
    parsed = parse_ops(f"[{ADD}, {opening * 4000}", 2)
    assert [op.kind for op in parsed.ops] == ["add"]
    assert parsed.dropped.get("not JSON", 0) + parsed.dropped.get("too many ops", 0) >= 1
    assert len(decoded) == ops.MAX_ATTEMPTS + 1


@pytest.mark.parametrize(
    ("completion", "thinking", "text"),
    [
        ("  Go west.\nThen south. \n", False, "Go west.\nThen south."),
        ("<think>Hm.</think>\n\nGo west.", False, "Go west."),
        ("Hm.</think>Go west.", True, "Go west."),
        ('[{"op": "return"}]', False, '[{"op": "return"}]'),
    ],
)
def test_a_note_is_the_text_after_the_thinking(completion: str, thinking: bool, text: str) -> None:
    parsed = parse_note(completion, thinking=thinking)
    (op,) = parsed.ops
    assert (op.kind, op.text, op.span) == ("add", text, (parsed.head_chars, len(completion)))
    assert completion[parsed.head_chars :].strip() == text
    assert parsed.dropped == {}


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("<think>Go west.", "the thinking did not end"),
        ("<think>Go west.</think> \n", "empty text"),
        ("", "empty text"),
        ("x" * 2001, "text too long"),
        ("\ud800", "no text"),
    ],
)
def test_notes_that_are_refused(completion: str, reason: str) -> None:
    parsed = parse_note(completion)
    assert (parsed.malformed, parsed.dropped) == (True, {reason: 1})
    assert parsed.head_chars <= len(completion)
