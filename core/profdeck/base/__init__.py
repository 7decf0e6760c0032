"""Helpers for processes, event loops and devices. They import nothing else from profdeck."""
