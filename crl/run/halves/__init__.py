"""The two halves of a run, each alone: playing episodes, and training on recorded ones."""
