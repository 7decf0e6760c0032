"""Engines: how they are asked to record, and what records in them. Each room below is the code of one process."""
