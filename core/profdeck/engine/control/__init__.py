"""Requests captures from an engine and collects their files."""
