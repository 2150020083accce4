"""Digests of episodes whose texts no environment wrote (`crl bank build --from FILE`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.envs.registry import BUNDLED_ENVIRONMENTS, get_spec
from crl.types import Segment

DIGESTS = {
    name: digest
    for name in BUNDLED_ENVIRONMENTS
    if (digest := get_spec(name).curriculum.digest) is not None
}
FRAGMENTS = (
    "search[red mug]", "click[acme]", "answer[paris]", "go to drawer 1", "east", "at 2 3",
    "at -1 x", "score 100", "want key", "want", "right.", "unknown action.",
    "open drawer 1: mug 1, plate 2", "nothing", "> < #", "dark east south",
    "find me mug, red, price below 3", "put a mug in the drawer", "focus on metal pot", "key 1 1",
    "\n", ", ",
)  # fmt: skip
"""Texts that resemble those of environments."""

origins: st.SearchStrategy[Literal["task", "env", "policy"]] = st.sampled_from(
    ("task", "env", "policy")
)
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=4).map(" ".join)
episodes = st.lists(
    st.builds(
        lambda origin, text: Segment("assistant" if origin == "policy" else "user", text, origin),
        origins,
        texts,
    ),
    max_size=8,
)


@pytest.mark.parametrize("digest", DIGESTS.values(), ids=DIGESTS)
def test_a_foreign_episode_has_a_digest_or_is_a_value_error(
    digest: Callable[[Sequence[Segment]], str],
) -> None:
    @given(episodes)
    def check(segments: Sequence[Segment]) -> None:
        with suppress(ValueError):
            assert isinstance(digest(segments), str)

    check()
