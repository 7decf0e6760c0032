"""``profdeck check --host verl``: checks that verl loads profdeck, because verl does not report a failed plugin."""

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
    """Import verl in a child process and return a confirmation that verl loads profdeck.

    Raises:
        ConfigError: verl is not installed or does not load profdeck. The message contains the required setting.
    """
    if importlib.util.find_spec("verl") is None:
        raise ConfigError(f"verl is not installed in the environment of {sys.executable}.")
    version = metadata.version("verl")
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if _MODULE not in modules and Version(version) < _FIRST_WITH_PLUGINS:
        raise ConfigError(
            f"verl {version} does not support plugins. Set VERL_USE_EXTERNAL_MODULES={_MODULE} in all processes."
        )
    if _MODULE not in modules and policy != "auto" and "profdeck" not in policy.split(","):
        raise ConfigError(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} excludes profdeck. Add 'profdeck', or unset the variable."
        )
    probe = subprocess.run([sys.executable, "-c", _PROBE], check=False, capture_output=True, text=True)
    if probe.returncode:
        raise ConfigError(f"verl {version} cannot be imported: {(probe.stderr.strip().splitlines() or ['?'])[-1]}")
    if probe.stdout.split()[-1:] != ["True"]:
        raise ConfigError(
            f"verl {version} does not load profdeck. verl logs the reason only at level DEBUG. Check that profdeck is "
            f"installed in this environment, or set VERL_USE_EXTERNAL_MODULES={_MODULE}, which raises the error."
        )
    return f"verl {version} loads profdeck; select it with global_profiler.tool=profdeck"
