"""Parsing of actions: an agent's text is an action only if it says so."""

from __future__ import annotations

import pytest

from crl.envs.actions import COMPASS, parse_call, parse_choice

DIRECTIONS = tuple(COMPASS)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<answer>north</answer>", "north"),
        ("I think east is best.\n<answer> North </answer> Good luck!", "north"),
        ("<ANSWER>SouthWest.</ANSWER>", "southwest"),
        ("<answer>north</answer> no, wait: <answer>south</answer>", "south"),
        # The last tag that holds an action counts.
        (
            "<answer>south</answer> or <answer>up</answer>",
            "south",
        ),
        ("<answer>I say <answer>west</answer>", "west"),
        ("<answer>\nnorth\n</answer>", "north"),
        ("<answer>north east</answer>", "northeast"),
        ("north", "north"),
        ("  NORTH!\n", "north"),
        ("The stairs are south of me.\n\nsouth.", "south"),
        ("north\n\n  ", "north"),
        ("`north`", "north"),
        ("- **North**", "north"),
        ("<answer>* 'north'</answer>", "north"),
        ('north."', "north"),
    ],
)
def test_parse_choice_returns_the_chosen_action(text: str, action: str | None) -> None:
    assert parse_choice(text, DIRECTIONS) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n ",
        "<answer></answer>",
        "<answer>up</answer>",
        "<answer>up</answer>\nnorth",  # if there is a tag, text outside it does not count
        "<answer>north",
        "<answer>north\nsouth",
        "north</answer> or",
        "go north",
        "I could go north or south",
        "north\neast\nperhaps",
        "north, then south",
        "northnorth",
        "<answer>north or south</answer>",
        "<answer>north\neast</answer>",
        "1",
    ],
)
def test_parse_choice_rejects_other_texts(text: str) -> None:
    assert parse_choice(text, DIRECTIONS) is None


def test_digits_are_not_picked_out_of_reasoning() -> None:
    numbers = tuple("01234567")
    assert parse_choice("The secret is between 3 and 5", numbers) is None
    assert parse_choice("It must be\n4", numbers) == "4"


def test_actions_keep_their_spelling_and_their_punctuation() -> None:
    actions = ("Pick Up", "search[...]", "what?")
    assert parse_choice("pick   up", actions) == "Pick Up"
    assert parse_choice("SEARCH[...]", actions) == "search[...]"
    assert parse_choice("what?", actions) == "what?"


def test_exact_spelling_comes_first_and_ambiguous_spellings_are_rejected(
) -> None:  # fmt: skip
    assert [parse_choice(text, ("2 0", "20")) for text in ("2 0", "20", " 2 0. ")] == [
        "2 0",
        "20",
        "2 0",
    ]
    assert [parse_choice(text, ("20", "2 0")) for text in ("2 0", "20")] == ["2 0", "20"]
    assert parse_choice("2  0", ("2 0",)) == "2 0"
    assert parse_choice("200", ("2 00", "20 0")) is None
    assert parse_call("click[2 0]", {"click": ("2 0", "20")}) == ("click", "2 0")


def test_actions_that_differ_only_by_case_or_spaces_need_their_exact_spelling() -> None:
    values = ("straße", "strasse", "a  b", "a\tb", "Mug", "mug")
    for value in values:
        for text in (f"click[{value}]", f"<answer>click[{value}]</answer>", f'click["{value}"].'):
            assert parse_call(text, {"click": values}) == ("click", value)
    for either in ("STRASSE", "a b", "ab", "A  B", "MUG"):
        assert parse_call(f"click[{either}]", {"click": values}) is None
    assert parse_choice("n", ("north", "N", "n."), {"n": "north"}) == "N"


def test_aliases_map_to_actions_and_never_shadow_them() -> None:
    aliases = {"n": "north", "go north": "north", "south": "north"}
    assert parse_choice("<answer>N</answer>", DIRECTIONS, aliases) == "north"
    assert parse_choice("go  north.", DIRECTIONS, aliases) == "north"
    assert parse_choice("south", DIRECTIONS, aliases) == "south"
    with pytest.raises(ValueError, match="do not exist"):
        parse_choice("up", DIRECTIONS, {"u": "up"})


# ── a name with an argument ───────────────────────────────────────────────────────────────────────

PAGE = {"search": None, "click": ("buy now", "< prev", "b000000001", "a[b]")}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<answer>search[red shoes]</answer>", ("search", "red shoes")),
        ("search[ Red   Shoes ]", ("search", "Red Shoes")),  # free text keeps its case
        ("SEARCH [x].", ("search", "x")),
        ("click[Buy  Now]", ("click", "buy now")),  # a choice is returned as it is offered
        ("<answer> Click[<Prev] </answer>", ("click", "< prev")),
        ("`click[B000000001]`", ("click", "b000000001")),
        ("- search[tea]", ("search", "tea")),
        ('click["Buy now"]', ("click", "buy now")),
        ("click[B000000001]!", ("click", "b000000001")),
        ("click[a[b]]", ("click", "a[b]")),
        ("First search[tea], then click[buy now]", None),  # not a single action
        ("search[tea], then click[buy now]", None),
        # If the text holds only actions, the last one counts.
        (
            "search[tea] click[buy now]",
            ("click", "buy now"),
        ),
        ("search[tea]. click[buy now]", ("click", "buy now")),
        ("search[tea]! - click[buy now].", ("click", "buy now")),
        ("search[tea]. Click[buy now]? search[cup]", ("search", "cup")),
        ("search[tea [green]. cup[2]]", ("search", "tea [green]. cup[2]")),
        ("search[tea]. Then click[buy now]", None),
        ("**search[tea]**, click[sell].", ("search", "tea")),
        ("search[tea]click[a[b]]", ("click", "a[b]")),
        ("search[tea [green] cup[2]]", ("search", "tea [green] cup[2]")),
        ("I search[tea].\nclick[buy now]", ("click", "buy now")),
        ("<answer>click[buy now]</answer> then <answer>click[sell]</answer>", ("click", "buy now")),
        ("<answer>click[sell]</answer>\nclick[buy now]", None),
        ("click[sell]", None),
        ("buy[buy now]", None),
        ("search[]", None),
        ("search[  ]", None),
        ("search red shoes", None),
        ("search[red", None),
        ("<answer>search[red\nshoes]</answer>", None),
        ("go search[x]", None),
        ("", None),
    ],
)
def test_parse_call_returns_the_chosen_call(text: str, call: tuple[str, str] | None) -> None:
    assert parse_call(text, PAGE) == call
