"""Reads, replays, verifies and exports the log of a run."""
