"""Cache of analysis results: storage, validation, eviction and permissions."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from profdeck_traces.base.result_cache import ResultCache

KEY, OTHER_KEY = "ab" + "0" * 62, "cd" + "1" * 62


@pytest.fixture
def cache(tmp_path: Path) -> ResultCache:
    result_cache = ResultCache.of_user({"PROFDECK_CACHE": str(tmp_path / "cache")})
    assert result_cache is not None
    return result_cache


def find_files(cache: ResultCache) -> list[Path]:
    return [path for path in cache.directory.rglob("*") if path.is_file()]


def test_result_is_returned_until_its_file_is_deleted(cache: ResultCache) -> None:
    assert cache.get(KEY) is None
    cache.put(KEY, b"one")
    cache.put(OTHER_KEY, b"")
    assert (cache.get(KEY), cache.get(OTHER_KEY)) == (b"one", b"")
    cache.put(KEY, b"two")
    assert cache.get(KEY) == b"two"
    assert len(find_files(cache)) == 2
    (path,) = [path for path in find_files(cache) if path.read_bytes().endswith(b"two")]
    path.unlink()
    assert cache.get(KEY) is None


@pytest.mark.parametrize("position", [0, 18, 20, -1])
def test_corrupt_result_is_deleted(cache: ResultCache, position: int) -> None:
    cache.put(KEY, b"a result")
    (path,) = find_files(cache)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    assert cache.get(KEY) is None
    assert find_files(cache) == []


@pytest.mark.parametrize("size", [0, 10, 25])
def test_truncated_result_is_ignored(cache: ResultCache, size: int) -> None:
    cache.put(KEY, b"a result")
    (path,) = find_files(cache)
    path.write_bytes(path.read_bytes()[:size])
    assert cache.get(KEY) is None


def test_result_of_another_key_is_ignored(cache: ResultCache) -> None:
    cache.put(KEY, b"a result")
    (path,) = find_files(cache)
    target = cache.directory / OTHER_KEY[:2] / OTHER_KEY[2:]
    target.parent.mkdir()
    path.rename(target)
    assert cache.get(OTHER_KEY) is None


def test_symlink_is_not_followed(cache: ResultCache, tmp_path: Path) -> None:
    cache.put(KEY, b"a result")
    (path,) = find_files(cache)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.get(KEY) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_directory_writable_by_other_users_is_not_used(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(mode)
    assert ResultCache.of_user({"PROFDECK_CACHE": str(directory)}) is None


def test_cache_is_none_if_disabled_or_not_creatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert ResultCache.of_user({"PROFDECK_CACHE": "off"}) is None
    (tmp_path / "file").touch()
    assert ResultCache.of_user({"PROFDECK_CACHE": str(tmp_path / "file" / "cache")}) is None
    assert ResultCache.of_user({"PROFDECK_CACHE": str(tmp_path / "file")}) is None
    monkeypatch.setattr(Path, "home", raise_no_home)
    assert ResultCache.of_user({}) is None
    home_cache = ResultCache.of_user({"XDG_CACHE_HOME": str(tmp_path)})
    assert home_cache is not None
    assert home_cache.directory == tmp_path / "profdeck" / "results"
    assert home_cache.directory.stat().st_mode & 0o777 == 0o700


def test_unwritable_result_is_ignored(cache: ResultCache) -> None:
    (cache.directory / KEY[:2]).touch()
    cache.put(KEY, b"a result")
    assert cache.get(KEY) is None


def test_least_recently_used_results_are_evicted(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path, max_bytes=10_000)
    keys = [f"{number:02d}{'0' * 62}" for number in range(20)]
    for number, key in enumerate(keys):
        cache.put(key, bytes(800))
        os.utime(cache.directory / key[:2] / key[2:], (number, number))
    assert cache.get(keys[0]) is not None  # updates the time of its last use
    cache.evict()
    cached_keys = {key for key in keys if cache.get(key) is not None}
    assert keys[0] in cached_keys
    assert {*keys[-8:]} < cached_keys
    assert keys[1] not in cached_keys
    assert sum(path.stat().st_size for path in find_files(cache)) <= 8_000
    cache.put("ee" + "0" * 62, bytes(20_000))
    assert cache.get("ee" + "0" * 62) is None  # larger than the limit


def test_concurrent_writes_leave_one_complete_result(cache: ResultCache) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: [cache.put(KEY, content) for _ in range(5)], contents))
    assert cache.get(KEY) in contents
    assert len(find_files(cache)) == 1
