"""The log of a run, read and replayed by whoever wants to."""
