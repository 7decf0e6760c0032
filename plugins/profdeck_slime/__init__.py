"""Functions for the arguments of slime and vime; docs/how-to/slime.md says which goes where."""
