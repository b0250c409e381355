"""The LLaMA-style model, cut into stages, and the subspace of the stage boundaries."""
