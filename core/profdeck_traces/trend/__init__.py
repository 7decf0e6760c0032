"""How the numbers of captures change over a run, and over runs."""
