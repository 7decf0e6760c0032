"""Tests of recorded facts: queries, files and error messages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from release_facts import Code, CommittedFacts, MissingFactError, Wheel, differences, dumps, facts_file, load_facts

SOURCE = '''
from .base import Base
LIMIT: int = 3
FILES = ["a.json", make(LIMIT)]

class Engine(Base):
    size: int
    def start(self, request, *, wait: bool = True, **options):
        """Start."""
        self.count = 0
        self.count += 1
        self.path = f"rank_{self.rank}_{os.getpid()}.json"
        prepare(request)
        send(prepare(request), wait=wait)
        if not self.path:
            raise ValueError

@app.get("/start", tags=["profile"])
async def start_engine(): ...
'''


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    file = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("engine.py", SOURCE)
    return Wheel(file, "engine", "1.0")


def open_module(release: Wheel | CommittedFacts) -> Code:
    assert release.defines("engine.py", "<module>")
    return Code(release, "engine.py")


def read_facts(module: Code) -> dict[str, object]:
    engine = module["Engine"]
    start = engine["start"]
    return {
        "bases": engine.bases,
        "size": engine.annotation("size"),
        "parameters": start.parameters,
        "defaults": start.defaults,
        "raises": start.raises,
        "count": start.values("self.count"),
        "path": start.values("self.path"),
        "attributes": start.attributes_set,
        "order": start.call("prepare") < start.call("send"),
        "missing call": start.call("stop"),
        "keyword": start.keyword("wait"),
        "name": start.uses("self.rank"),
        "literal": start.has_literal("rank_{self.rank}_{}.json"),
        "limit": module.constant("LIMIT"),
        "files": module.constant("FILES"),
        "import": module.imported_from("Base"),
        "route": module.decorated("app.get('/start')"),
        "async": module["start_engine"].is_async,
        "stop": "stop" in engine,
    }


FACTS = {
    "bases": ["Base"],
    "size": "int",
    "parameters": ["request", "*", "wait", "**options"],
    "defaults": {"wait": "True"},
    "raises": True,
    "count": ["0", "+= 1"],
    "path": ["'rank_{self.rank}_{}.json'"],
    "attributes": ["self.count", "self.path"],
    "order": True,
    "missing call": None,
    "keyword": ["wait"],
    "name": True,
    "literal": True,
    "limit": "3",
    "files": "['a.json', make(...)]",
    "import": ".base",
    "route": "start_engine",
    "async": True,
    "stop": False,
}


@pytest.fixture
def committed(wheel: Wheel, tmp_path: Path) -> CommittedFacts:
    """Record the facts that `read_facts` reads and load them from the file."""
    read_facts(open_module(wheel))
    facts_file(tmp_path, "engine", "1.0").write_text(dumps(wheel.facts))
    return CommittedFacts(tmp_path, "engine", "1.0")


def test_committed_facts_equal_the_facts_of_the_wheel(wheel: Wheel, committed: CommittedFacts) -> None:
    assert read_facts(open_module(wheel)) == read_facts(open_module(committed)) == FACTS


def test_the_file_identifies_the_wheel_and_contains_no_statements(committed: CommittedFacts) -> None:
    text = committed.file.read_text()
    facts = json.loads(text)
    assert (facts["distribution"], facts["version"]) == ("engine", "1.0")
    assert facts["wheel"] == "engine-1.0-py3-none-any.whl"
    assert len(facts["sha256"]) == 64
    assert "prepare(request)" not in text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (lambda module: module["Engine"].constant("LIMIT"), "engine.py: Engine: constants"),
        (lambda module: module.constant("OTHER"), "engine.py: <module>: constants: OTHER"),
        (lambda module: "Other" in module, "engine.py: Other"),
        (lambda module: module.release.defines("other.py", "<module>"), "other.py"),
    ],
)
def test_a_missing_fact_raises_an_error(committed: CommittedFacts, query, message: str) -> None:
    with pytest.raises(MissingFactError, match=f"has no fact {message}. Run `nox -s contract_facts`"):
        query(open_module(committed))


def test_a_missing_file_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFactError, match="engine-2.0.json does not exist. Run `nox -s contract_facts`"):
        CommittedFacts(tmp_path, "engine", "2.0")


def test_reading_source_text_requires_the_wheel(committed: CommittedFacts) -> None:
    with pytest.raises(MissingFactError, match="engine.py: Engine: a test reads source text. Mark it with `wheels`."):
        _ = open_module(committed)["Engine"].text


def test_each_difference_message_contains_the_fact(wheel: Wheel, committed: CommittedFacts) -> None:
    facts = json.loads(committed.file.read_text())
    engine = facts["files"]["engine.py"]["Engine"]
    engine["bases"] = ["Other"]
    engine["is_async"] = False
    del engine["annotations"]
    facts["sha256"] = "0"
    size, base, unused, digest = sorted(differences(facts, wheel.facts))
    assert base == 'engine 1.0: engine.py: Engine: bases: ["Other"] in the committed facts, ["Base"] in the wheel'
    assert unused == "engine 1.0: engine.py: Engine: is_async: no test reads this fact"
    assert size == 'engine 1.0: engine.py: Engine: annotations: size: "int" in the wheel, not in the committed facts'
    assert digest.startswith('engine 1.0: sha256: "0" in the committed facts, ')


CONFTEST = Path(__file__).with_name("conftest.py")
INI = f"""
[pytest]
pythonpath = {CONFTEST.parents[1]}
addopts = --import-mode=importlib -p no:cacheprovider
markers = wheels
"""
CONTRACT = """
import os
import pytest

