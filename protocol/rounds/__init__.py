"""What is decided: the state machines of volunteers, of the leading node and of the quorum."""
