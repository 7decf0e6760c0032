"""Records captures in the processes of an engine."""
