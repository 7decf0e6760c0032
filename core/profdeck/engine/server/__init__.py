"""In an engine's HTTP server."""
