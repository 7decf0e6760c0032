"""What a backend is, how it is found and built, and one recording by it."""
