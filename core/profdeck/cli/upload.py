"""`profdeck upload`: uploads a run's finished captures to a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
import typer

from profdeck_traces.cli import terminal


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=terminal.run_path, help="A run; latest: the newest one.")
    ],
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", help="A directory for runs, such as s3://bucket/profiles. Default: PROFDECK_UPLOAD."
        ),
    ] = None,
    *,
    json: terminal.JsonOption = False,
) -> None:
    """Upload the finished captures of a run to a URL.

    Files that are already in the store are skipped. Local files are not deleted.
    """
    from profdeck.remote.upload import directory_url, upload
    from profdeck_traces.base import text

    with terminal.show_progress("Uploading") as on_progress:
        result = upload(Path(run), directory_url(url), on_progress=on_progress)
    if json:
        terminal.print_json({**attrs.asdict(result, recurse=False), "place": str(result.place)})
        return
    for reason in result.waits_for:
        terminal.warn(f"{reason}. This capture was not uploaded. Repeat the upload later.")
    skipped = f"; {result.there} {'was' if result.there == 1 else 'were'} already in the store" if result.there else ""
    terminal.print_line(
        f"Sent {text.plural(result.files, 'file')}, {terminal.size(result.size_bytes)}{skipped}. "
        f"Next: profdeck ls {text.shell_word(str(result.place))}"
    )
