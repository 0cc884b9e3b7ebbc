"""Certificates: what the gateway shows to servers, whose it trusts, and what it shows to clients.

Files are read and checked at start. Knows nothing of connections.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError


def replica_credentials(config: GatewayConfig) -> grpc.ChannelCredentials | None:
    """What connections to replicas are made with; `None`: in the clear. Raises `StartupError`."""
    if config.replica_ca is None:
        return None
    context = ssl.create_default_context()
    authority = _read(config.replica_ca, "--replica-ca")
    try:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"--replica-ca {config.replica_ca} holds no certificate: {error}") from None
    if config.replica_certificate is None or config.replica_key is None:
        return grpc.ssl_channel_credentials(authority)
    _check_pair(config.replica_certificate, config.replica_key, "--replica-certificate", "--replica-key")
    key = _read(config.replica_key, "--replica-key")
    return grpc.ssl_channel_credentials(
        authority, key, _read(config.replica_certificate, "--replica-certificate")
    )


def check_server_certificate(config: GatewayConfig) -> None:
    """Raise `StartupError` unless clients can be served with `--tls-certificate` and its key, where given."""
    if config.tls_certificate is not None and config.tls_key is not None:
        _check_pair(config.tls_certificate, config.tls_key, "--tls-certificate", "--tls-key")


def _check_pair(certificate: Path, key: Path, certificate_flag: str, key_flag: str) -> None:
    _read(certificate, certificate_flag)
    _read(key, key_flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(
            f"{certificate_flag} {certificate} and {key_flag} {key} do not make a pair: {error}"
        ) from None


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{flag} {path} cannot be read: {error.strerror or error}") from None
