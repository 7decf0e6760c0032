"""The page of a trend: the changes, and a plot of each series, in one file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

import jinja2
from markupsafe import Markup

from profdeck.base.version import __version__
from profdeck.traces import report
from profdeck.traces.report import svg
from profdeck.traces.trend.model import Trend, TrendSeries
from profdeck.traces.trend.words import explanation, headings, runs_of, sentence, team_of, usual, value_of

_FEWEST_POINTS = 2


def write_page(trend: Trend, labels: Sequence[str]) -> str:
    """Return the page.

    Args:
        trend: What it is of.
        labels: What to call the paths that it was read from.
    """
    style, runs = _file(report.__name__, "page.css"), runs_of(trend)
    context = {
        "title": " and ".join(labels),
        "changes": [
            {"text": sentence(series, change, runs), "with": explanation(change), "is_worse": change.is_worse}
            for series, change in headings(trend)
        ],
        "series": [_section(series) for series in trend.series if len(series.points) >= _FEWEST_POINTS],
        "version": __version__,
        "style": Markup(style),  # noqa: S704 - our own file
        "style_hash": f"sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}",
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_file(__package__ or "", "page.html.jinja")).render(context)


def _file(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _section(series: TrendSeries) -> dict[str, object]:
    scale, unit = {"us": (1e-3, "ms"), "share": (100.0, "%")}.get(series.unit, (1.0, series.unit))
    first, last = usual(series)
    return {
        "team": team_of(series),
        "what": series.what,
        "levels": f"{value_of(series, first)} to {value_of(series, last)}",
        "plot": svg.levels(
            [point.value * scale for point in series.points],
            [(change.index, change.before * scale, change.after * scale) for change in series.changes],
            f"{team_of(series)}: {series.what}",
            unit,
        ),
    }
