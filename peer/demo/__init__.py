"""A whole swarm on one machine."""
