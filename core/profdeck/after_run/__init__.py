"""What runs once when a capture has ended in all processes: a command and listeners."""
