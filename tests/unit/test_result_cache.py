"""Results are kept for the next question, and trusted only where nobody and nothing else could have changed them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from profdeck_traces.base.result_cache import ResultCache

KEY, OTHER = "ab" + "0" * 62, "cd" + "1" * 62


@pytest.fixture
def cache(tmp_path: Path) -> ResultCache:
    found = ResultCache.of_user({"PROFDECK_CACHE": str(tmp_path / "cache")})
    assert found is not None
    return found


def files(cache: ResultCache) -> list[Path]:
    return [path for path in cache.directory.rglob("*") if path.is_file()]


def test_a_result_is_there_until_the_cache_goes(cache: ResultCache) -> None:
    assert cache.get(KEY) is None
    cache.put(KEY, b"one")
    cache.put(OTHER, b"")
    assert (cache.get(KEY), cache.get(OTHER)) == (b"one", b"")
    cache.put(KEY, b"two")
    assert cache.get(KEY) == b"two"
    assert len(files(cache)) == 2
    (path,) = [path for path in files(cache) if path.read_bytes().endswith(b"two")]
    path.unlink()
    assert cache.get(KEY) is None


@pytest.mark.parametrize("at", [0, 18, 20, -1])
def test_a_damaged_result_is_none_and_goes(cache: ResultCache, at: int) -> None:
    cache.put(KEY, b"a result")
    (path,) = files(cache)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert cache.get(KEY) is None
    assert files(cache) == []


@pytest.mark.parametrize("size", [0, 10, 25])
def test_a_cut_result_is_none(cache: ResultCache, size: int) -> None:
    cache.put(KEY, b"a result")
    (path,) = files(cache)
    path.write_bytes(path.read_bytes()[:size])
    assert cache.get(KEY) is None


def test_the_result_of_another_key_is_none(cache: ResultCache) -> None:
    cache.put(KEY, b"a result")
    (path,) = files(cache)
    target = cache.directory / OTHER[:2] / OTHER[2:]
    target.parent.mkdir()
    path.rename(target)
    assert cache.get(OTHER) is None


def test_a_link_is_not_followed(cache: ResultCache, tmp_path: Path) -> None:
    cache.put(KEY, b"a result")
    (path,) = files(cache)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.get(KEY) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(mode)
    assert ResultCache.of_user({"PROFDECK_CACHE": str(directory)}) is None


def test_a_cache_can_be_off_or_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert ResultCache.of_user({"PROFDECK_CACHE": "off"}) is None
    (tmp_path / "file").touch()
    assert ResultCache.of_user({"PROFDECK_CACHE": str(tmp_path / "file" / "cache")}) is None
    assert ResultCache.of_user({"PROFDECK_CACHE": str(tmp_path / "file")}) is None
    monkeypatch.setattr(Path, "home", no_home)
    assert ResultCache.of_user({}) is None
    home = ResultCache.of_user({"XDG_CACHE_HOME": str(tmp_path)})
    assert home is not None
    assert home.directory == tmp_path / "profdeck" / "results"
    assert home.directory.stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_written_is_not_kept(cache: ResultCache) -> None:
    (cache.directory / KEY[:2]).touch()
    cache.put(KEY, b"a result")
    assert cache.get(KEY) is None


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path, max_bytes=10_000)
    keys = [f"{number:02d}{'0' * 62}" for number in range(20)]
    for number, key in enumerate(keys):
        cache.put(key, bytes(800))
        os.utime(cache.directory / key[:2] / key[2:], (number, number))
    assert cache.get(keys[0]) is not None  # used now
    cache.evict()
    left = {key for key in keys if cache.get(key) is not None}
    assert keys[0] in left
    assert {*keys[-8:]} < left
    assert keys[1] not in left
    assert sum(path.stat().st_size for path in files(cache)) <= 8_000
    cache.put("ee" + "0" * 62, bytes(20_000))
    assert cache.get("ee" + "0" * 62) is None  # more than all that may be kept


def test_many_may_write_at_once(cache: ResultCache) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: [cache.put(KEY, content) for _ in range(5)], contents))
    assert cache.get(KEY) in contents
    assert len(files(cache)) == 1
