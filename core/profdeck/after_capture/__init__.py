"""Work after a capture: running finish tasks and deleting old steps."""
