"""Ray: engines in actors as targets, captures on demand through an actor, and reading of traces on a cluster."""
