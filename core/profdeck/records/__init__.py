"""Data models that are stored on disk or sent between processes: captures, manifests, requests, run directories."""
