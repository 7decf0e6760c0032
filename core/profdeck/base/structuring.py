"""Structuring of plain data into attrs classes without guessing: what has the wrong type is an error.

cattrs does the work; the hooks here take away its coercions (``"false"`` is not a bool, ``2.9`` not an int,
``"cuda"`` not a list) and turn its exceptions into sentences with the path of the key.
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.errors import ForbiddenExtraKeysError

from profdeck_traces.base.documents import shortened, show
from profdeck_traces.base.errors import ConfigError, did_you_mean

T = TypeVar("T")

_LARGEST = 2**63 - 1
_LONGEST_S = 365 * 86_400.0


class _Wrong(ValueError):  # noqa: N818  # never leaves this module
    """A value that does not fit, with a message that stands by itself."""


def structure(data: Any, cls: type[T], *, where: str, unsupported: Collection[str] = ()) -> T:
    """Build ``cls`` from plain data.

    Args:
        data: mappings, lists and scalars as YAML or TOML give them.
        cls: an attrs class.
        where: the path of ``data`` in the config, such as ``roles.trainer.options``; empty for the whole.
        unsupported: fields of ``cls`` to omit from the allowed keys in error messages.

    Raises:
        ConfigError: lists every wrong key and value with its path and what is allowed.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'The config'}: expected a mapping of keys to values, got {show(data)}.")
    try:
        return _converter().structure(data, cls)
    except Exception as error:  # noqa: BLE001  # cattrs raises groups and whatever validators raise
        lines = cattrs.transform_error(
            error, path="", format_exception=functools.partial(_sentence, unsupported=unsupported)
        )
        raise ConfigError("\n".join(_with_path(line, where) for line in lines)) from None


LEFT_OUT: Mapping[Any, Any] = {"profdeck": "left out"}
"""Metadata of a field that is no key of the plain data while it is None: older readers refuse keys that they lack."""


_PLAIN = frozenset({str, int, float, bool})


def unstructure(value: Any) -> Any:
    """Turn attrs classes, enums, paths and tuples into plain JSON data."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Enum | Path):
        return value.value if isinstance(value, Enum) else str(value)
    if isinstance(value, list | tuple):
        return [unstructure(item) for item in value]
    if _is_from_list(value):
        return value.to_list()
    if attrs.has(type(value)):
        value = {
            field.name: own
            for field in attrs.fields(type(value))
            if (own := getattr(value, field.name)) is not None or field.metadata != LEFT_OUT
        }
    if isinstance(value, Mapping):
        return {unstructure(key): unstructure(item) for key, item in value.items()}
    return value


def duration_validator(least: Any) -> Any:
    """Return a validator for a duration in seconds, with a maximum of one year.

    Args:
        least: the validator that checks the minimum.
    """
    return attrs.validators.and_(least, attrs.validators.le(_LONGEST_S))


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook_factory(attrs.has, lambda cls: _section_hook(cls, converter))
    for cls, expected in ((bool, "true or false"), (int, "an integer"), (str, "text")):
        converter.register_structure_hook(cls, functools.partial(_exactly, expected))
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(Path, lambda value, _: Path(_exactly("a path", value, str)))
    converter.register_structure_hook_func(_is_from_list, lambda value, cls: cls.from_list(_list(value)))
    converter.register_structure_hook_func(_is_enum, _enum)
    converter.register_structure_hook_factory(_is_tuple, _tuple_hook)
    converter.register_structure_hook_factory(_is_text_or_list, _text_or_list_hook)
    converter.register_structure_hook_func(lambda cls: cls == bool | str, _switch_or_name)
    converter.register_structure_hook_func(_is_literal, _literal)
    return converter


def _exactly(expected: str, value: Any, cls: type) -> Any:
    if _is_enum(cls):  # cattrs finds hooks by base class, and a StrEnum is a str
        return _enum(value, cls)
    if type(value) is not cls:  # to isinstance a bool is an int, and must not be here
        raise _Wrong(f"expected {expected}, got {show(value)}.{_quoted(value, cls)}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise _Wrong(f"expected an integer of at most {_LARGEST:,}, got {show(value)}.")
    if isinstance(value, str) and (bad := _UNUSABLE.search(value)):
        raise _Wrong(f"expected {expected}, got {show(value)}: it has the character {bad[0]!r}.")
    return value


def _section_hook(cls: type, converter: cattrs.Converter) -> Any:
    from_mapping: Any = converter.gen_structure_attrs_fromdict(cls)

    def section(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            keys = ", ".join(field.name for field in attrs.fields(cls))
            raise _Wrong(f"expected a mapping, got {show(value)}. Its keys: {keys}.")
        return from_mapping(value, cls)

    return section


def _is_literal(cls: Any) -> bool:
    return typing.get_origin(cls) is typing.Literal


def _literal(value: Any, cls: Any) -> Any:
    allowed = typing.get_args(cls)
    if not any(value == item and type(value) is type(item) for item in allowed):
        words = [item for item in allowed if isinstance(item, str)]
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        raise _Wrong(f"expected {' or '.join(map(repr, allowed))}, got {show(value)}.{hint}")
    return value


def _switch_or_name(value: Any, _: Any) -> bool | str:
    switch = isinstance(value, str) and value.lower() in {*_TRUE, *_TRUE.values()}
    if not isinstance(value, bool) and (switch or not isinstance(value, str) or not _PLUGIN.fullmatch(value)):
        raise _Wrong(f"expected true, false or a name, got {show(value)}.{_quoted(value, bool)}")
    return value


_PLUGIN = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""No path, environment or file of UTF-8 can have these: NUL, and halves of UTF-16 pairs."""
_TRUE = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _quoted(value: Any, cls: type) -> str:
    """Return a hint where a text says what another type would."""
    if not isinstance(value, str):
        return ""
    if cls is bool and value.lower() in _TRUE:
        return f" Write {_TRUE[value.lower()]}."
    fits = (cls is bool and value.lower() in {"true", "false"}) or (cls is int and value.lstrip("+-").isdecimal())
    return " Remove the quotes." if fits else ""


