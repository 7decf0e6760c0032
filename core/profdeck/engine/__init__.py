"""Captures of inference engines.

The subpackage `control` requests captures, `server` adds routes to the engine's HTTP server, and `worker` records in
the engine's processes. The subpackage `transport` transfers requests and files.
"""
