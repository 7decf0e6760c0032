"""Placeholder for a removed module. Importing it raises an error that names the new package."""

raise ImportError("profdeck.traces is now a separate package. Import profdeck_traces.")
