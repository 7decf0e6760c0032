"""Job whose pipeline is captured because of its config, without a request."""

from __future__ import annotations

from _job import ENGINE, picture
from vllm_omni.entrypoints.omni import Omni


def main() -> None:
    """Generate four images."""
    omni = Omni(**ENGINE)
    for _ in range(4):
        list(omni.generate(["hello"], picture()))
    omni.close()


if __name__ == "__main__":
    main()
