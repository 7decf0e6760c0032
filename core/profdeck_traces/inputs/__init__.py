"""Finds and checks traces and other artifacts, and reads what a run records about them."""
