"""Exclude the packages' tests: `tests/unit/test_third_party_package.py` runs them where the packages are installed."""

collect_ignore_glob = ["*/tests"]
