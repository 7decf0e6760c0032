"""The config: its models, and the places that its values come from."""
