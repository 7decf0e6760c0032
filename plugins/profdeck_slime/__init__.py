"""Plugin for slime and vime. Their command-line arguments load its functions; see docs/how-to/frameworks.md."""
