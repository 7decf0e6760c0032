"""verl's own keys of profiling, as profdeck's: a job changes one word, ``global_profiler.tool=profdeck``.

profdeck's config (``PROFDECK_CONFIG``, ``PROFDECK__...``) wins where both say something, and a note says so.
"""

from __future__ import annotations

import itertools
import logging
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from profdeck.plugin import Config, ConfigDraft, load_draft, run_name
from profdeck_verl.words import ENGINES, TOOL, plain

logger = logging.getLogger("profdeck")

SOURCE = "verl's config"
_CONTENTS = {"shapes": "record_shapes", "stack": "with_stack", "memory": "profile_memory", "module": "with_modules"}
_OF_ENGINE = ("profile_by_stage", "merge_profiles")
"""Keys of global_profiler that are an engine's (verl #5025)."""


@attrs.frozen
class Setting:
    """A value of profdeck's config that a key of verl gives."""

    key: str
    value: Any
    given_by: str
    default: bool = False
    """Whether verl has it in every config, so that nobody need have meant it."""


def gathered(config: Any) -> tuple[Config, list[str]]:
    """Put together what profdeck's config and verl's say.

    Args:
        config: verl's, of a trainer.

    Returns:
        The config as all processes of the job are to have it, and notes on keys of verl that have no effect.

    Raises:
        ConfigError: a key or value is wrong.
    """
    draft, notes, data = load_draft(), [], plain(config)
    for setting in itertools.chain(settings(data), _finish(data, draft)):
        kept = draft.get(*_key(setting.key))
        if kept is None:
            if setting.value is not None:
                draft.set(setting.key, setting.value, f"{SOURCE}: {setting.given_by}")
        elif kept != setting.value and not setting.default:
            notes.append(f"{setting.given_by}={setting.value!r} has no effect: profdeck's {setting.key} is {kept!r}.")
    _backends(draft, data)
    if not draft.get("roles"):
        notes.append(
            "nothing is recorded: profdeck's config has no roles, and no profiler of verl's is enabled, as by "
            "actor_rollout_ref.actor.profiler.enable=True."
        )
    found = draft.checked().config
    return attrs.evolve(found, run=run_name(found.run), output=found.output.absolute()), notes


def resolved(config: Any) -> Config:
    """Return what `gathered` finds, and log its notes."""
    found, notes = gathered(config)
    for note in notes:
        logger.warning("profdeck: %s", note)
    return found


