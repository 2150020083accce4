"""Kept sets of truncated sampling."""

from __future__ import annotations

from array import array

from crl.types import KeptSet


def kept_set(*ids: int) -> KeptSet:
    return array("i", ids).tobytes()
