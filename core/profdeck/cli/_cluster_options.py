"""Command-line options of cluster plugins; see `profdeck.engine.clusters.Cluster.command_options`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import attrs
import typer

from profdeck.engine.clusters import installed_clusters

_PARAMETER = "of_clusters"


@attrs.frozen
class ClusterOptions:
    """Values of a command's cluster options."""

    flags: tuple[str, ...]
    """Options that select a cluster, in the form ``--NAME``."""
    _calls: tuple[Callable[[], object], ...]

    def selected(self) -> Any:
        """Call the option functions of the clusters. Return the first result, or ``None`` if no cluster is selected.

        Raises:
            ConfigError: The options of a cluster are inconsistent.
        """
        return next((result for call in self._calls if (result := call()) is not None), None)


def with_cluster_options(name: str, command: Any) -> Any:
    """Replace a command's ``of_clusters`` parameter with the options of all clusters.

    Args:
        name: Command name, such as ``capture servers``.
        command: Function, or group of functions. It is returned unchanged if no function has such a parameter.
    """
    if isinstance(command, typer.Typer):
        group = copy.copy(command)
        group.registered_commands = list(map(copy.copy, command.registered_commands))
        for subcommand in group.registered_commands:
            subcommand.callback = with_cluster_options(f"{name} {subcommand.name}", subcommand.callback)
        return group
    if not callable(command) or _PARAMETER not in inspect.signature(command).parameters:
        return command
    clusters = {one.name: one.command_options[name] for one in installed_clusters() if name in one.command_options}
    added = {cluster: _parameters(options) for cluster, options in clusters.items()}

    @functools.wraps(command)
    def extended(**values: Any) -> Any:
        calls = tuple(
            functools.partial(clusters[cluster], **{one.name: values.pop(one.name) for one in parameters})
            for cluster, parameters in added.items()
        )
        options = ClusterOptions(tuple(f"--{cluster}" for cluster in clusters), calls)
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
