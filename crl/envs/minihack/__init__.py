"""Shared code of the MiniHack environments. Only `level` and `game` import nle and minihack."""
