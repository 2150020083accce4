"""Notes on failed episodes: failure mode, reflection and retrieval query (Role-Agent §3.3).

A note has one line for each field of `FIELDS`, as in the paper's Figure 8:

    DOMINANT_TYPE: missing_precondition
    DETAIL: The agent placed the cloth before it was clean.
    CRITICAL_STEP: Step 3, it went to the target with a dirty cloth.
    CORE_LESSON: Make sure that an object has the required state before you place it.
    RETRIEVAL_QUERY: object state, clean before place
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

OTHER = "other"
"""Failure mode of a note that names no known mode."""

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "DOMINANT_TYPE": "mode",
        "DETAIL": "detail",
        "CRITICAL_STEP": "critical_step",
        "CORE_LESSON": "lesson",
        "RETRIEVAL_QUERY": "query",
    }
)
"""Field of a `FailureNote` by its name in the text, in order."""

_HOUSEHOLD = (
    "repetitive_exploration", "wrong_target_location", "wrong_receptacle", "premature_give_up",
    "missing_precondition", "repeated_failed_action", "navigation_loop", "entity_confusion",
    "wrong_object_interaction", "exhaustive_exploration_failure", "action_format_error",
)  # fmt: skip
_SHOP = (
    "irrelevant_query", "wrong_product_selection", "wrong_attribute_selection",
    "missing_attribute_selection", "premature_purchase", "excessive_browsing", "repeated_query",
    "navigation_error", "price_constraint_violation", "action_format_error",
    "premature_termination",
)  # fmt: skip
_SEARCH = (
    "wrong_answer", "insufficient_retrieval", "irrelevant_retrieval_query",
    "repeated_retrieval_query", "information_misinterpretation", "partial_answer",
    "hallucinated_answer", "premature_answer", "action_format_error",
)  # fmt: skip

_OF_ENVIRONMENTS = {
    **dict.fromkeys(
        ("alfworld", "keyroom", "maze", "river", "room", "scienceworld", "sokoban"), _HOUSEHOLD
    ),
    "webshop": _SHOP,
    "search_qa": _SEARCH,
}
"""Modes by the name of the environment, without the suffix of a small one or of its tasks."""

ALL_MODES: tuple[str, ...] = (*dict.fromkeys((*_HOUSEHOLD, *_SHOP, *_SEARCH)), OTHER)
"""All failure modes."""

_NAMES = "|".join(FIELDS)
_MARK = r"(?:[^\w\n]|_)"  # of lists, quotes and emphasis
_START = re.compile(rf"^{_MARK}*(?:\d+{_MARK}+)?({_NAMES}){_MARK}*?:", re.MULTILINE | re.IGNORECASE)
_EDGES = " \t\r\n\"'*`,[]"


def failure_modes(env: str) -> tuple[str, ...]:
    """Return the failure modes of an environment (Role-Agent, Table 6), and "other" at the end.

    **Ours**: bundled environments that are not in the table have the modes of ALFWorld, which are
    general. Environments of users and of GEM have all modes, because their kind is unknown.
    """
    kind = env.partition(":")[0].removesuffix("_small")
    return (*_OF_ENVIRONMENTS[kind], OTHER) if kind in _OF_ENVIRONMENTS else ALL_MODES


@dataclass(frozen=True, slots=True)
class FailureNote:
    """Note on a failed episode."""

    mode: str
    """Failure mode."""
    detail: str
    """Reason why the mode applies; may be empty."""
    critical_step: str
    """Step at which the failure became irreversible; may be empty."""
    lesson: str
    """Rule that avoids the failure."""
    query: str
    """Query for failures of the same kind."""

    @property
    def text(self) -> str:
        """Text of the note, one line per field."""
        return "\n".join(f"{name}: {getattr(self, field)}" for name, field in FIELDS.items())


def read_answer(answer: str, modes: Sequence[str]) -> tuple[str, str]:
    """Return the text of the note in a model's answer, and the reason for refusal.

    The reason is empty for a usable note. Mode, lesson and query are required. The mode is the
    first one of `modes` that the field names. If it names none, it is "other".
    """
    found = _fields(answer)
    for name, reason in (
        ("DOMINANT_TYPE", "no failure mode"),
        ("CORE_LESSON", "no lesson"),
        ("RETRIEVAL_QUERY", "no retrieval query"),
    ):
        if not found.get(name):
            return "", reason
    others = {field: found.get(name, "") for name, field in FIELDS.items() if field != "mode"}
    return FailureNote(_mode(found["DOMINANT_TYPE"], modes), **others).text, ""


def read_note(text: str) -> FailureNote:
    """Return the note in the text of an entry.

    A text without a mode, such as a lesson of a tiny extractor, is the lesson and the query of a
    failure of the mode "other".
    """
    found = _fields(text)
    if not found.get("DOMINANT_TYPE"):
        return FailureNote(OTHER, "", "", text, text)
    values = {field: found.get(name, "") for name, field in FIELDS.items()}
    mode = _mode(values.pop("mode"), ALL_MODES)
    return FailureNote(mode, **values)


def _mode(value: str, modes: Sequence[str]) -> str:
    """Return the first of `modes` in the value of a field, such as "navigation loop (it turns)".

    The word "other" is no sign of the mode "other", as in "it took the other cup".
    """
    words = re.sub(r"[\W_]+", "_", value.lower())
    known = "|".join(mode for mode in modes if mode != OTHER)
    found = re.search(rf"(?:^|_)({known})(?=_|$)", words)
    return found[1] if found else OTHER


def _fields(text: str) -> dict[str, str]:
    """Return the values of the fields by name, each on one line.

    Only the text after the last `<reflection>` is read. If a field occurs several times, its first
    value counts.
    """
    text = text.rpartition("<reflection>")[2].partition("</reflection>")[0]
    starts = list(_START.finditer(text))
    stops = [start.start() for start in starts[1:]]
    found: dict[str, str] = {}
    for start, stop in zip(starts, [*stops, None], strict=False):
        value = " ".join(text[start.end() : stop].split()).strip(_EDGES)
        found.setdefault(start[1].upper(), value)
    return found
