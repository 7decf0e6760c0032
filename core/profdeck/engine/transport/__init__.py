"""Transport of commands to an engine in another process over HTTP, and of files."""
