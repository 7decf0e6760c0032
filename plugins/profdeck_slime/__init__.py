"""Plugin for slime and vime. Its functions are passed as command-line arguments; see docs/how-to/frameworks.md."""
