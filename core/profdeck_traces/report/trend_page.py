"""HTML page of a trend, with the changes and a plot of each series."""

from __future__ import annotations

from collections.abc import Sequence

from profdeck_traces.report.rendering import render
from profdeck_traces.report.trend_section import trend_section
from profdeck_traces.trend.model import Trend


def write_trend_page(trend: Trend, labels: Sequence[str]) -> str:
    """Return the page as HTML.

    Args:
        trend: What it is of.
        labels: What to call the paths that it was read from.
    """
    return render("trend_page.html.jinja", {"title": " and ".join(labels), "trend": trend_section(trend)})
