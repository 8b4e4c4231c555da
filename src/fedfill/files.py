"""Reading files that others name: a device or a pipe, which may never end, is refused, and so is what is far too large.

No torch is needed here, so that a slip costs nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

SETTINGS = 4 * 2**20
"""Bytes that a file of settings has at the most; a table of a thousand rows has a tenth."""


def check_regular(path: Path) -> None:
    """Refuse what is no file, for those who open it by its name.

    Args:
        path: Where it lies.

    Raises:
        OSError: Where there is nothing, or a folder, a pipe or a device.
    """
    _check(path.stat())


def read_regular(path: Path, most: int | None = None) -> bytes:
    """What a file holds; nothing else is read.

    Args:
        path: Where it lies.
        most: Bytes that it may have; None: as many as it has.

    Returns:
        Its bytes.

    Raises:
        OSError: Where it can't be read, is a folder, a pipe or a device, or has more bytes.
    """
    # looked at once it is open, so that it can't be another one by then; a pipe must not wait for its other end
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        _check(os.fstat(handle))
        found = file.read() if most is None else file.read(most + 1)
    if most is not None and len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return found


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
