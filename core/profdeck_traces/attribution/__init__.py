"""Determines which operator, annotation, module and line of code each event belongs to."""
