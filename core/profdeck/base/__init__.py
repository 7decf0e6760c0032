"""Helpers for processes, event loops and devices. This subpackage does not import other subpackages of profdeck."""
