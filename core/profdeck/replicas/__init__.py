"""Many targets as one."""
