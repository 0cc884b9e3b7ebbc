"""Where the replicas are: fixed addresses, and DNS names whose addresses come and go.

`dns:HOST:PORT` stands for every address of HOST. Knows nothing of what is at an address.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

logger = logging.getLogger(__name__)

DNS_PREFIX = "dns:"
LOOKUP_SECONDS = 5.0

Lookup = Callable[[str, int], Awaitable[list[str]]]


async def system_lookup(host: str, port: int) -> list[str]:
    """Every A and AAAA address of `host`, as `address:port`. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [
        f"[{own[0]}]:{port}" if family == socket.AF_INET6 else f"{own[0]}:{port}" for family, *_, own in found
    ]


class Resolver:
    """The addresses of `names`, each once: those given by themselves first, in order.

    A name that cannot be resolved keeps the addresses it had; the log says so once, and when it works again.
    """

    def __init__(self, names: Sequence[str], lookup: Lookup = system_lookup) -> None:
        self._static = [name for name in names if not name.startswith(DNS_PREFIX)]
        self._dns: dict[str, list[str]] = {name: [] for name in names if name.startswith(DNS_PREFIX)}
        self._lookup = lookup
        self._running: dict[str, asyncio.Future[list[str]]] = {}
        self._failing: set[str] = set()

    @property
    def changes(self) -> bool:
        """Whether there is a name whose addresses may change."""
        return bool(self._dns)

    def known(self) -> dict[str, str]:
        """Every address known now, with the host name that a certificate there is for (empty: its own)."""
        addresses = dict.fromkeys(self._static, "")
        for name, found in self._dns.items():
            host = _parts(name)[0]
            for address in found:
                addresses.setdefault(address, host)
        return addresses

    async def resolve(self) -> dict[str, str]:
        """Look all names up, at once and for at most `LOOKUP_SECONDS`; then as `known`."""
        await asyncio.gather(*(self._resolve(name) for name in self._dns))
        return self.known()

    async def _resolve(self, name: str) -> None:
        # A lookup that hangs holds a thread: the next round waits for it instead of starting another.
        if name not in self._running:
            self._running[name] = asyncio.ensure_future(self._lookup(*_parts(name)))
        lookup = self._running[name]
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                found = await asyncio.shield(lookup)
        except TimeoutError:
            if lookup.done():  # its own error; ours leaves it running
                del self._running[name]
            self._note(name, f"no answer within {LOOKUP_SECONDS:.0f} s")
        except OSError as error:
            del self._running[name]
            self._note(name, str(error))
        else:
            del self._running[name]
            self._dns[name] = sorted(found) or self._dns[name]
            self._note(name, "" if found else "it has no address")

    def _note(self, name: str, problem: str) -> None:
        if problem and name not in self._failing:
            self._failing.add(name)
            kept = ", ".join(self._dns[name]) or "none"
            logger.warning("--replica %s: %s; keeping the addresses known: %s", name, problem, kept)
        elif not problem and name in self._failing:
            self._failing.discard(name)
            logger.info("--replica %s is resolved again", name)


def _parts(name: str) -> tuple[str, int]:
    host, _, port = name.removeprefix(DNS_PREFIX).rpartition(":")
    return host, int(port)
