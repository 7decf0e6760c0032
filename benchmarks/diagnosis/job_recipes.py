"""Recipes for one training process on the CPU. Function names are arbitrary so that rules cannot rely on them."""

from __future__ import annotations

import copy
import gc
import http.server
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
import zlib

import numpy as np
import torch
from benchmarks.diagnosis.recipe import Kind, Recipes
from benchmarks.diagnosis.training_job import FIRST, Batch, TrainingJob
from torch import Tensor

RECIPES = Recipes(Kind.JOB)
_LOADING = {"rules": "data-loading", "cure": "num_workers | background | prefetch | ahead"}


def _pack(job: TrainingJob, kilobytes: int) -> list[bytes]:
    """Return four copies of a compressed JSON document."""
    numbers = [job.random.random() for _ in range(kilobytes * 50)]
    return [zlib.compress(json.dumps(numbers).encode())] * 4


@RECIPES.planted("loader-in-process", stacks=True, **_LOADING)
def alder(job: TrainingJob) -> None:
    """Decode each batch in the main process, in a DataLoader without workers."""
    documents = _pack(job, job.draw(200, 400))
    features, size = job.features, job.batch_size

    class Leaves:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Batch:
            first = json.loads(zlib.decompress(documents[index % 4]))[0]  # planted
            return torch.full((size, features), first), torch.ones(size, features)

    job.feed(torch.utils.data.DataLoader(Leaves(), batch_size=None))


@RECIPES.planted("file-reads", stacks=True, **_LOADING)
def birch(job: TrainingJob) -> None:
    """Read each batch from a compressed file, without a DataLoader."""
    path = job.scratch / "leaf"
    rows = job.draw(3000, 6000)
    np.savez_compressed(path, x=np.random.default_rng(0).random((rows, 64), dtype=np.float32))

    def catkin() -> Batch:
        with np.load(path.with_suffix(".npz")) as document:  # planted
            rows = torch.from_numpy(document["x"])
        flat = rows.flatten()[: job.batch_size * job.features].view(job.batch_size, job.features)
        return flat, flat

    job.feed(iter(catkin, None))


@RECIPES.planted("loader-bursts", **_LOADING)
def cedar(job: TrainingJob) -> None:
    """Decode the batches for four steps at once, in a DataLoader."""
    documents = _pack(job, job.draw(800, 1200))
    features, size = job.features, job.batch_size

    class Cones:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Batch:
            if index % 4 == 1:
                json.loads(zlib.decompress(documents[0]))  # planted
            return torch.full((size, features), index / 1000), torch.ones(size, features)

    job.feed(torch.utils.data.DataLoader(Cones(), batch_size=None))


@RECIPES.planted("full-collection", rules="garbage-collection", cure="gc", stacks=True)
def elm(job: TrainingJob) -> None:
    """Collect garbage in each step while many objects are live."""
    kept = [[number] for number in range(job.draw(60_000, 120_000))]

    def twig() -> None:
        assert kept
        gc.collect()  # planted

    job.plant(3, twig)


@RECIPES.planted(
    "python-loop", rules="python python-code", cure="vectori|C\\+\\+|compiled|numpy|native|out of the step", stacks=True
)
def fir(job: TrainingJob) -> None:
    """Process a text byte by byte in pure Python."""
    text = job.random.randbytes(job.draw(150_000, 300_000))

    def needle() -> int:
        total = 0
        for symbol in text:  # planted
            total = (total * 31 + symbol) % 65_521
        return total

    job.plant(1, needle)


@RECIPES.planted(
    "tiny-operators", rules="tiny-operators python-loop small-operators", cure="vectori|batch|compile|one", stacks=True
)
def hazel(job: TrainingJob) -> None:
    """Normalise the rows of a batch one at a time, with separate operators for each row."""
    times = job.draw(1, 3)

    def nut() -> Tensor:
        for _ in range(times):
            rows = [(row - row.mean()) / (row.std() + 1e-6) for row in job.batch[0]]  # planted
        return torch.stack(rows)

    job.plant(1, nut)


