"""Performance changes across the captures of one or more runs."""
