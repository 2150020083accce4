"""Notes on failed episodes: parsing of answers, modes, and the clock of the calls."""

from __future__ import annotations

import pytest

from crl.envs.registry import names
from crl.manager.calls import CallClock
from crl.manager.failure_notes import ALL_MODES, failure_modes, read_answer, read_note

ANSWER = """The agent was careless.
<reflection>
DOMINANT_TYPE: Missing Precondition
**DETAIL**: It placed the cloth
before it was clean.
"CRITICAL_STEP": "Step 3, it went to the toilet."
CORE_LESSON: Make sure that objects are clean: first the sink, then the target.
RETRIEVAL_QUERY: [object state, clean before place]
</reflection>
RETRIEVAL_QUERY: too late"""

TEXT = """DOMINANT_TYPE: missing_precondition
DETAIL: It placed the cloth before it was clean.
CRITICAL_STEP: Step 3, it went to the toilet.
CORE_LESSON: Make sure that objects are clean: first the sink, then the target.
RETRIEVAL_QUERY: object state, clean before place"""

REST = "CORE_LESSON: a\nRETRIEVAL_QUERY: b"


def test_an_answer_becomes_a_note():
    assert read_answer(ANSWER, failure_modes("alfworld")) == (TEXT, "")
    note = read_note(TEXT)
    assert note.text == TEXT
    assert (note.mode, note.query) == (
        "missing_precondition",
        "object state, clean before place",
    )


def test_a_mode_of_another_environment_becomes_other():
    text, reason = read_answer(ANSWER, failure_modes("webshop"))
    assert not reason
    assert read_note(text).mode == "other"
    assert read_note("DOMINANT_TYPE: clumsiness\nCORE_LESSON: a").mode == "other"


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("navigation_loop (the agent goes to and fro)", "navigation_loop"),
        ("navigation_loop - it loops", "navigation_loop"),
        ("navigation_loop, repeated_failed_action", "navigation_loop"),
        ("repeated failed action and navigation_loop", "repeated_failed_action"),
        ("failure mode: Navigation Loop.", "navigation_loop"),
        ("**navigation_loop**", "navigation_loop"),
        ("__navigation_loop__: it loops", "navigation_loop"),
        ("other (a kind of loop)", "other"),
        ("it took the other cup: entity confusion", "entity_confusion"),
        ("other, a navigation loop", "navigation_loop"),
        ("another_navigation_looper", "other"),
        ("navigation_error", "other"),  # of WebShop
    ],
)
def test_the_first_known_mode_counts(value: str, mode: str):
    text, reason = read_answer(f"DOMINANT_TYPE: {value}\n{REST}", failure_modes("alfworld"))
    assert not reason
    assert read_note(text).mode == mode


@pytest.mark.parametrize(
    "form",
    ["1. {}: {}", "2) **{}**: {}", "- **{}:** {}", "__{}__: {}", "### 3. {}: {}", "* `{}`: {}"],
)
def test_fields_may_be_list_items_or_emphasised(form: str):
    fields = {"DOMINANT_TYPE": "navigation_loop", "CORE_LESSON": "a", "RETRIEVAL_QUERY": "b 2"}
    answer = "\n".join(form.format(*field) for field in fields.items())
    text, reason = read_answer(answer, failure_modes("room"))
    assert not reason
    note = read_note(text)
    assert (note.mode, note.lesson, note.query) == ("navigation_loop", "a", "b 2")


def test_the_modes_of_the_paper():
    assert [len(failure_modes(env)) for env in ("alfworld", "webshop", "search_qa")] == [12, 12, 10]
    assert {mode for env in ("room", "webshop", "search_qa") for mode in failure_modes(env)} == set(
        ALL_MODES
    )


def test_each_bundled_environment_has_the_modes_of_its_kind():
    modes = {name: failure_modes(name) for name in names()}
    assert modes["search_qa_small"] == modes["search_qa"]
    assert modes["scienceworld_small"] == failure_modes("scienceworld:boil") == modes["alfworld"]
    assert modes["room"] == modes["alfworld"]
    assert ALL_MODES not in modes.values()


@pytest.mark.parametrize("env", ["shop.py:SPEC", "gem:math:Orz57K", "my_shops.small:SPEC"])
def test_an_environment_of_unknown_kind_has_all_modes(env: str):
    """The name of a user's environment may be anything, also that of its reference."""
    assert failure_modes(env) == ALL_MODES
    text, _ = read_answer(f"DOMINANT_TYPE: premature purchase\n{REST}", failure_modes(env))
    assert read_note(text).mode == "premature_purchase"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "no failure mode"),
        ("I do not know.", "no failure mode"),
        ("DOMINANT_TYPE:\nCORE_LESSON: a\nRETRIEVAL_QUERY: b", "no failure mode"),
        ("DOMINANT_TYPE: navigation_loop\nRETRIEVAL_QUERY: b", "no lesson"),
        ("DOMINANT_TYPE: navigation_loop\nCORE_LESSON: a", "no retrieval query"),
    ],
)
def test_answers_without_a_note(answer: str, reason: str):
    assert read_answer(answer, failure_modes("room")) == ("", reason)


def test_a_lesson_without_fields_is_lesson_and_query():
    note = read_note("the exit is west.")
    assert (note.mode, note.lesson, note.query) == ("other",) + ("the exit is west.",) * 2


def test_only_the_last_reflection_is_read():
    draft = "<reflection>\nDOMINANT_TYPE: navigation_loop\n</reflection>\n"
    assert read_answer(draft + ANSWER, failure_modes("alfworld")) == (TEXT, "")


@pytest.mark.parametrize("space", ["", " ", "\n", "\n\n"])
def test_fields_may_follow_the_tag_on_its_line(space: str):
    fields = f"DOMINANT_TYPE: navigation_loop\n{REST}"
    answer = f"<reflection>{space}{fields}</reflection>"
    expected = read_answer(fields, failure_modes("room"))
    assert not expected[1]
    assert read_answer(answer, failure_modes("room")) == expected


def test_the_clock_counts_overlapping_calls_once():
    time = 0.0
    clock = CallClock(lambda: time)
    with clock():
        time = 2.0
        with clock():
            time = 3.0
        time = 5.0
    time = 10.0
    assert clock.take_metrics() == {"perf/distil_calls": 2, "perf/distil_s": 5.0}
    with clock():
        time = 11.0
        assert clock.take_metrics()["perf/distil_s"] == 1.0
        time = 13.0
    assert clock.take_metrics() == {"perf/distil_calls": 0, "perf/distil_s": 2.0}
    with clock(counted=False):
        time = 14.0
        assert clock.seconds() == 5.0 + 1.0 + 2.0 + 1.0
    assert clock.take_metrics() == {"perf/distil_calls": 0, "perf/distil_s": 1.0}
