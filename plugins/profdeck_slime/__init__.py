"""Functions for the arguments of slime and vime; docs/how-to/frameworks.md says which goes where."""
