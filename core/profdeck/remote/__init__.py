"""Runs at URLs: sent there by `profdeck.remote.upload`, read from there by `profdeck_traces.inputs.url_copies`."""
