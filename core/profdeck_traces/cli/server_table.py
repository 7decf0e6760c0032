"""Table of a role's servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from profdeck_traces.analysis.formatting import ms
from profdeck_traces.cli.text_layout import aligned

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import ServerSummary


def server_table(servers: Sequence[ServerSummary], width: int, limit: int) -> list[Text]:
    """Format one row per server, in the given order. If there are more than `limit`, keep only the slowest.

    Args:
        servers: Servers of one role.
        width: Width of the table in terminal columns.
        limit: Maximum number of rows.
    """
    slowest = sorted(servers, key=lambda server: -(server.decode_p50_us or 0.0))[:limit]
    rows = [
        [
            f"{server.iterations:,}",
            "" if server.tokens_per_s is None else f"{server.tokens_per_s:,.0f}",
            "" if server.decode_p50_us is None else ms(server.decode_p50_us),
            "" if server.decode_p99_us is None else ms(server.decode_p99_us),
            "" if server.prefill_tokens is None else f"{server.prefill_tokens:,}",
            "" if server.batch_size is None else f"{server.batch_size:,.1f}",
            server.label,
        ]
        for server in servers
        if server in slowest
    ]
    header = ("iterations", "tokens/s", "decode p50 ms", "p99 ms", "prefill tokens", "batch", "server")
    return aligned(header, rows, width)
