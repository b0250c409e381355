"""The volunteer: one process that trains in a run."""
