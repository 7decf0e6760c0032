"""How traces name processes, threads and streams."""

from __future__ import annotations

Id = int | str | None
"""A process or thread id. Kineto also writes -1 and names."""
