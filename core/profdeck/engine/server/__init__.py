"""Capture routes and metrics of an engine's HTTP server."""
