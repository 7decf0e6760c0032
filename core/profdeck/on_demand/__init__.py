"""Captures requested while a job runs."""
