"""Traces and other files that are read, and the facts that a run knows about them."""
