"""Result rows of the benchmarks, their statistics and their output."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import attrs

_RESAMPLES = 2000
_Variant = TypeVar("_Variant")
_Result = TypeVar("_Result")
_HEADERS = ("what", "measured", "peer", "ratio", "goal", "met")


@attrs.frozen(kw_only=True)
class Row:
    """A measured quantity and its peer."""

    what: str
    unit: str
    measured: float
    peer: float | None = None
    peer_name: str = ""
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the ratio."""
    goal: str = ""
    met: bool | None = None
    """None if there is no goal."""
    detail: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row in the result table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.4g}"
        if self.interval:
            ratio += " ({:.4g}..{:.4g})".format(*self.interval)
        return (
            self.what,
            f"{self.measured:.3g} {self.unit}",
            "" if self.peer is None else f"{self.peer:.3g} {self.unit} ({self.peer_name})",
            ratio,
            self.goal,
            {True: "yes", False: "NO", None: ""}[self.met],
        )


def in_turns(
    variants: Sequence[_Variant], rounds: int, run: Callable[[_Variant, int], _Result]
) -> dict[_Variant, list[_Result]]:
    """Run each variant once per round, in random order. Return the results of each variant in the order of rounds.

    Args:
        variants: The variants to compare.
        rounds: Number of rounds. Another round precedes them and is discarded, because it includes one-time costs.
        run: Function that runs a variant. Its second argument is the number of the round.
    """
    results: dict[_Variant, list[_Result]] = {variant: [] for variant in variants}
    generator = random.Random(0)
    for number in range(rounds + 1):
        for variant in generator.sample(variants, len(variants)):
            result = run(variant, number)
            if number:
                results[variant].append(result)
    return results


def ratio_interval(measured: Sequence[float], peer: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median ratio of paired rounds and its 95 % bootstrap interval."""
    ratios = [value / peer_value for value, peer_value in zip(measured, peer, strict=True)]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return statistics.median(ratios), (medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40])


def machine() -> dict[str, str]:
    """Return the CPU, the number of cores and the versions that affect the results."""
    cpuinfo = Path("/proc/cpuinfo")
    models = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in models if line.startswith("model name")), "")
    return {
        "cpu": model or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **{name: version for name in ("torch", "profdeck") if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def table(rows: Sequence[Row]) -> str:
    """Return a text table of the rows, followed by their details."""
    lines = [_HEADERS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    shown.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*shown, "", *(f"{row.what}: {row.detail}" for row in rows if row.detail)])


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the option ``--json``."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    return arguments


def report(rows: Sequence[Row], destination: Path | None, **about: str) -> None:
    """Print the result table. If `destination` is given, also write the rows as JSON."""
    conditions = machine() | about
    print(", ".join(f"{key} {value}" for key, value in conditions.items()), table(rows), sep="\n\n")
    if destination:
        result: dict[str, Any] = {"machine": conditions, "rows": [attrs.asdict(row) for row in rows]}
        destination.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
