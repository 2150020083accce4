"""Commands on the episodes and the results of runs, and on the halves of a run."""
