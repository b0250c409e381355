"""The log of a run as a replicated state machine: the state that follows from it, and the rules that a commit keeps."""
