"""Who may ask: API keys, for every path and method but the probes of an orchestrator.

A request without a key ends here, before routes are looked at: an unknown path, a stray slash or another
method is no way around. Knows nothing of what the routes do.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from ivy_gateway.config import GatewayConfig, check_api_key
from ivy_gateway.errors import StartupError, Unauthorized
from ivy_gateway.routes.render import Family, render

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 2.0
PROBES = frozenset({"/live", "/health", "/ping"})
_SCHEME = b"bearer"


class ApiKeys:
    """The keys that are let in; none at all: everybody is. Keeps digests only."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    @classmethod
    def read(cls, config: GatewayConfig) -> ApiKeys:
        """The keys of the settings and of their file. Raises `StartupError`, naming the file and the line."""
        file = config.api_keys_file
        return cls([*config.api_keys, *([] if file is None else _read_file(file))])

    async def follow(self, config: GatewayConfig) -> None:
        """Let in the keys that the file holds, as it changes. A broken file changes nothing."""
        if config.api_keys_file is None:
            return
        seen = _version(config.api_keys_file)
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            if (version := _version(config.api_keys_file)) == seen:
                continue
            seen = version
            try:
                self._digests = self.read(config)._digests
            except StartupError as error:
                logger.warning("the keys stay as they were: %s", error.message)
            else:
                logger.info("--api-keys-file was read again: %d keys in all", len(self._digests))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admits(self, authorization: bytes) -> bool:
        """Whether the header's value is a key, after `Bearer` or bare, as some clients send it.

        Takes as long for a nearly right key as for any other of the same length.
        """
        scheme, _, rest = authorization.strip().partition(b" ")
        key = rest.strip() if scheme.lower() == _SCHEME else authorization.strip()
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


class RequireKey:
    """Answers 401 to requests without a key, in the words of the family that their path belongs to."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str], family_of: Callable[[str], Family]
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._family_of = family_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass `scope` on if it may."""
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._admits(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("an API key is needed: send it as `Authorization: Bearer KEY`")
        await render(error, self._family_of(scope["path"]))(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and self._keys.admits(given[0])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _version(path: Path) -> tuple[int, int, int] | None:
    """Something that is another one after every change of the file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read_file(path: Path) -> list[str]:
    """One key a line; empty lines and those that start with # do not count."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--api-keys-file {path} cannot be read: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if key and not key.startswith("#"):
            keys.append(check_api_key(key, f"--api-keys-file {path}, line {number}"))
    if not keys:
        raise StartupError(f"--api-keys-file {path} holds no key")
    return keys
