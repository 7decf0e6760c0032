"""`python -m profdeck` is the command line."""

from __future__ import annotations

from profdeck.cli import main

main()
