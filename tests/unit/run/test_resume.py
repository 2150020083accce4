"""Changes of prompts and packages since a run began."""

from __future__ import annotations

from crl.config.load import SavedRun, load, versions
from crl.run.resume import unset_changes


def test_changed_prompts_and_packages_are_named() -> None:
    now = versions()
    before = {**now, "torch": "1.0"}
    saved = SavedRun(load(["room"]), {"actor": "a", "distil": "b"}, before)
    assert unset_changes(saved, {"actor": "a", "distil": "c"}) == [
        "prompts.distil: the text has changed",
        f"torch: 1.0 → {now['torch']}",
    ]


def test_a_package_that_the_run_did_not_record_has_not_changed() -> None:
    saved = SavedRun(load(["room"]), {}, {"torch": versions()["torch"]})
    assert unset_changes(saved, {}) == []
