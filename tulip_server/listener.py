"""A place where clients connect: a TCP port, with TLS if asked, or a Unix socket, before the engine loads.

Knows gRPC's server and what it is told about keys; nothing of what is served.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from protos import codec
from protos.tulip.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from tulip_server.config import ServerConfig
from tulip_server.errors import StartupError
from tulip_server.gate import Gate
from tulip_server.health import INFERENCE_SERVICE, SERVICES
from tulip_server.socket_file import created_with, make_room

_OPTIONS: tuple[tuple[str, int], ...] = (
    *codec.CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """A gRPC server that has its place. Once open it answers: until `gate` is, that the engine loads."""

    server: grpc.aio.Server
    address: str  # what a client dials
    port: int | None  # None: a Unix socket
    gate: Gate = field(default_factory=Gate)
    health: health.aio.HealthServicer = field(default_factory=health.aio.HealthServicer)

    @classmethod
    def bind(cls, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> Listener:
        """Take a TCP port (0: any free one). Raises `StartupError` when it cannot be had."""
        server = grpc.aio.server(options=_OPTIONS)
        where = address(host, port)
        try:
            if credentials is None:
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {where}: in use, or not ours to take") from error
        return cls(server, address(host, port), port)

    @classmethod
    def bind_socket(cls, path: Path, mode: int) -> Listener:
        """Listen on a Unix socket that only those may connect to whom `mode` allows.

        One that a dead server left behind is replaced. Raises `StartupError` for one in use, or for a file
        that is none.
        """
        make_room("--socket", path)
        server = grpc.aio.server(options=_OPTIONS)
        where = f"unix:{path.absolute()}"
        try:
            with created_with(mode):
                server.add_insecure_port(where)
        except RuntimeError as error:
            raise StartupError(f"--socket: cannot listen on {path}") from error
        return cls(server, where, None)

    async def open(self) -> None:
        """Answer calls, and with health: not serving."""
        add_InferenceServicer_to_server(self.gate, self.server)
        add_HealthServicer_to_server(self.health, self.server)
        names = [INFERENCE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)
        for service in SERVICES:
            await self.health.set(service, HealthCheckResponse.NOT_SERVING)
        await self.server.start()


@contextlib.contextmanager
def bound(config: ServerConfig) -> Iterator[Listener]:
    """The listener that the configuration asks for; a socket's file is gone when the context ends.

    Raises `StartupError` for a place that cannot be had and for certificates or keys that are none.
    """
    if config.socket is None:
        yield Listener.bind(config.host, config.port, credentials(config))
        return
    listener = Listener.bind_socket(config.socket, int(config.socket_mode, 8))
    try:
        yield listener
    finally:
        config.socket.unlink(missing_ok=True)


def credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """What TLS needs; `None` without. Raises `StartupError`, naming the flag, for files that do not do."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    key, certificate = _read("--tls-key", config.tls_key), _read("--tls-certificate", config.tls_certificate)
    authorities = None if config.tls_client_ca is None else _read("--tls-client-ca", config.tls_client_ca)
    _check_pair(config.tls_certificate, config.tls_key)
    if config.tls_client_ca is not None:
        _check_authorities(config.tls_client_ca)
    pair = [(key, certificate)]
    return grpc.ssl_server_credentials(pair, authorities, require_client_auth=authorities is not None)


def address(host: str, port: int) -> str:
    """Host and port as one string."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read(flag: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StartupError(f"{flag}: {file}: {error.strerror}") from error


def _check_pair(certificate: Path, key: Path) -> None:
    """gRPC says nothing of what is wrong with a file: let OpenSSL say it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a passphrase is refused, not asked for on a terminal that nobody watches.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(
            f"--tls-certificate {certificate} and --tls-key {key} are no PEM pair: {_reason(error)}"
        ) from error


def _check_authorities(file: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except ssl.SSLError as error:
        raise StartupError(f"--tls-client-ca: {file} holds no PEM certificate: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
