"""Reads one trace, in one pass and bounded memory."""
