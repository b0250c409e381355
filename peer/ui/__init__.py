"""What people see: the screen, lines of text, the monitor, and the log of a run as text."""
