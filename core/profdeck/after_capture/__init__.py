"""Work after a capture: finish tasks, and the deletion of old steps."""
