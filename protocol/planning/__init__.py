"""Who does what: the matchmaker's plan, and the models of memory, speed and pipelines behind it."""
