"""Backends: base classes, plugin loading, hook calls and recordings."""
