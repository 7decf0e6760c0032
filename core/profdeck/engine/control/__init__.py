"""In the process that asks an engine to record."""
