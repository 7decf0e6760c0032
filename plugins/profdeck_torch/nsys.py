"""``profdeck nsys-args``: the flags with which nsys records exactly the captures of a config."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from profdeck.backends.building import build_backend
from profdeck.base.errors import ConfigError, nearest
from profdeck.cli.kit import SOURCE, Json, Settings, print_json
from profdeck.config.model import Config, Mode
from profdeck.config.sources import load, parse_setting
from profdeck_torch.options import TorchOptions


def command(
    config: Annotated[
        Path | None, typer.Argument(help="A config file. [default: PROFDECK_CONFIG]", show_default=False)
    ] = None,
    *,
    role: Annotated[str, typer.Option(help="The role that runs under nsys.")] = "trainer",
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Print the nsys flags that record just the captures.

    For roles with the option cuda_profiler_range; the number of captures comes from the schedule.

    Use as: nsys profile $(profdeck nsys-args profdeck.yaml) python train.py
    """
    loaded = load(config, settings=dict(map(parse_setting, settings or ())), settings_source=SOURCE).config
    captures = capture_count(loaded, role)
    flags = nsys_flags(loaded, role, captures)
    if json:
        print_json({"role": role, "captures": captures, "flags": flags})
    else:
        typer.echo(shlex.join(flags))


def nsys_flags(config: Config, role: str, captures: int) -> list[str]:
    """Return the flags of ``nsys profile``; see its user guide, "CLI Profile Command Switch Options"."""
    return [
        "--capture-range=cudaProfilerApi",
        f"--capture-range-end=repeat-shutdown:{captures}",
        "--kill=none",  # when the last range has ended nsys would else end the job
        "--trace=cuda,nvtx",
        f"--output={config.output / (config.run or '%h') / f'nsys_{role}_%p'}",
    ]


def capture_count(config: Config, role: str) -> int:
    """Count the captures that one rank of a role makes: each is a range of nsys.

    Raises:
        ConfigError: the role does not use ``cuda_profiler_range``, or the number is not known.
    """
    chosen = config.roles.get(role)
    if chosen is None:
        raise ConfigError(f"The config has no role '{role}'.{nearest(role, config.roles)}")
    options = build_backend(config, role).options
    if not isinstance(options, TorchOptions) or not options.cuda_profiler_range:
        raise ConfigError(
            f"roles.{role}.options.cuda_profiler_range is not on, so nsys would wait for ranges that never begin. "
            f"Set it: --set {role}.options.cuda_profiler_range=true"
        )
    last = config.final_step if config.final_step is not None else config.steps.last
    if last is None:
        raise ConfigError(
            "The schedule has no end, so the number of captures is not known. "
            "Say when the job ends: --set final_step=1000"
        )
    if config.mode is Mode.CONTINUOUS:
        count = sum(1 for _ in config.steps.runs(0, last, joined=config.join_steps))
    elif chosen.stages:
        count = len(chosen.stages) * sum(1 for _ in config.steps.steps(0, last))
    else:
        raise ConfigError(
            f"In discrete mode every stage is a capture: name those that each step passes once, in roles.{role}.stages."
        )
    if count == 0:
        raise ConfigError(f"The schedule selects no step up to step {last}.")
    return count
