"""The text of a run as a corpus: built from any source, and read."""
