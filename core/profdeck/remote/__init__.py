"""Uploads runs to URLs. The module `profdeck_traces.inputs.url_copies` reads uploaded runs."""
