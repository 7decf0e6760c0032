"""In the processes of an engine that run batches."""
