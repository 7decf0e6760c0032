"""Runs at URLs: sent there by `profdeck.remote.upload`, read from there by `profdeck.remote.copies`."""
