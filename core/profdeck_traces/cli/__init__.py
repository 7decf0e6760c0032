"""Commands that read traces."""
