"""What stands out in a run: one sentence each, with numbers and what to do, by what can be gained."""
