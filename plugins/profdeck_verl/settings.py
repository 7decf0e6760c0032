"""Converts verl's profiling options to profdeck's config, so that jobs only set ``global_profiler.tool=profdeck``.

profdeck's config (``PROFDECK_CONFIG``, ``PROFDECK__...``) takes precedence, and a note reports each ignored option.
"""

from __future__ import annotations

import itertools
import logging
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from profdeck.plugin import Config, ConfigDraft, load_draft, run_name, user_path
from profdeck_verl.constants import ENGINE_ATTRIBUTES, TOOL
from profdeck_verl.plain_data import to_plain

logger = logging.getLogger("profdeck")

SOURCE = "verl's config"
_CONTENTS = {"shapes": "record_shapes", "stack": "with_stack", "memory": "profile_memory", "module": "with_modules"}
_ENGINE_OPTIONS = ("profile_by_stage", "merge_profiles")
"""Keys of global_profiler that apply to rollout engines (verl #5025)."""


@attrs.frozen
class Setting:
    """A setting of profdeck's config that results from an option of verl."""

    key: str
    value: Any
    verl_key: str
    is_default: bool = False
    """True if verl sets the option in every config, so that the user may not have chosen it."""


def merge_configs(config: Any) -> tuple[Config, list[str]]:
    """Merge profdeck's config and verl's profiling options.

    Args:
        config: a trainer's verl config.

    Returns:
        The config for all processes of the job, and notes about verl options that have no effect.

    Raises:
        ConfigError: a key or value is invalid.
    """
    draft, notes, data = load_draft(), [], to_plain(config)
    for setting in itertools.chain(convert_options(data), _convert_finish_hook(data, draft)):
        current_value = draft.get(*_split_key(setting.key))
        if current_value is None:
            if setting.value is not None:
                draft.set(setting.key, setting.value, f"{SOURCE}: {setting.verl_key}")
        elif current_value != setting.value and not setting.is_default:
            notes.append(
                f"{setting.verl_key}={setting.value!r} has no effect: profdeck's {setting.key} is {current_value!r}."
            )
    _set_default_backends(draft, data)
    if not draft.get("roles"):
        notes.append(
            "nothing is recorded: profdeck's config has no roles, and no profiler in verl's config is enabled. Enable "
            "one, for example with actor_rollout_ref.actor.profiler.enable=True."
        )
    merged = draft.checked().config
    return attrs.evolve(merged, run=run_name(merged.run), output=merged.output.absolute()), notes


def load_config(config: Any) -> Config:
    """Return the result of `merge_configs` and log its notes."""
    merged, notes = merge_configs(config)
    for note in notes:
        logger.warning("profdeck: %s", note)
    return merged


