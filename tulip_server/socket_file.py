"""The file of a Unix socket: who may connect, what a dead server left of it, and its end.

Knows nothing of what listens there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from protos.frames import MAX_SOCKET_PATH_BYTES
from tulip_server.errors import StartupError


def make_room(flag: str, path: Path) -> None:
    """Remove what a dead server left at `path`.

    Raises `StartupError`, naming the flag, for a socket in use, for a file that is none, and for a path that
    is too long for one.
    """
    if len(os.fsencode(path.absolute())) > MAX_SOCKET_PATH_BYTES:
        raise StartupError(f"{flag}: {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartupError(f"{flag}: {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(found):
        raise StartupError(f"{flag}: {path} is there already, and no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise StartupError(f"{flag}: {path}: {error.strerror}") from error
    raise StartupError(f"{flag}: {path} is in use")


@contextlib.contextmanager
def created_with(mode: int) -> Iterator[None]:
    """A file made in this context has this mode: there is no moment in which others could connect."""
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)