def test_bases(code):
    assert code("engine", "1.0", "engine.py")["Engine"].bases == ["Base"]

def test_start(code):
    assert code("engine", "1.0", "engine.py")["start_engine"].is_async

def test_a_device():
    if "SKIP" in os.environ:
        pytest.skip("needs a device")
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(wheel: Wheel, tmp_path: Path) -> Run:
    """Return a function that runs pytest on a contract test of the wheel."""
    cached = tmp_path / "cache" / "profdeck" / "wheels" / "engine-1.0"
    cached.mkdir(parents=True)
    wheel.file.rename(cached / wheel.file.name)
    (tmp_path / "contract").mkdir()
    shutil.copy(CONFTEST, tmp_path / "contract")
    (tmp_path / "contract" / "test_engine.py").write_text(CONTRACT)
    (tmp_path / "pytest.ini").write_text(INI)

    def run(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=tmp_path,
            env=os.environ | {"PYTEST_ADDOPTS": "", "XDG_CACHE_HOME": str(tmp_path / "cache")} | environ,
            check=False,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def facts(run: Run, tmp_path: Path) -> Path:
    """Write the facts of the wheel and return their file."""
    result = run("contract", "--facts=write")
    assert result.returncode == 0, result.stdout + result.stderr
    return tmp_path / "contract" / "facts" / "engine-1.0.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"version": "1.0"', '"version": "1.1"'), 'engine 1.0: version: "1.1" in the commit'),
        (lambda text: text[:40], "engine-1.0.json is corrupt (JSONDecodeError: "),
    ],
    ids=["version", "truncated"],
)
def test_a_changed_file_fails_the_check_and_is_replaced(
    run: Run, facts: Path, change: Callable[[str], str], message: str
) -> None:
    text = facts.read_text()
    facts.write_text(change(text))

    result = run("contract", "--facts=check")
    assert result.returncode == 1, result.stdout
    assert message in result.stdout
    assert "Run `nox -s contract_facts`" in result.stdout
    assert "INTERNALERROR" not in result.stdout

    assert run("contract", "--facts=write").returncode == 0
    assert facts.read_text() == text


def test_complete_facts_pass_the_check(run: Run, facts: Path) -> None:
    result = run("contract", "--facts=check")
    assert result.returncode == 0, f"{facts}: {result.stdout}"


@pytest.mark.parametrize(
    ("mode", "options", "environ", "reason"),
    [
        ("check", ["contract", "-k", "bases"], {}, "2 tests are deselected."),
        ("write", ["contract", "-k", "bases"], {}, "2 tests are deselected."),
        ("write", ["contract/test_engine.py::test_bases"], {}, "The command line selects single tests."),
        ("write", ["contract"], {"SKIP": "1"}, "1 tests did not pass, the first is contract/test_engine.py::"),
    ],
    ids=["check", "deselected", "node", "skipped"],
)
def test_facts_require_all_tests(
    run: Run, tmp_path: Path, mode: str, options: list[str], environ: dict[str, str], reason: str
) -> None:
    result = run(*options, f"--facts={mode}", **environ)

    assert result.returncode == 1, result.stdout
    assert reason in result.stdout
    assert f"--facts={mode} requires that all contract tests pass; it changed no file." in result.stdout
    assert not (tmp_path / "contract" / "facts").exists()


@pytest.mark.parametrize("mode", ["check", "write"])
def test_facts_require_one_process(run: Run, tmp_path: Path, mode: str) -> None:
    result = run("contract", f"--facts={mode}", PYTEST_ADDOPTS="-n 2")

    assert result.returncode == pytest.ExitCode.USAGE_ERROR, result.stdout
    assert f"--facts={mode} requires all tests in one process. Remove -n" in result.stderr
    assert not (tmp_path / "contract" / "facts").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 1}', "\xff"])
def test_a_corrupt_file_raises_an_error(tmp_path: Path, text: str) -> None:
    file = facts_file(tmp_path, "engine", "1.0")
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"engine-1.0.json is corrupt \("):
        load_facts(file)
