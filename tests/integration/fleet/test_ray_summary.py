"""A real Ray cluster on this machine gives the same results as processes do, and says what goes wrong."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet.clusters import Cluster, ray_cluster, ray_environment, session_of

from gpu_job import GpuJob
from namespaces import own_network
from processes import python_path

pytestmark = pytest.mark.fleet

JOBS = Path(__file__).parents[2] / "unit" / "traces"
DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")
# Ray changes signal handlers and logging, so that each use of it has a process of its own.
DRIVER = """
import json, os, sys
from pathlib import Path
from parallel_jobs import check, obey
from profdeck.base.errors import ProfdeckError, TraceError
# none
from profdeck_ray.executor import RayExecutor
from profdeck.traces.parallel import map_traces
address, *arguments = sys.argv[1:]
def texts(results):
    return [f"{type(result).__name__}: {result}" for result in results]
def obeyed(orders, **options):
    results = RayExecutor(address)(obey, orders, [1] * len(orders), **options)
    return [str(result) if isinstance(result, TraceError) else result[0] for result in results]
"""
Drive = Callable[..., "subprocess.CompletedProcess[str]"]


def listening(pids: list[int]) -> set[str]:
    """Return the addresses, in the kernel's hexadecimal, on which processes accept connections."""
    sockets = {str(file.readlink()) for pid in pids for file in Path(f"/proc/{pid}/fd").glob("*") if file.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    """The environment of the cluster and of its drivers."""
    return ray_environment(JOBS)


@pytest.fixture(scope="module")
def cluster(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node with two CPUs."""
    with ray_cluster(tmp_path_factory.mktemp("ray"), environ) as started:
        yield started


@pytest.fixture
def drive(cluster: Cluster, environ: dict[str, str]) -> Drive:
    """Run a piece of code that uses the cluster; its stdout is JSON."""

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", DRIVER + code, cluster.address, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def answer(done: subprocess.CompletedProcess[str]) -> object:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_cluster_of_these_tests_is_reached_from_this_machine_only(cluster, drive) -> None:
    answer(drive("print(json.dumps(obeyed(['a', 'b'])))"))
    addresses = listening(session_of(cluster.session))
    assert addresses
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_the_same_results_as_in_processes(drive, tmp_path) -> None:
    paths = [tmp_path / f"{number}.json.gz" for number in range(6)]
    for number, path in enumerate(paths):
        data = gzip.compress(json.dumps([{"ph": "X", "name": str(event)} for event in range(9 * number)]).encode())
        path.write_bytes(data[:-20] if number == 3 else data)
    found = answer(
        drive(
            """
paths = [Path(argument) for argument in arguments]
sizes = [path.stat().st_size for path in paths]
told = []
on_ray = RayExecutor(address)(check, paths, sizes, on_progress=lambda *what: told.append(what))
locally = [texts(map_traces(check, paths, sizes, processes=number)) for number in (1, 2)]
print(json.dumps([texts(on_ray), *locally, told, sum(sizes)]))
""",
            *map(str, paths),
        )
    )
    assert isinstance(found, list)
    on_ray, alone, two, told, total = found
    assert on_ray == alone == two
    assert sum("whole=True" in text for text in on_ray) == 4
    done = [done for done, _ in told]
    assert done == sorted(set(done))
    assert told[-1] == [total, total]


def test_a_summary_is_the_same_and_is_kept(drive, tmp_path) -> None:
    job = GpuJob(ranks=4, slow_rank=2, items=3).write(tmp_path / "job")
    found = answer(
        drive(
            """
from profdeck.base.result_cache import ResultCache
from profdeck.traces.kept_results import identity_of
from profdeck.traces.loading import summarise
import time
job, kept = map(Path, arguments)
kept.mkdir()
while not all(map(identity_of, job.iterdir())):
    time.sleep(0.05)  # of what has just been written nothing is kept
on_ray = summarise([job], executor=RayExecutor(address), cache=ResultCache(kept), buckets=64)[0]
again = summarise([job], executor=RayExecutor("127.0.0.1:1"), cache=ResultCache(kept), buckets=64)[0]
print(json.dumps([on_ray == summarise([job], buckets=64)[0], again == on_ray, len(on_ray.ranks)]))
""",
            str(job),
            str(tmp_path / "kept"),
        )
    )
    assert found == [True, True, 4]


def damaged(paths: list[Path], directory: Path) -> list[Path]:
    """Write copies of small traces that are cut off, or in which bytes differ."""
    chance, copies = random.Random(0), []  # noqa: S311  # the same each time
    for path in [path for path in paths if path.stat().st_size < 200_000 for _ in range(6)]:
        data = bytearray(gzip.decompress(path.read_bytes()))
        for _ in range(chance.randrange(3)):
            data[chance.randrange(len(data))] = chance.choice(b'{}[]",:0x\\')
        packed = gzip.compress(bytes(data[: chance.choice([None, chance.randrange(len(data))])]), 1)
        copies.append(directory / f"{len(copies)}.trace.json.gz")
        copies[-1].write_bytes(packed[: chance.choice([None, None, chance.randrange(len(packed))])])
    return copies


@pytest.mark.shared_data
@pytest.mark.long
def test_real_and_damaged_traces_are_summarised_alike_in_each_way(drive, tmp_path) -> None:
    paths = [*sorted(DATA.glob("gpu/*.json.gz"))]
    if not paths:
        pytest.skip(f"no traces in {DATA}: set PROFDECK_TEST_DATA")
    (tmp_path / "kept").mkdir()
    paths += [*damaged(paths, tmp_path), *sorted(DATA.glob("npu/*.json"))]
    found = answer(
        drive(
            """
from profdeck.traces.loading import summarise
from profdeck.base.result_cache import ResultCache
kept, *paths = map(Path, arguments)
def said(**how):
    run, errors = summarise(paths, buckets=64, **how)
    return run, texts(errors)
here = said()
ways = [said(executor=RayExecutor(address)), said(processes=2), *(said(cache=ResultCache(kept)) for _ in range(2))]
whole = sum(rank.whole for rank in here[0].ranks)
print(json.dumps([[way == here for way in ways], len(here[0].ranks) + len(here[1]), whole]))
""",
            str(tmp_path / "kept"),
            *map(str, paths),
        )
    )
    assert found[:2] == [[True] * 4, len(paths)]
    assert 0 < found[2] < len(paths)


def test_a_killed_worker_costs_its_own_item_only(drive) -> None:
    done = drive("print(json.dumps(obeyed(['a', 'kill', 'b', 'kill', 'unreadable', 'c'])))")
    first, killed, second, killed_too, torn, third = answer(done)  # type: ignore[misc]
    assert [first, second, torn, third] == ["a", "b", "It is torn.", "c"]
    assert killed == killed_too
    assert killed.startswith("Cannot read kill: its Ray worker died (WorkerCrashedError).")


@pytest.mark.long
def test_a_node_that_dies_costs_a_retry(tmp_path_factory) -> None:
    done = subprocess.run(
        [
            *own_network(),
            sys.executable,
            Path(__file__).with_name("jobs") / "dying_node.py",
            tmp_path_factory.mktemp("ray"),
        ],
        env=os.environ | {"PYTHONPATH": python_path(JOBS, Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"found": ["a", "wait_once", "b", "c", "d"], "waited": 1}


@pytest.mark.long
def test_a_cluster_without_a_cpu_is_not_waited_for_without_end(environ, tmp_path_factory) -> None:
    with ray_cluster(tmp_path_factory.mktemp("ray"), environ, cpus=0) as empty:
        code = """
from profdeck_ray import executor
executor.NO_NODE_S = executor.LOOK_S = 0.5
obeyed(["a"])
"""
        done = subprocess.run(
            [sys.executable, "-c", DRIVER + code, empty.address],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "ConfigError: The Ray cluster has had no CPU for 0.5 s" in done.stderr


def test_any_other_exception_is_raised_with_the_item(drive) -> None:
    done = drive("obeyed(['a', 'fault', 'b'])")
    assert done.returncode == 1
    assert "ValueError: a bug\nThis happened in fault." in done.stderr


def test_a_file_that_is_not_on_the_node_is_said_with_the_node(drive) -> None:
    done = drive("print(json.dumps(texts(RayExecutor(address)(check, [Path('/none')], [0]))))")
    (text,) = answer(done)  # type: ignore[misc]
    assert text.startswith("TraceError: Cannot read /none: No such file or directory. The error occurred on the Ray")


def test_a_function_that_the_nodes_cannot_import(drive, tmp_path) -> None:
    (tmp_path / "only_here.py").write_text("def name(item, on_progress):\n    return item\n")
    done = drive(
        """
sys.path.insert(0, arguments[0])
import only_here
try:
    RayExecutor(address)(only_here.name, ["a"], [1])
except ProfdeckError as error:
    print(json.dumps(str(error)))
""",
        str(tmp_path),
    )
    text = str(answer(done))
    assert "No module named 'only_here'" in text
    assert text.endswith("and its dependencies.")


def test_another_version_of_ray_is_refused(drive) -> None:
    done = drive(
        """
import ray
ray.__version__ = "2.0.0"
try:
    obeyed(["a"])
except ProfdeckError as error:
    print(json.dumps([type(error).__name__, str(error), ray.is_initialized()]))
"""
    )
    kind, text, initialised = answer(done)  # type: ignore[misc]
    assert (kind, initialised) == ("ConfigError", False)
    assert "Cannot join the Ray cluster at 127.0.0.1:" in text
    assert "2.0.0" in text


def test_a_ray_that_was_initialised_before_stays_so(drive) -> None:
    done = drive(
        """
import ray
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
before = obeyed(["a"]), ray.is_initialized()
ray.shutdown()
print(json.dumps([before, [obeyed(["a"]), ray.is_initialized()]]))
"""
    )
    assert answer(done) == [[["a"], True], [["a"], False]]


@pytest.mark.parametrize("initialised_before", [False, True])
def test_an_interrupt_ends_the_tasks(drive, tmp_path, initialised_before) -> None:
    done = drive(
        """
import signal, threading, time
def interrupt():
    while len(list(Path(arguments[0]).parent.glob("at.*"))) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
import ray
if arguments[1] == "True":
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
threading.Thread(target=interrupt, daemon=True).start()
try:
    obeyed([f"wait {arguments[0]}"] * 3)
except KeyboardInterrupt:
    pids = [int(path.suffix[1:]) for path in Path(arguments[0]).parent.glob("at.*")]
    end_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.01)
    print(json.dumps([Path(f"/proc/{pid}").exists() for pid in pids]))
""",
        str(tmp_path / "at"),
        str(initialised_before),
    )
    left = answer(done)
    assert isinstance(left, list)
    assert len(left) >= 2
    assert not any(left)