def convert_options(config: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the settings that result from verl's options, except for the finish hook."""
    profiler = config.get("global_profiler") or {}
    yield from _convert_steps(profiler)
    yield Setting("output", profiler.get("save_path"), "global_profiler.save_path", is_default=True)
    workers = config.get("actor_rollout_ref") or {}
    for verl_key, worker_profiler in (
        ("actor_rollout_ref.actor.profiler", (workers.get("actor") or {}).get("profiler")),
        ("actor_rollout_ref.ref.profiler", (workers.get("ref") or {}).get("profiler")),
        ("critic.profiler", (config.get("critic") or {}).get("profiler")),
        ("profiler", config.get("profiler")),
    ):
        if worker_profiler and worker_profiler.get("enable"):
            yield from _convert_worker(worker_profiler, verl_key, _device_tool(config))
            break  # The workers share processes, and therefore one role.
    yield from _convert_rollout(workers.get("rollout") or {}, profiler)


def _convert_finish_hook(config: Mapping[str, Any], draft: ConfigDraft) -> Iterator[Setting]:
    """Yield verl's finish hook with verl's environment variables. The draft must contain the output directory."""
    profiler = config.get("global_profiler") or {}
    if command := profiler.get("finish_hook_cmd"):
        path = shlex.quote(str(user_path(draft.get("output") or Config().output).absolute()))
        exported = f"export VERL_PROFILE_SAVE_PATH={path} VERL_PROFILE_TOOL={TOOL}; "
        yield Setting("finish.command", exported + command, "global_profiler.finish_hook_cmd")


def _convert_steps(profiler: Mapping[str, Any]) -> Iterator[Setting]:
    steps = profiler.get("steps")
    if steps:
        yield Setting("steps", list(steps), "global_profiler.steps")
        join_steps = bool(profiler.get("profile_continuous_steps"))
        yield Setting("join_steps", join_steps, "global_profiler.profile_continuous_steps", is_default=not join_steps)
    elif profiler.get("step_start") is not None:
        first = int(profiler["step_start"])
        last = int(profiler["step_end"]) if profiler.get("step_end") is not None else first
        yield Setting("steps", [f"{first}..{last}"], "global_profiler.step_start, step_end")


def _convert_worker(profiler: Mapping[str, Any], verl_key: str, tool: str) -> Iterator[Setting]:
    yield Setting("trainer.ranks", _convert_ranks(profiler), f"{verl_key}.ranks")
    options = (profiler.get("tool_config") or {}).get(tool) or {}
    tool_key = f"{verl_key}.tool_config.{tool}"
    if options.get("discrete"):
        yield Setting("mode", "discrete", f"{tool_key}.discrete")
    contents = options.get("contents") or []
    for content, option in _CONTENTS.items():
        if content in contents:
            yield Setting(f"trainer.options.{option}", value=True, verl_key=f"{tool_key}.contents")
    if tool == "torch" and contents and "cuda" not in contents:
        yield Setting("trainer.options.activities", ["cpu"], f"{tool_key}.contents")
    schedule = options.get("schedule") or {}
    if schedule.get("active"):
        fields = ("active", "wait", "warmup", "repeat", "skip_first")
        window = {field: schedule[field] for field in fields if schedule.get(field)}
        window.setdefault("repeat", 0 if options.get("discrete") else 1)  # like verl's `build_schedule`
        yield Setting("trainer.window", window, f"{tool_key}.schedule")
    if tool == "npu":
        if options.get("level"):
            yield Setting("trainer.options.level", options["level"], f"{tool_key}.level")
        if options.get("analysis") is not None:
            yield Setting("trainer.options.analyse", bool(options["analysis"]), f"{tool_key}.analysis")


def _convert_rollout(rollout: Mapping[str, Any], global_profiler: Mapping[str, Any]) -> Iterator[Setting]:
    profiler, engine = rollout.get("profiler") or {}, rollout.get("name")
    if engine not in ENGINE_ATTRIBUTES or not profiler.get("enable"):
        return
    verl_key = "actor_rollout_ref.rollout.profiler"
    yield Setting("rollout.backend", engine, "actor_rollout_ref.rollout.name")
    yield Setting("rollout.ranks", _convert_ranks(profiler), f"{verl_key}.ranks")
    options = (profiler.get("tool_config") or {}).get("torch") or {}
    start, end = options.get("profile_token_start"), options.get("profile_token_end")
    if end is not None:
        iterations = {"skip": int(start or 0), "count": int(end) - int(start or 0)}
        yield Setting("rollout.iterations", iterations, f"{verl_key}.tool_config.torch.profile_token_start, _end")
    contents = options.get("contents") or []
    for content in ("shapes", "stack"):
        if content in contents:
            contents_key = f"{verl_key}.tool_config.torch.contents"
            yield Setting(f"rollout.options.{_CONTENTS[content]}", value=True, verl_key=contents_key)
    for key in (*_ENGINE_OPTIONS, "with_stack", "record_shapes"):
        if global_profiler.get(key) is not None:
            yield Setting(f"rollout.options.{key}", bool(global_profiler[key]), f"global_profiler.{key}")


def _convert_ranks(profiler: Mapping[str, Any]) -> Any:
    return "all" if profiler.get("all_ranks") else list(profiler.get("ranks") or [0])


def _device_tool(config: Mapping[str, Any]) -> str:
    """Return the name of the tool for the job's device, which is also the name of profdeck's backend."""
    device = (config.get("trainer") or {}).get("device")
    return "npu" if device == "npu" else "torch"


def _split_key(dotted_key: str) -> list[str]:
    role, _, role_key = dotted_key.partition(".")
    return ["roles", role, *role_key.split(".")] if role in {"trainer", "rollout"} else dotted_key.split(".")


def _set_default_backends(draft: ConfigDraft, config: Mapping[str, Any]) -> None:
    """Set the backend of roles without one: the rollout engine for rollouts, the device's backend for others."""
    engine = ((config.get("actor_rollout_ref") or {}).get("rollout") or {}).get("name")
    for role in draft.get("roles") or ():
        if draft.get("roles", role, "backend") is None:
            backend = engine if role == "rollout" and engine in ENGINE_ATTRIBUTES else _device_tool(config)
            draft.set(f"{role}.backend", backend, SOURCE)
