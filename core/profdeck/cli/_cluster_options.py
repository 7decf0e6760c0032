"""Command-line options that clusters add to commands; see `profdeck.engine.clusters.Cluster.command_options`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import attrs

from profdeck.engine.clusters import installed_clusters

_PARAMETER = "of_clusters"


@attrs.frozen
class ClusterOptions:
    """Values of the options that clusters add to a command."""

    flags: tuple[str, ...]
    """Options that select a cluster, such as ``--NAME``."""
    parameters: frozenset[str]
    """Names of all parameters that clusters add."""
    _calls: tuple[Callable[[], object], ...]

    def selected(self) -> Any:
        """Return the result of the first cluster that the options select, or ``None``.

        Raises:
            ConfigError: The values of a cluster's options contradict each other.
        """
        return next((result for call in self._calls if (result := call()) is not None), None)


def with_cluster_options(name: str, command: Any) -> Any:
    """Replace the parameter ``of_clusters`` of a command by the options of all clusters.

    Args:
        name: Name of the command.
        command: Function or group of commands. Without that parameter, it is returned unchanged.
    """
    if not callable(command) or _PARAMETER not in inspect.signature(command).parameters:
        return command
    clusters = {one.name: one.command_options[name] for one in installed_clusters() if name in one.command_options}
    added = {cluster: _parameters(options) for cluster, options in clusters.items()}
    names = frozenset(one.name for parameters in added.values() for one in parameters)

    @functools.wraps(command)
    def extended(**values: Any) -> Any:
        calls = tuple(
            functools.partial(clusters[cluster], **{one.name: values.pop(one.name) for one in parameters})
            for cluster, parameters in added.items()
        )
        options = ClusterOptions(tuple(f"--{cluster}" for cluster in clusters), names, calls)
        return command(**values, **{_PARAMETER: options})

    parameters: list[Parameter] = []
    for parameter in _parameters(command):
        parameters += [one for of in added.values() for one in of] if parameter.name == _PARAMETER else [parameter]
    # typer reads the signature and the annotations.
    vars(extended)["__signature__"] = inspect.Signature(parameters)
    extended.__annotations__ = {one.name: one.annotation for one in parameters}
    return extended


def _parameters(function: Callable[..., object]) -> list[Parameter]:
    return [*inspect.signature(function, eval_str=True).parameters.values()]
