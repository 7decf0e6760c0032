"""What every room uses; it imports nothing else of profdeck."""
