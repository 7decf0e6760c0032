"""The `profdeck` commands that read traces."""
