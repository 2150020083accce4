"""Columns of a river and its banks."""

BANK, SMALL_BANK = 18, 8
"""Number of columns of the near bank. Also the index of the river's first column of water."""
FAR_SIDE = 7
"""Number of columns of the river and the far bank.

The river is two cells wide. A player that falls into the second cell crawls out on a bank next to
it.
"""
