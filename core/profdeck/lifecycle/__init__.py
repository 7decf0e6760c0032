"""When captures start, go on and stop."""
