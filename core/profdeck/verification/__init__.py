"""Reads a run directory back and says what every rank of every capture is worth."""
