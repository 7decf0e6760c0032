"""Helpers for processes, event loops and devices. They import no other subpackage of profdeck."""
