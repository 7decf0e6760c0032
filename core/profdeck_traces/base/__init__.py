"""Utilities shared by ``profdeck`` and ``profdeck_traces``."""
