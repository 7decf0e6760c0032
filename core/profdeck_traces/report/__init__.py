"""HTML report of a run: a self-contained page with findings, timelines, tables and plots."""
