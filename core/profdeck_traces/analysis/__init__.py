"""What traces say: times, steps, collectives, and what changed between runs."""
