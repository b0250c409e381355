"""What a run is: its manifest, its shards, its first state, and the order of its text."""
