"""What people see: screens, lines of text and the monitor."""