@RECIPES.planted("checkpoint", rules="checkpoint", cure="async|background|less often|thread", stacks=True)
def iris(job: TrainingJob) -> None:
    """Save a checkpoint in each step."""
    size = job.draw(3_000_000, 6_000_000)
    extra = torch.rand(size)

    def bloom() -> None:
        torch.save({"a": job.model.state_dict(), "b": extra}, job.scratch / "petal")  # planted

    job.plant(3, bloom)


@RECIPES.planted("log-lines", rules="logging output", cure="less often|fewer|level|every|many steps", stacks=True)
def juniper(job: TrainingJob) -> None:
    """Write hundreds of log lines to a file in each step."""
    log = logging.getLogger("berry")
    log.addHandler(logging.FileHandler(job.scratch / "berry.txt"))
    log.setLevel(logging.INFO)
    log.propagate = False
    count = job.draw(300, 600)

    def berry() -> None:
        for number in range(count):
            log.info("%d %s", number, job.step)  # planted

    job.plant(3, berry)


@RECIPES.planted(
    "float64", rules="float64", cure="float32", compare="cpu", settings={"trainer.options.record_shapes": True}
)
def larch(job: TrainingJob) -> None:
    """Use float64 for the model and the batches."""
    job.model.double()
    batches = job.batches
    job.batches = ((inputs.double(), targets.double()) for inputs, targets in batches)


@RECIPES.planted("second-forward", rules="duplicated-work repeated-work", cure="once|reuse|keep", stacks=True)
def maple(job: TrainingJob) -> None:
    """Run the model a second time on the same batch to compute a metric."""
    with_gradients = job.model

    def sap() -> Tensor:
        value: Tensor = with_gradients(job.batch[0]).mean()  # planted
        return value

    job.plant(1, sap)


@RECIPES.planted("sleep", rules="sleep waiting python-code", cure="remove|wait|event|poll", stacks=True)
def oak(job: TrainingJob) -> None:
    """Poll for a file in each step, with a sleep after each attempt."""
    count = job.draw(4, 9)

    def acorn() -> None:
        for _ in range(count):
            if not (job.scratch / "none").exists():
                time.sleep(0.004)  # planted

    job.plant(3, acorn)


