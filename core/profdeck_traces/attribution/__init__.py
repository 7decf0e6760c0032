"""Finds the operator, annotation, module and line of code of each event."""
