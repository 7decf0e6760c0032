"""Plugin for slime and vime, whose command-line arguments name its functions; see docs/how-to/frameworks.md."""
