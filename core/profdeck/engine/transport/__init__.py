"""How commands reach an engine in another process: HTTP and Ray."""
