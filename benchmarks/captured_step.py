"""Compare captured training steps of profdeck's torch backend with a hand-written torch.profiler.

python -m benchmarks.captured_step [--rounds 60] [--json FILE]

Each round runs the same steps without a profiler, with profdeck, and twice with the hand-written profiler. The second
hand-written run shows the measurement noise. The order is random in each round.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import torch
from benchmarks.measure import Row, parser, ratio_interval, report
from torch.profiler import ProfilerActivity, profile, schedule

from profdeck import Capture, Profiler, Status

STEPS = 5
PERIOD = 100
MAX_RATIO, MAX_START, MAX_END, MAX_SIZE = 1.02, 2.0, 0.5, 1.3
ON_DEVICE = torch.cuda.is_available()
Body = Callable[[], None]


class Recording(Protocol):
    """Recording of `STEPS` steps after one warm-up step. Each method is the host's call at one point of the loop."""

    def begin(self) -> None:
        """Start the recording before the warm-up step."""

    def record(self) -> None:
        """Begin the first recorded step after the warm-up step."""

    def mark(self) -> None:
        """End a recorded step and begin the next one."""

    def end(self) -> int:
        """Stop the recording, write the trace and return its size in bytes."""
        ...


class Plain:
    """Recording that does nothing."""

    def begin(self) -> None:
        """Do nothing."""

    record = mark = begin

    def end(self) -> int:
        """Return 0, because there is no trace."""
        return 0


class ByHand:
    """Recording with a hand-written `torch.profiler.profile`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: profile

    def begin(self) -> None:
        """Enter ``with torch.profiler.profile(...)``."""
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_DEVICE else [])],
            schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
            on_trace_ready=lambda ready: ready.export_chrome_trace(str(self._path)),
            record_shapes=True,
        )
        self._profile.__enter__()

    def mark(self) -> None:
        """Call ``step`` of the profiler."""
        self._profile.step()

    record = mark

    def end(self) -> int:
        """Call ``step``, which exports the trace, and exit the profiler."""
        self._profile.step()
        self._profile.__exit__(None, None, None)
        return self._path.stat().st_size


class ByProfdeck:
    """Recording with profdeck: ``start(n)`` and ``stop()`` around each global step."""

    def __init__(self, profiler: Profiler, first: int) -> None:
        self._profiler = profiler
        self._step = first
        self._capture: Capture | None = None

    def begin(self) -> None:
        """Begin the global step that is the warm-up."""
        self._capture = self._profiler.start(self._step)

    def mark(self) -> None:
        """End a global step and begin the next."""
        self._profiler.stop()
        self._step += 1
        self._profiler.start(self._step)

    record = mark

    def end(self) -> int:
        """End the last global step and check the capture."""
        self._profiler.stop()
        assert self._capture is not None
        assert self._capture.status is Status.COMPLETE, self._capture.problems
        return self._capture.artifacts[0].size_bytes


@attrs.frozen
class Figures:
    """Times and trace size of one recording."""

    start_ms: float
    step_ms: float
    end_ms: float
    trace_mb: float


def training_step() -> Body:
    """Return a training step of a small transformer. Short operators make the overhead per operator visible."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = "cuda" if ON_DEVICE else "cpu"
    layer = torch.nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(1000, 128),
        torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        torch.nn.Linear(128, 1000),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(1000, (4, 33), device=device)

    def body() -> None:
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if ON_DEVICE:
            torch.cuda.synchronize()

    return body


def run(body: Body, recording: Recording) -> Figures:
    """Run a warm-up step and `STEPS` recorded steps. Return the times of the parts."""
    gc.collect()  # collect garbage of the previous recording now, not during this one
    clock = time.perf_counter
    began_s = clock()
    recording.begin()
    start_s = clock() - began_s
    body()
    began_s = clock()
    recording.record()
    start_s += clock() - began_s
    began_s = clock()
    body()
    for _ in range(STEPS - 1):
        recording.mark()
        body()
    steps_s = clock() - began_s
    began_s = clock()
    size_bytes = recording.end()
    return Figures(start_s * 1e3, steps_s / STEPS * 1e3, (clock() - began_s) * 1e3, size_bytes / 1e6)


def measure(output: Path, rounds: int) -> dict[str, list[Figures]]:
    """Return the figures of each round. The first round, which includes one-time costs, is omitted."""
    profiler = Profiler.from_config(
        settings={
            "output": str(output),
            "on_error": "raise",
            "steps": [f"{first + 1}..{first + STEPS}" for first in range(0, (rounds + 1) * PERIOD, PERIOD)],
            "trainer.backend": "torch",
            "trainer.warmup_steps": 1,
            "trainer.options.record_shapes": True,
        }
    )
    body = training_step()
    figures: dict[str, list[Figures]] = {"plain": [], "profdeck": [], "hand": [], "hand again": []}
    order = list(figures)
    chance = random.Random(0)
    for number in range(rounds + 1):
        recordings: dict[str, Recording] = {
            "plain": Plain(),
            "profdeck": ByProfdeck(profiler, number * PERIOD),
            "hand": ByHand(output / f"{number}.a.json.gz"),
            "hand again": ByHand(output / f"{number}.b.json.gz"),
        }
        chance.shuffle(order)
        for name in order:
            figures[name].append(run(body, recordings[name]))
    return {name: recorded[1:] for name, recorded in figures.items()}


def row(
    what: str,
    figure: str,
    figures: Mapping[str, Sequence[object]],
    names: tuple[str, str],
    max_ratio: float | None = None,
) -> Row:
    """Compare one figure of two kinds of recording, paired by round."""
    measured, peer = ([getattr(recorded, figure) for recorded in figures[name]] for name in names)
    ratio, interval = ratio_interval(measured, peer)
    unit = figure.rpartition("_")[2].replace("mb", "MB")
    (low, _, high), (peer_low, _, peer_high) = (statistics.quantiles(values, n=4) for values in (measured, peer))
    return Row(
        what=what,
        unit=unit,
        measured=statistics.median(measured),
        peer=statistics.median(peer),
        peer_name=names[1],
        ratio=ratio,
        interval=interval,
        goal=f"ratio <= {max_ratio}" if max_ratio else "",
        met=ratio <= max_ratio if max_ratio else None,
        detail=f"quartiles {low:.3g}..{high:.3g} {unit}; {names[1]} {peer_low:.3g}..{peer_high:.3g} {unit}",
    )


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=60)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as output:
        figures = measure(Path(output), chosen.rounds)
    device = torch.cuda.get_device_name() if ON_DEVICE else "CPU, 1 thread"
    rows = [
        row("captured step", "step_ms", figures, ("profdeck", "hand"), MAX_RATIO),
        row("start of a capture", "start_ms", figures, ("profdeck", "hand"), MAX_START),
        row("stop and export", "end_ms", figures, ("profdeck", "hand"), MAX_END),
        row("trace file", "trace_mb", figures, ("profdeck", "hand"), MAX_SIZE),
        row("hand-written step, again", "step_ms", figures, ("hand again", "hand")),
        row("hand-written step", "step_ms", figures, ("hand", "plain")),
    ]
    report(rows, chosen.json, device=device)


if __name__ == "__main__":
    main()
