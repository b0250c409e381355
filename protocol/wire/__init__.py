"""What travels: messages, how they are encoded, signed and framed."""
