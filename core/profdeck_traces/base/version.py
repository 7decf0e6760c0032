"""The version of profdeck: in manifests, merged traces and answers of servers."""

__version__ = "0.1.0"
