"""Conversion of command-line values without pydantic.

typer imports pydantic to convert values, which takes longer than summarising a small trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any, get_args, get_origin


def convert_without_pydantic(command: Any) -> None:
    """Make a click command and its subcommands convert valid values of common types without pydantic.

    typer still converts all other values, so error messages do not change. Typer versions without
    ``get_runtime_param`` are not affected.
    """
    for subcommand in getattr(command, "commands", {}).values():
        convert_without_pydantic(subcommand)
    command.get_params = functools.partial(parameters_without_pydantic, command.get_params)


def parameters_without_pydantic(get_params: Callable[[Any], list[Any]], ctx: Any) -> list[Any]:
    """Return a command's parameters, modified for `convert_without_pydantic`."""
    parameters = get_params(ctx)
    for parameter in parameters:
        if hasattr(parameter, "get_runtime_param"):
            parameter.get_runtime_param = _Values
    return parameters


class _Values:
    @staticmethod
    def coerce(value: Any, param: Any, ctx: Any) -> Any:
        """Convert the value of a parameter. typer defines the signature."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        descriptor = param.type_descriptor
        try:
            return _converted(value, descriptor.annotation, descriptor.parameter_info.parser)
        except ValueError:
            return type(param).get_runtime_param(param).coerce(value, param=param, ctx=ctx)


def _converted(value: Any, annotation: Any, parser: Callable[[Any], Any] | None) -> Any:
    """Convert a value to the annotated type.

    Raises:
        ValueError: the value is invalid, or the type is not supported.
    """
    if get_origin(annotation) is list and isinstance(value, (list, tuple)):
        return [_converted(item, get_args(annotation)[0], parser) for item in value]
    if parser is not None:
        return parser(value)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation(value)
    if annotation in {int, float, str} and type(value) is annotation:
        return value
    raise ValueError
