"""Upload of runs to URLs. `profdeck_traces.inputs.url_copies` reads runs there."""
