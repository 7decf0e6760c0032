"""Captures of several engines as one target: discovery, start, stop and file collection."""
