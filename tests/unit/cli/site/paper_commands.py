"""Commands of a third-party distribution."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from profdeck.base.errors import CaptureError

NUMBER = 3


def cut(
    *,
    times: Annotated[int, typer.Option(min=1)] = 1,
    fail: bool = False,
    interrupt: bool = False,
    bug: bool = False,
    warning: str | None = None,
) -> None:
    """Cut paper."""
    logging.getLogger("profdeck").info("The scissors are open.")
    if warning is not None:
        logging.getLogger("profdeck").warning("The scissors say %s", warning)
    if fail:
        raise CaptureError("The scissors are blunt.", "Sharpen them.")
    if interrupt:
        raise KeyboardInterrupt
    if bug:
        raise RuntimeError("scissors")
    typer.echo(f"cut {times}")


fold = typer.Typer(help="Fold paper.")


@fold.command()
def once() -> None:
    """Fold it once."""
    typer.echo("folded")
