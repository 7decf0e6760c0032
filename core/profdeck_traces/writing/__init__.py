"""Writes traces: compressed, trimmed, slim."""
