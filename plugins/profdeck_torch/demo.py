"""``profdeck demo``: a real distributed training job, captured, verified and summarised."""

from __future__ import annotations

import contextlib
import itertools
import json as jsonlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from profdeck.base.errors import CaptureError
from profdeck.cli import kit
from profdeck.cli.kit import Json, print_json

_CONFIG = """\
# Written by `profdeck demo`: both ranks record global steps 3 and 4 as one capture.
output: {output}
run: {run}
steps: ["3..4"]
roles:
  trainer: {{backend: torch, ranks: all, options: {{record_shapes: true}}}}
"""


def command(
    output: Annotated[Path, typer.Option(help="Directory for the run.")] = Path("profiles"),
    ranks: Annotated[
        int, typer.Option(min=1, help="Training processes. GPUs limit them; without any, all is CPU.")
    ] = 2,
    *,
    json: Json = False,
) -> None:
    """Capture a small training job and show what came out."""
    from profdeck.backends.building import prepare
    from profdeck_torch import TorchBackend, TorchOptions

    TorchBackend.libraries[0].require("torch")
    prepare(TorchBackend(TorchOptions()))
    import torch

    gpus = torch.cuda.device_count()
    ranks = min(ranks, gpus or ranks)
    run = _new_run(output)
    _say(f"1. Train on {ranks} rank(s), {'NCCL on GPUs' if gpus else 'gloo on CPU'}", json)
    _train(run, ranks, sys.stderr if json else None)
    if json:
        listed, summary = (jsonlib.loads(_profdeck(command, str(run), "--json")) for command in ("ls", "summary"))
        print_json({"run": str(run), "ls": listed, "summary": summary})
        return
    _say(f"2. The run directory: {run}")
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        typer.echo(f"   {file.relative_to(run)}  {file.stat().st_size / 1e3:,.0f} kB")
    _say(f"3. Is every trace whole?  profdeck ls {run}")
    typer.echo(_profdeck("ls", str(run)), nl=False)
    _say(f"4. Where did the time go?  profdeck summary {run}")
    typer.echo(_profdeck("summary", "--top", "8", str(run)), nl=False)
    _say("5. Look at a trace: open https://ui.perfetto.dev and drop this file on it")
    typer.echo(f"   {min(run.rglob('*.trace.json.gz'))}")


def _new_run(output: Path) -> Path:
    """Create the config of the first demo that is not there yet, and name its run directory."""
    output.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        run = output / f"demo-{number}"
        config = run.with_suffix(".yaml")
        with contextlib.suppress(FileExistsError), config.open("x", encoding="utf-8") as file:
            file.write(_CONFIG.format(output=jsonlib.dumps(str(output.resolve())), run=run.name))
            return run
    raise AssertionError  # never: count does not end


def _train(run: Path, ranks: int, stdout: TextIO | None) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    job = ["-m", "profdeck_torch.demo_job", "--config", str(run.with_suffix(".yaml"))]
    # Without these, torchrun says in four lines that it sets the first, and Kineto logs each start and stop.
    environment = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"} | os.environ
    if subprocess.run([*torchrun, *job], check=False, env=environment, stdout=stdout).returncode:
        raise CaptureError("The demo's training job failed; its output above says why.")


def _profdeck(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "profdeck", *arguments], check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        kit.say(done.stdout)
        raise CaptureError(f"The demo's run is not complete: profdeck {' '.join(arguments)} says what is missing.")
    return done.stdout


def _say(text: str, to_stderr: bool = False) -> None:  # noqa: FBT001, FBT002  # private, and read at its calls
    typer.echo(f"\n{text}", err=to_stderr)
