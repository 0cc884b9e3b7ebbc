"""A server as a process: logging set up, the event loop run, an exit status at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop

from rose_engine.errors import EngineError
from tulip_server.config import ServerConfig
from tulip_server.errors import DeviceHung, StoppedWhileLoading, TulipError
from tulip_server.logs import logging_to

if TYPE_CHECKING:
    from tulip_server.server import ServableEngine

log = logging.getLogger(__name__)


def run(config: ServerConfig, load_engine: Callable[[], ServableEngine]) -> int:
    """Serve to the end. Exit status: 0 drained, or stopped while loading; 1 could not start, or died.

    Does not return where a thread would keep the process from ending, one that still loads the engine or that
    waits for a device that hangs: everybody has been answered then.
    """
    with logging_to(sys.stderr, config.log_level, config.log_format):
        status, threads_left = _serve(config, load_engine)
    if threads_left:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)
    return status


def _serve(config: ServerConfig, load_engine: Callable[[], ServableEngine]) -> tuple[int, bool]:
    """The exit status, and whether threads are left that nobody can end."""
    # gRPC reads this when it is imported; what it would write beside our own line helps nobody.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from tulip_server.server import serve

    try:
        uvloop.run(serve(config, load_engine))
    except StoppedWhileLoading as stopped:
        log.info("%s", stopped)
        return 0, True
    except DeviceHung as error:
        return complain(error, 1), True
    except (TulipError, EngineError) as error:
        if config.debug:
            raise
        return complain(error, 1), False
    except KeyboardInterrupt:  # before the loop took over the signal
        return 130, False
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun: a second one changes nothing
    return 0, False


def complain(error: Exception, status: int) -> int:
    """One line on standard error; gives `status` back."""
    with contextlib.suppress(OSError, ValueError):  # nobody to tell is no reason to end otherwise
        sys.stderr.write(f"tulip_server: error: {error}\n")
    return status
