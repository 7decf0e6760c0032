"""Command-line options of cluster plugins; see `profdeck.engine.clusters.Cluster.command_options`."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import attrs
import typer

_PARAMETER = "of_clusters"


@attrs.frozen
class ClusterOptions:
    """Values of a command's cluster options."""

    flags: tuple[str, ...]
    """Options that select a cluster, in the form ``--NAME``."""
    _selectors: tuple[Callable[[], object], ...]
    """The option functions of the clusters, bound to the values of their options."""

    def selected(self) -> Any:
        """Call the option functions of the clusters. Return the first result, or ``None`` if no cluster is selected.

        Raises:
            ConfigError: The options of a cluster are inconsistent.
        """
        return next((result for select in self._selectors if (result := select()) is not None), None)


def with_cluster_options(name: str, command: Any) -> Any:
    """Replace a command's ``of_clusters`` parameter with the options of all clusters.

    Args:
        name: Command name, such as ``capture servers``.
        command: Function or command group. It is returned unchanged if no function has the parameter ``of_clusters``.
    """
    if isinstance(command, typer.Typer):
        group = copy.copy(command)
        group.registered_commands = list(map(copy.copy, command.registered_commands))
        for subcommand in group.registered_commands:
            subcommand.callback = with_cluster_options(f"{name} {subcommand.name}", subcommand.callback)
        return group
    if not callable(command) or _PARAMETER not in inspect.signature(command).parameters:
        return command
    # Imported lazily because most commands have no cluster options.
    from profdeck.engine.clusters import installed_clusters

    functions = {
        cluster.name: cluster.command_options[name]
        for cluster in installed_clusters()
        if name in cluster.command_options
    }
    parameters_of = {cluster: _parameters(function) for cluster, function in functions.items()}

    @functools.wraps(command)
    def extended(**values: Any) -> Any:
        selectors = tuple(
            functools.partial(
                functions[cluster], **{parameter.name: values.pop(parameter.name) for parameter in parameters}
            )
            for cluster, parameters in parameters_of.items()
        )
        options = ClusterOptions(tuple(f"--{cluster}" for cluster in functions), selectors)
        return command(**values, **{_PARAMETER: options})

    cluster_parameters = list(itertools.chain.from_iterable(parameters_of.values()))
    parameters: list[Parameter] = []
    for parameter in _parameters(command):
        parameters += cluster_parameters if parameter.name == _PARAMETER else [parameter]
    # typer reads the signature and the annotations.
    vars(extended)["__signature__"] = inspect.Signature(parameters)
    extended.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return extended


def _parameters(function: Callable[..., object]) -> list[Parameter]:
    return [*inspect.signature(function, eval_str=True).parameters.values()]
