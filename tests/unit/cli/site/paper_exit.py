"""Module that exits when it is imported."""

raise SystemExit(3)
