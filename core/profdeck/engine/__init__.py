"""Engines. A subpackage contains the code of one process: the host that requests captures, the server, the worker."""
