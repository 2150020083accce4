"""Reflexion: defaults of other sections."""

from __future__ import annotations

import pytest

from crl.config import load
from crl.errors import ConfigError


@pytest.mark.parametrize("preset", ["cpu", "gpu1", "node8"])
def test_the_bank_has_a_bound_in_every_preset(preset: str) -> None:
    options = {"method": "reflexion"}
    assert load(["room"], preset=preset, options=options).bank.max_entries == 16_000
    own = load(["room"], preset=preset, options=options, sets=["bank.max_entries=50"])
    assert own.bank.max_entries == 50


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "actor.train=true",
            "actor.train = True: cannot be used: reflexion trains no model. Choose another method.",
        ),
        (
            "bank.frozen=true",
            "bank.frozen = True: leaves nothing to learn: reflexion trains no model. Leave it out.",
        ),
        (
            "retrieval.per=group",
            "retrieval.per = 'group': cannot be used: each member searches for several notes of "
            "its own. Use --set retrieval.per=rollout.",
        ),
        (
            "ask.enabled=true",
            "ask.enabled = True: cannot be used: reflexion does not support it with notes. Use "
            "--set ask.enabled=false.",
        ),
        (
            "extractor.merge_every=5",
            "extractor.merge_every = 5: cannot be used: a note belongs to one episode, so notes "
            "are not merged. Leave it out.",
        ),
        (
            "bank.evict_votes=2",
            "bank.evict_votes = 2: cannot be used: a note is a text, without votes. "
            "Leave it unset.",
        ),
    ],
)
def test_contradictions_are_refused(setting: str, text: str) -> None:
    sets = [setting, *(["bank.init=bank.sqlite"] if "frozen" in setting else [])]
    with pytest.raises(ConfigError) as refused:
        load(["room"], options={"method": "reflexion"}, sets=sets)
    assert str(refused.value) == text
