"""Launcher plugin that names runs after the Ray job ID."""

from __future__ import annotations

from profdeck.plugin import Launcher

JOB = Launcher(name="ray", priority=10, job_id="RAY_JOB_ID")
