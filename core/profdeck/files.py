"""Files that appear whole or not at all, and never replace another."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# What file systems without hard links answer: FAT, some network and user-space ones.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its name, in the same directory.

    Raises:
        FileExistsError: the name is taken; the temporary file is left where it is.
        OSError: the file system refuses.
    """
    try:
        os.link(temporary, path)  # unlike rename, fails if the name is taken
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))  # takes the name, or fails
        temporary.replace(path)
    else:
        temporary.unlink()
