"""``profdeck demo``: a real distributed training job, captured, verified and summarised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from profdeck.errors import CaptureError

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
) -> None:
    """Capture a small training job and show what came out."""
    import torch

    from profdeck_torch import TorchBackend

    TorchBackend.libraries[0].require("torch")
    ranks = min(ranks, torch.cuda.device_count() or ranks)
    output.mkdir(parents=True, exist_ok=True)
    name = _free_name(output)
    run = output / name
    config = output / f"{name}.yaml"
    config.write_text(_CONFIG.format(output=output.resolve(), run=name), encoding="utf-8")
    _say(f"1. Train on {ranks} rank(s), {'NCCL on GPUs' if torch.cuda.device_count() else 'gloo on CPU'}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    job = [*torchrun, "-m", "profdeck_torch.demo_job", "--config", str(config)]
    # torchrun says that it sets this to 1 when nobody has, in four lines; so it is set.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    if subprocess.run([sys.executable, *job], check=False, env=environment).returncode:
        raise CaptureError("The demo's training job failed; its output above says why.")
    _say(f"2. The run directory: {run}")
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        typer.echo(f"   {file.relative_to(run)}  {file.stat().st_size / 1e3:,.0f} kB")
    _say(f"3. Is every trace whole?  profdeck ls {run}")
    verified = subprocess.run([sys.executable, "-m", "profdeck", "ls", str(run)], check=False).returncode
    _say(f"4. Where did the time go?  profdeck summary {run}")
    subprocess.run([sys.executable, "-m", "profdeck", "summary", "--top", "8", str(run)], check=True)
    trace = next(iter(sorted(run.rglob("*.trace.json.gz"))), None)
    if verified or trace is None:
        raise CaptureError(f"The demo's run is not complete: profdeck ls {run} says what is missing.")
    _say("5. Look at a trace: open https://ui.perfetto.dev and drop this file on it")
    typer.echo(f"   {trace}")


def _say(text: str) -> None:
    typer.echo(f"\n{text}")


def _free_name(output: Path) -> str:
    number = 1
    while (output / f"demo-{number}").exists():
        number += 1
    return f"demo-{number}"