def settings(config: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield what verl's keys say."""
    profiler = config.get("global_profiler") or {}
    yield from _steps(profiler)
    yield Setting("output", profiler.get("save_path"), "global_profiler.save_path", default=True)
    workers = config.get("actor_rollout_ref") or {}
    for place, own in (
        ("actor_rollout_ref.actor.profiler", (workers.get("actor") or {}).get("profiler")),
        ("actor_rollout_ref.ref.profiler", (workers.get("ref") or {}).get("profiler")),
        ("critic.profiler", (config.get("critic") or {}).get("profiler")),
        ("profiler", config.get("profiler")),
    ):
        if own and own.get("enable"):
            yield from _of_worker(own, place, _tool(config))
            break  # they share processes, and so one role
    yield from _of_rollout(workers.get("rollout") or {}, profiler)


def _finish(config: Mapping[str, Any], draft: ConfigDraft) -> Iterator[Setting]:
    """Yield verl's finish hook, with the variables that it gets from verl; the output must be known."""
    profiler = config.get("global_profiler") or {}
    if command := profiler.get("finish_hook_cmd"):
        path = shlex.quote(str(Path(draft.get("output") or Config().output).absolute()))
        exported = f"export VERL_PROFILE_SAVE_PATH={path} VERL_PROFILE_TOOL={TOOL}; "
        yield Setting("finish.command", exported + command, "global_profiler.finish_hook_cmd")


def _steps(profiler: Mapping[str, Any]) -> Iterator[Setting]:
    steps = profiler.get("steps")
    if steps:
        yield Setting("steps", list(steps), "global_profiler.steps")
        joined = bool(profiler.get("profile_continuous_steps"))
        yield Setting("join_steps", joined, "global_profiler.profile_continuous_steps", default=not joined)
    elif profiler.get("step_start") is not None:
        first = int(profiler["step_start"])
        last = int(profiler["step_end"]) if profiler.get("step_end") is not None else first
        yield Setting("steps", [f"{first}..{last}"], "global_profiler.step_start, step_end")


def _of_worker(own: Mapping[str, Any], place: str, tool: str) -> Iterator[Setting]:
    yield Setting("trainer.ranks", _ranks(own), f"{place}.ranks")
    options = (own.get("tool_config") or {}).get(tool) or {}
    where = f"{place}.tool_config.{tool}"
    if options.get("discrete"):
        yield Setting("mode", "discrete", f"{where}.discrete")
    contents = options.get("contents") or []
    for content, option in _CONTENTS.items():
        if content in contents:
            yield Setting(f"trainer.options.{option}", value=True, given_by=f"{where}.contents")
    if tool == "torch" and contents and "cuda" not in contents:
        yield Setting("trainer.options.activities", ["cpu"], f"{where}.contents")
    schedule = options.get("schedule") or {}
    if schedule.get("active"):
        fields = ("active", "wait", "warmup", "repeat", "skip_first")
        window = {field: schedule[field] for field in fields if schedule.get(field)}
        window.setdefault("repeat", 0 if options.get("discrete") else 1)  # as verl's `build_schedule`
        yield Setting("trainer.window", window, f"{where}.schedule")
    if tool == "npu":
        if options.get("level"):
            yield Setting("trainer.options.level", options["level"], f"{where}.level")
        if options.get("analysis") is not None:
            yield Setting("trainer.options.analyse", bool(options["analysis"]), f"{where}.analysis")


def _of_rollout(rollout: Mapping[str, Any], profiler: Mapping[str, Any]) -> Iterator[Setting]:
    own, engine = rollout.get("profiler") or {}, rollout.get("name")
    if engine not in ENGINES or not own.get("enable"):
        return
    place = "actor_rollout_ref.rollout.profiler"
    yield Setting("rollout.backend", engine, "actor_rollout_ref.rollout.name")
    yield Setting("rollout.ranks", _ranks(own), f"{place}.ranks")
    options = (own.get("tool_config") or {}).get("torch") or {}
    start, end = options.get("profile_token_start"), options.get("profile_token_end")
    if end is not None:
        iterations = {"skip": int(start or 0), "count": int(end) - int(start or 0)}
        yield Setting("rollout.iterations", iterations, f"{place}.tool_config.torch.profile_token_start, _end")
    contents = options.get("contents") or []
    for content in ("shapes", "stack"):
        if content in contents:
            where = f"{place}.tool_config.torch.contents"
            yield Setting(f"rollout.options.{_CONTENTS[content]}", value=True, given_by=where)
    for key in (*_OF_ENGINE, "with_stack", "record_shapes"):
        if profiler.get(key) is not None:
            yield Setting(f"rollout.options.{key}", bool(profiler[key]), f"global_profiler.{key}")


def _ranks(own: Mapping[str, Any]) -> Any:
    return "all" if own.get("all_ranks") else list(own.get("ranks") or [0])


def _tool(config: Mapping[str, Any]) -> str:
    device = (config.get("trainer") or {}).get("device")
    return "npu" if device == "npu" else "torch"


def _key(dotted: str) -> list[str]:
    role, _, rest = dotted.partition(".")
    return ["roles", role, *rest.split(".")] if role in {"trainer", "rollout"} else dotted.split(".")


def _backends(draft: ConfigDraft, config: Mapping[str, Any]) -> None:
    """Choose the backends of roles that name none: that of the device, and the engine of the rollouts."""
    rollout = ((config.get("actor_rollout_ref") or {}).get("rollout") or {}).get("name")
    for role in draft.get("roles") or ():
        if draft.get("roles", role, "backend") is None:
            engine = rollout if role == "rollout" and rollout in ENGINES else _tool(config)
            draft.set(f"{role}.backend", engine, SOURCE)
