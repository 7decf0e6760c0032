"""Installs distributions without code: only their metadata, in a directory of the import path."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, name: str, entry_points: str = "", version: str = "1.0") -> None:
    """Write the metadata of a distribution to a directory. Create the directory if necessary.

    Args:
        site: the directory, which the caller adds to the import path.
        name: the name of the distribution.
        entry_points: the text of its `entry_points.txt`.
        version: its version.
    """
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(entry_points)
