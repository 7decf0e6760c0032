"""Captures that are asked for while a job runs."""
