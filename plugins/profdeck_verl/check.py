"""``profdeck check --host verl``: whether verl really loads profdeck, which it does not say when it fails."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata

from packaging.version import Version

from profdeck.plugin import ConfigError

_FIRST_WITH_PLUGINS = Version("0.9.0")
_MODULE = "profdeck_verl.plugin"
_PROBE = """
import verl.utils.profiler.profile as profile
print(hasattr(profile.DistProfiler.__init__, "__wrapped__"))
"""


def check() -> str:
    """Say that verl loads profdeck in this environment; it is imported in a process of its own.

    Raises:
        ConfigError: it does not; says what to set.
    """
    if importlib.util.find_spec("verl") is None:
        raise ConfigError(f"verl is not installed in the environment of {sys.executable}.")
    version = metadata.version("verl")
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if _MODULE not in modules and Version(version) < _FIRST_WITH_PLUGINS:
        raise ConfigError(f"verl {version} has no plugins: set VERL_USE_EXTERNAL_MODULES={_MODULE} in all processes.")
    if _MODULE not in modules and policy != "auto" and "profdeck" not in policy.split(","):
        raise ConfigError(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves profdeck out: add 'profdeck' to it, or remove the variable."
        )
    done = subprocess.run([sys.executable, "-c", _PROBE], check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"verl {version} cannot be imported: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    if done.stdout.split()[-1:] != ["True"]:
        raise ConfigError(
            f"verl {version} does not load profdeck, and does not say why; its logger says so at DEBUG. Is profdeck "
            f"installed in this environment? Set VERL_USE_EXTERNAL_MODULES={_MODULE}, which fails loudly."
        )
    return f"verl {version} loads profdeck; select it with global_profiler.tool=profdeck"
