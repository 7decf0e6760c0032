"""Step accounts: each nanosecond of a step is assigned to one owner on the critical path."""
