"""The version of profdeck, recorded in manifests and merged traces, and reported by servers."""

__version__ = "0.1.0"
