"""Sizes of a maze."""

SIZE, SMALL_SIZE = 7, 5
"""Width and height of a maze, in cells."""
