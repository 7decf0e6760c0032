"""Plain data on disk and between processes: captures, manifests, requests, run directories."""
