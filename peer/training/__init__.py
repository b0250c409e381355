"""The inner loop: the model, its text, the optimizer, and the device that computes."""
