"""Launcher plugin that names runs after the Ray job ID and processes after their actors."""

from __future__ import annotations

import contextlib
import sys

from profdeck.plugin import Launcher


class _RayLauncher(Launcher):
    """The Ray launcher, which does not assign ranks."""

    def process_name(self) -> str | None:
        """Return the name and ID of the actor that runs in this process, or ``None`` if there is no actor."""
        ray = sys.modules.get("ray")
        with contextlib.suppress(Exception):  # Ray may be partially imported, or have no runtime context
            if ray is not None and ray.is_initialized():
                context = ray.get_runtime_context()
                if actor := context.get_actor_id():
                    return " ".join(filter(None, ("actor", context.get_actor_name(), actor)))
        return None


JOB = _RayLauncher(name="ray", priority=10, job_id="RAY_JOB_ID")
