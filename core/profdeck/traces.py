"""Removed module. Importing it raises an error that names the new package."""

raise ImportError("profdeck.traces is now a package of its own. Import profdeck_traces.")
