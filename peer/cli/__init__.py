"""What is typed: the command `potluck`."""