def _number(value: Any, _: type) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong(f"expected a number, got {show(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Wrong(f"expected a finite number, got {show(value)}.")
    return number


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _Wrong(f"expected a list, got {show(value)}. Write it in brackets: [{value}].")
    return list(value)


def _is_from_list(cls: Any) -> bool:
    """Tell whether a class says by itself how it is read from a list, and written as one."""
    return hasattr(cls, "from_list")


def _is_enum(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, Enum)


def _enum(value: Any, cls: type[Enum]) -> Enum:
    allowed = [str(member.value) for member in cls]
    if value not in allowed:
        hint = _meant(value, cls) or did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise _Wrong(f"expected one of {', '.join(allowed)}, got {show(value)}.{hint}")
    return cls(value)


def _meant(word: str, cls: type[Enum]) -> str:
    """Return a hint where a class knows what others call its members; see `profdeck.config.options.Activity`."""
    member = cls.meant(word) if hasattr(cls, "meant") else None
    return f" Did you mean '{member.value}'?" if member is not None else ""


_OF_OTHERS = {
    "all_ranks": "ranks: all",
    "contents": "options.activities, options.record_shapes, options.with_stack or options.profile_memory",
    "discrete": "mode: discrete",
    "num_steps": "steps, or iterations.count of an engine",
    "profile_continuous_steps": "mode: continuous",
    "profile_ranks": "ranks",
    "profile_steps": "steps",
    "save_path": "output",
    "step_end": "steps, such as '3..5'",
    "step_start": "steps, such as '3..5'",
    "tool": "backend",
}
"""What configs of other tools say, and what that is here."""


_RENAMED = {"stages": "batch_kinds"}
"""Renamed request keys: maps each old name to its new name."""
_REMOVED = {"budget_gb": "Set 'sample' to limit the number of targets that record."}
"""Removed request keys: maps each key to advice about its replacement."""


def _instead(key: str, allowed: list[str]) -> str:
    if (renamed := _RENAMED.get(key)) in allowed:
        return f" It was renamed to '{renamed}'."
    if key in _REMOVED:
        return f" It was removed. {_REMOVED[key]}"
    if key in _OF_OTHERS:
        return f" Here that is {_OF_OTHERS[key]}."
    return did_you_mean(key, allowed)


def _is_tuple(cls: Any) -> bool:
    return typing.get_origin(cls) is tuple


def _tuple_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], tuple[Any, ...]]:
    # Only tuple[X, ...] is used, and lists keep the index of a wrong item in the error's path.
    items: Any = types.GenericAlias(list, typing.get_args(cls)[:1])
    return lambda value, _: tuple(converter.structure(_list(value), items))


def _is_text_or_list(cls: Any) -> bool:
    return any(arg is str for arg in typing.get_args(cls)) and any(map(_is_tuple, typing.get_args(cls)))


def _text_or_list_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    (items,) = filter(_is_tuple, typing.get_args(cls))

    def hook(value: Any, _: Any) -> Any:
        if typing.get_args(items)[0] is int:
            value = _without_ranges(value)
        return value if isinstance(value, str) else converter.structure(value, items)

    return hook


_RANGE = re.compile(r"\s*(\d{1,7})\s*\.\.\s*(\d{1,7})\s*", re.ASCII)


def _without_ranges(value: Any) -> Any:
    """Write ranges such as ``0..7``, alone or in a list, as the integers that they stand for."""
    found: list[Any] = []
    for item in [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
        match = _RANGE.fullmatch(item) if isinstance(item, str) else None
        if match is None:
            found.append(item)
            continue
        first, last = map(int, match.groups())
        if last < first:
            raise _Wrong(f"the range {show(item)} is empty: its end is below its start.")
        found += range(first, last + 1)
    return value if not found or found == [value] else found


def _sentence(error: BaseException, _: type | None, *, unsupported: Collection[str]) -> str:
    match error:
        case ForbiddenExtraKeysError():
            allowed = [field.alias for field in attrs.fields(error.cl) if field.name not in unsupported]
            return " ".join(
                f"unknown key '{shortened(key)}'.{_instead(key, allowed)} Allowed: {', '.join(allowed)}."
                for key in sorted(map(str, error.extra_fields))
            )
        case KeyError():
            return "this key is required."
        case AttributeError():  # what cattrs meets where it wants .items()
            return "expected a mapping of keys to values."
        case _:
            text = str(error.args[0] if error.args else error)
            return text if text.endswith((".", "?")) else text + "."


def _with_path(line: str, where: str) -> str:
    message, _, tail = line.rpartition(" @ ")
    tail = re.sub(r"\['([^']*)'\]", r".\1", tail)
    path = f"{where}{tail}".lstrip(".")
    return f"{path}: {message}" if path else message
