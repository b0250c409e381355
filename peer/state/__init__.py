"""What a peer keeps: the global state, the error feedback, checkpoints and payloads."""
