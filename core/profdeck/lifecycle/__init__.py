"""Lifecycle of captures: start, steps and stop."""
