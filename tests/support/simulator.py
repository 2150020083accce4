"""Mark of tests that play ScienceWorld's simulator."""

from __future__ import annotations

import importlib.util

import pytest

from crl.envs.scienceworld.java import find_java

INSTALLED = importlib.util.find_spec("scienceworld") is not None and find_java() is not None

simulated = pytest.mark.skipif(
    not INSTALLED, reason="scienceworld is not installed: pip install 'crl[scienceworld]'"
)
