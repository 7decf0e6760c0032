"""Config: models, validation and sources of values."""
