"""How a round goes: the state machines of the leading node and of a volunteer, and what is decided while it runs."""