@RECIPES.planted("loader-workers", stacks=True, **_LOADING)
def olive(job: TrainingJob) -> None:
    """Load data with a DataLoader worker that is slower than the training."""
    documents = _pack(job, job.draw(1500, 2500))
    features, size = job.features, job.batch_size

    class Stones:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Batch:
            first = json.loads(zlib.decompress(documents[index % 4]))[0]
            return torch.full((size, features), first), torch.ones(size, features)

    loader = torch.utils.data.DataLoader(Stones(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    job.feed(loader)


@RECIPES.planted("automatic-collection", rules="garbage-collection", cure="gc", stacks=True)
def palm(job: TrainingJob) -> None:
    """Create enough objects to trigger frequent garbage collection while many objects are live."""
    kept = [[number] for number in range(job.draw(50_000, 100_000))]
    gc.set_threshold(400, 2, 2)

    def frond() -> int:
        return len([[number] for number in range(8_000)]) + len(kept)  # planted

    job.plant(1, frond)


@RECIPES.planted("garbage-without-stacks", rules="outside-operators idle-stage unrecorded python", cure="with_stack")
def pine(job: TrainingJob) -> None:
    """Collect garbage in each step. Without stacks, the trace does not show the cause."""
    kept = [[number] for number in range(job.draw(100_000, 150_000))]

    def resin() -> int:
        return gc.collect() + len(kept)

    job.plant(3, resin)


@RECIPES.planted("lock", rules="lock waiting wait-for-thread lock-contention", cure="lock|thread|wait", stacks=True)
def plane(job: TrainingJob) -> None:
    """Wait for a lock that another thread holds while it sorts a tensor."""
    guard, begin = threading.Lock(), threading.Event()
    numbers = torch.rand(job.draw(250_000, 500_000))

    def bark() -> None:
        while True:
            begin.wait()
            begin.clear()
            with guard:
                started.set()
                numbers.sort()

    started = threading.Event()
    threading.Thread(target=bark, daemon=True).start()

    def trunk() -> None:
        started.clear()
        begin.set()
        started.wait()
        with guard:  # planted
            pass

    job.plant(2, trunk)


@RECIPES.planted("interpreter-lock", rules="gil-contention gil", cure="GIL|process|thread", stacks=True, compare="wall")
def poplar(job: TrainingJob) -> None:
    """Run pure Python continuously in a background thread."""
    symbols = job.random.randbytes(1000)

    def branch() -> None:
        total = 0
        while True:
            for symbol in symbols:
                total = (total * 31 + symbol) % 65_521  # planted

    threading.Thread(target=branch, daemon=True).start()


@RECIPES.planted("held-lock", rules="lock waiting", cure="lock|thread|wait", stacks=True)
def privet(job: TrainingJob) -> None:
    """Acquire a lock that another thread holds while it compresses data."""
    guard = threading.RLock()
    text = job.random.randbytes(job.draw(1_000_000, 2_000_000))

    def hedge() -> None:
        while True:
            with guard:
                zlib.compress(text)
            time.sleep(0.001)

    threading.Thread(target=hedge, daemon=True).start()

    def stem() -> None:
        with guard:  # planted
            pass

    job.plant(0, stem)


@RECIPES.planted("child-output", rules="waiting subprocess", cure="background|less often|remove|async", stacks=True)
def quince(job: TrainingJob) -> None:
    """Run a program in each step and read its output."""
    seconds = job.draw(30, 60) / 1000
    code = f"import time; time.sleep({seconds}); print(1)"

    def pome() -> None:
        subprocess.check_output([sys.executable, "-S", "-c", code])  # planted

    job.plant(3, pome)


@RECIPES.planted("object-batches", rules="unpickling data-loading", cure="tensors|num_workers", stacks=True)
def redbud(job: TrainingJob) -> None:
    """Get batches of Python objects from a DataLoader worker."""
    count = job.draw(20_000, 40_000)
    batch = next(job.batches)

    class Pods:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> list[dict[str, object]]:
            return [{"number": number, "name": f"pod {index}"} for number in range(count)]

    pods = iter(torch.utils.data.DataLoader(Pods(), batch_size=None, num_workers=1, multiprocessing_context="fork"))

    def unpack() -> Batch:
        next(pods)  # planted
        return batch

    job.feed(iter(unpack, None))


@RECIPES.planted(
    "child-process",
    rules="waiting subprocess",
    cure="background|less often|remove|async",
    stacks=True,
)
def rowan(job: TrainingJob) -> None:
    """Start a program in each step and wait for it to exit."""
    seconds = job.draw(20, 50) / 1000

    def berries() -> None:
        subprocess.run([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"], check=True)  # planted

    job.plant(3, berries)


@RECIPES.planted(
    "tracker-call",
    rules="waiting network logging output",
    cure="background|async|less often|every|many steps",
    stacks=True,
)
def sequoia(job: TrainingJob) -> None:
    """Report each step to a server and wait for the reply."""
    seconds = job.draw(15, 40) / 1000

    class Reply(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Reply)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def crown() -> None:
        urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/{job.step}").close()  # planted

    job.plant(3, crown)


@RECIPES.planted("new-shapes", rules="recompilation compilation", cure="dynamic|shape|pad")
def spruce(job: TrainingJob) -> None:
    """Call a compiled function with a new shape in each step."""
    torch._dynamo.config.recompile_limit = 100  # noqa: SLF001  # documented despite the underscore
    layer = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(job.draw(4, 8))])
    compiled = torch.compile(layer, backend="eager", dynamic=False)

    def cone() -> None:
        compiled(torch.rand(8 + job.step, 64))  # planted

    job.plant(1, cone)


@RECIPES.planted(
    "update-loop",
    rules="tiny-operators small-operators python-loop optimizer-loop",
    cure="foreach|fused|batch",
    stacks=True,
)
def sumac(job: TrainingJob) -> None:
    """Update a moving average of the weights one slice at a time."""
    averages = [parameter.detach().clone() for parameter in job.model.parameters()]

    def drupe() -> None:
        for average, parameter in zip(averages, job.model.parameters(), strict=True):
            for left, right in zip(average, parameter.detach(), strict=True):
                left.mul_(0.99).add_(right, alpha=0.01)  # planted

    job.plant(3, drupe)


@RECIPES.planted(
    "layout-copies", rules="layout-copies redundant-copies copies", cure="contiguous|layout|once", stacks=True
)
def tamarack(job: TrainingJob) -> None:
    """Copy a large tensor to another memory layout several times in each step."""
    large = torch.rand(job.draw(1500, 2000), 1500)

    def root() -> None:
        for _ in range(4):
            large.t().contiguous()  # planted

    job.plant(1, root)


@RECIPES.planted("new-buffers", rules="allocation new-buffers", cure="reuse|once|preallocat|buffer", stacks=True)
def teak(job: TrainingJob) -> None:
    """Allocate and zero a large buffer in each step."""
    size = job.draw(8_000_000, 14_000_000)

    def grain() -> None:
        torch.zeros(size)  # planted

    job.plant(0, grain)


@RECIPES.planted(
    "validation", rules="validation outlier-step unsteady-steps", cure="less often|fewer|separate", stacks=True
)
def walnut(job: TrainingJob) -> None:
    """Evaluate the model on other data in every fourth step."""
    others = torch.rand(job.batch_size * job.draw(8, 14), job.features)

    def husk() -> None:
        if job.step % 4 == 2:
            job.model.eval()
            with torch.no_grad():
                job.model(others)  # planted
            job.model.train()

    job.plant(3, husk)


@RECIPES.planted("copied-model", rules="deep-copies redundant-copies", cure="copy|in place|less often", stacks=True)
def willow(job: TrainingJob) -> None:
    """Copy the optimizer's state several times in each step."""
    times = job.draw(3, 5)

    def catkin() -> None:
        for _ in range(times):
            copy.deepcopy(job.optimizer.state_dict())  # planted

    job.plant(3, catkin)


@RECIPES.planted("one-long-step", rules="outlier-step unsteady-steps python-code", cure="view|see|step", stacks=True)
def wych(job: TrainingJob) -> None:
    """Compress a large text in a single step."""
    text = job.random.randbytes(job.draw(6_000_000, 9_000_000))

    def leaf() -> None:
        if job.step == FIRST + 7:
            zlib.compress(text)  # planted

    job.plant(2, leaf)


@RECIPES.planted("prints", rules="logging output", cure="less often|fewer|level|every|many steps", stacks=True)
def yucca(job: TrainingJob) -> None:
    """Print rows of a tensor in each step."""
    stream = (job.scratch / "stalk").open("w", encoding="utf-8")
    rows = job.draw(4, 8)

    def stalk() -> None:
        for row in job.batch[0][:rows]:
            print(row[:64], file=stream, flush=True)  # planted

    job.plant(1, stalk)


@RECIPES.planted("busy-machine", rules="busy-machine", cure="idle machine|other", has_cost=False)
def zamia(job: TrainingJob) -> None:
    """Keep all cores busy with other processes."""
    burn = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"
    for _ in range(3 * len(os.sched_getaffinity(0))):
        job.children.append(subprocess.Popen([sys.executable, "-S", "-c", burn]))


@RECIPES.control("plain-training")
def yew(_: TrainingJob) -> None:
    """Run the common job unchanged."""


@RECIPES.control("plain-training-with-stacks", stacks=True, tolerates="profiler-overhead profiler")
def zelkova(_: TrainingJob) -> None:
    """Run the common job unchanged, with stacks."""


@RECIPES.control("loader-ahead", stacks=True, tolerates="profiler-overhead profiler")
def xylosma(job: TrainingJob) -> None:
    """Load data with a DataLoader worker that is faster than the training."""
    features, size = job.features, job.batch_size

    class Seeds:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Batch:
            return torch.full((size, features), index / 1000), torch.ones(size, features)

    loader = torch.utils.data.DataLoader(Seeds(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    job.batches = iter(loader)


@RECIPES.control("many-layers", stacks=True, tolerates="profiler-overhead profiler")
def ylang(job: TrainingJob) -> None:
    """Run a backward pass through many small layers."""
    layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(100)])
    job.plant(1, lambda: layers(torch.rand(16, 32)).sum().backward())


@RECIPES.control("large-products")
def zinnia(job: TrainingJob) -> None:
    """Run a large matrix product and its backward pass in each step."""
    weights = torch.rand(512, 512, requires_grad=True)
    job.plant(1, lambda: (torch.rand(256, 512) @ weights).sum().backward())
