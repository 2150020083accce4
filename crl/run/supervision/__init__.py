"""Supervision of a run: signals, and signs that something is wrong."""
