"""The account of a step: each nanosecond has one owner on the critical path."""
