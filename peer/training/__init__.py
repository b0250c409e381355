"""The inner loop: the model, its text, AdamW, and the device that computes."""
