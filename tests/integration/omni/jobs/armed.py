"""A pipeline that a config alone captures."""

from __future__ import annotations

from _job import ENGINE, picture
from vllm_omni.entrypoints.omni import Omni


def main() -> None:
    """Run it."""
    omni = Omni(**ENGINE)
    for _ in range(4):
        list(omni.generate(["hello"], picture()))
    omni.close()


if __name__ == "__main__":
    main()
