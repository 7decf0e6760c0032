"""Install distributions that consist only of metadata into a directory on the import path."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, name: str, entry_points: str = "", version: str = "1.0") -> None:
    """Write a distribution's metadata to a directory, creating the directory if necessary.

    Args:
        site: the directory, which the caller adds to the import path.
        name: the name of the distribution.
        entry_points: the content of its `entry_points.txt`.
        version: its version.
    """
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(entry_points)
