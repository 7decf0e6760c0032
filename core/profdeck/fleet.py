"""Removed module. Importing it raises an error that names the replacement for ``Fleet``."""

raise ImportError("profdeck.fleet.Fleet was replaced by profdeck.Profiler.from_config(..., role=None, targets={...}).")
