"""What an operator sets: flags, each of them also an environment variable `TULIP_<FLAG>`; flags win.

Knows names and ranges of settings; what a device, dtype or attention backend is, the engine decides.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from tulip_server.errors import ConfigError

_ENVIRONMENT_PREFIX = "TULIP_"
_SWITCH = {"1": True, "0": False}
_CHOICES = {
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
    "socket_mode": ("600", "660"),
}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server's settings, checked. Raises `ConfigError`, naming the flag, for a value out of range."""

    model: Path
    model_id: str | None = None
    task: str = "auto"
    host: str = "127.0.0.1"
    port: int = 50051
    socket: Path | None = None
    frames_socket: Path | None = None
    socket_mode: str = "600"
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    ready_file: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    allow_reference_gap: bool = False
    threads: int | None = None
    max_batch_tokens: int | None = None
    max_batch_sequences: int | None = None
    max_waiting_tokens: int | None = None
    reserved_tokens: int | None = None
    bulk_patience_seconds: float = 0.5
    depth: int = 2
    cold_step_seconds: float = 60.0
    drain_seconds: float = 30.0
    metrics_port: int | None = None
    otlp_endpoint: str | None = None
    log_level: str = "info"
    log_format: str = "text"
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            self._check_range(name, 0, 65535)
        for name in ("threads", "max_batch_tokens", "max_batch_sequences", "max_waiting_tokens", "depth"):
            self._check_range(name, 1, None)
        for name in ("reserved_tokens", "bulk_patience_seconds", "drain_seconds"):
            self._check_range(name, 0, None)
        self._check_range("cold_step_seconds", 1, None)
        for name, choices in _CHOICES.items():
            self._check_choice(name, choices)
        self._check_tls()
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint: {self.otlp_endpoint!r} is not an http or https URL")

    @classmethod
    def from_command_line(
        cls, arguments: list[str], environment: Mapping[str, str] = os.environ
    ) -> ServerConfig:
        """Read flags over environment over defaults.

        Raises `ConfigError` for an unknown flag or `TULIP_` variable and for a value that cannot be read.
        `--help` prints and exits.
        """
        flags = [*_flags_from_environment(environment), *arguments]
        return cls(**vars(_parser().parse_args(flags)))

    def _check_range(self, name: str, lowest: int, highest: int | None) -> None:
        value = getattr(self, name)
        if value is not None and not (lowest <= value and (highest is None or value <= highest)):
            bounds = f"at least {lowest}" if highest is None else f"between {lowest} and {highest}"
            raise ConfigError(f"{_flag(name)}: {value} is not {bounds}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if (value := getattr(self, name)) not in choices:
            raise ConfigError(f"{_flag(name)}: {value!r} is none of {', '.join(choices)}")

    def _check_tls(self) -> None:
        pairs = [
            ("tls_certificate", "tls_key"),
            ("tls_key", "tls_certificate"),
            ("tls_client_ca", "tls_certificate"),
        ]
        for given, needed in pairs:
            if getattr(self, given) is not None and getattr(self, needed) is None:
                raise ConfigError(f"{_flag(given)} needs {_flag(needed)} beside it")
        if self.socket is not None and self.tls_certificate is not None:
            raise ConfigError("--tls-certificate is for TCP: --socket is guarded by the file's permissions")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m tulip_server",
        description="Serve one model on one device over gRPC (tulip.v1.Inference, health, reflection).",
        epilog="Every flag is also an environment variable: --max-batch-tokens is TULIP_MAX_BATCH_TOKENS. "
        "Flags win. SIGTERM and SIGINT drain: what was accepted is finished, nothing new is.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    _add_model_flags(parser)
    _add_listening_flags(parser)
    _add_tls_flags(parser)
    _add_engine_flags(parser)
    _add_queue_flags(parser)
    _add_log_flags(parser)
    return parser


def _add_model_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", type=Path, required=True, metavar="PATH", help="the model's folder")
    group.add_argument("--model-id", metavar="NAME", help="the name it is served under (the folder's name)")
    group.add_argument("--task", metavar="NAME", help="embed or score (auto: what the model's files say)")
    group.add_argument(
        "--allow-reference-gap",
        action="store_true",
        help="serve even if vectors are far from those of the model's reference file",
    )


def _add_listening_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("listening")
    group.add_argument("--host", metavar="ADDRESS", help="interface to listen on (127.0.0.1)")
    group.add_argument("--port", type=int, metavar="N", help="gRPC port; 0: any free one (50051)")
    group.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="Unix socket to listen on, instead of host and port (none)",
    )
    group.add_argument(
        "--frames-socket",
        type=Path,
        metavar="PATH",
        help="Unix socket for gateways on this machine, beside the port: frames without gRPC (none)",
    )
    group.add_argument(
        "--socket-mode",
        metavar="MODE",
        help="of the sockets' files: 600: the owner may connect; 660: the group too (600)",
    )
    group.add_argument(
        "--metrics-port", type=int, metavar="N", help="Prometheus port; 0: any free one (none)"
    )
    group.add_argument(
        "--ready-file",
        type=Path,
        metavar="PATH",
        help="JSON file with the bound ports, there as long as the server takes requests (none)",
    )


def _add_tls_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("TLS, read at start")
    group.add_argument(
        "--tls-certificate", type=Path, metavar="PATH", help="PEM chain, the server's own first (no TLS)"
    )
    group.add_argument("--tls-key", type=Path, metavar="PATH", help="PEM key of the certificate")
    group.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="PATH",
        help="PEM authorities: only clients with a certificate of one of them may connect (anybody)",
    )


def _add_engine_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:N ... (auto)")
    group.add_argument("--dtype", metavar="NAME", help="of weights and computation (auto)")
    group.add_argument("--attention", metavar="NAME", help="attention backend (auto)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads of the engine (its choice)")


def _add_queue_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("batches and queue")
    group.add_argument(
        "--max-batch-tokens", type=int, metavar="N", help="tokens of a batch (the engine's choice)"
    )
    group.add_argument(
        "--max-batch-sequences", type=int, metavar="N", help="sequences of a batch (the engine's choice)"
    )
    group.add_argument(
        "--max-waiting-tokens",
        type=int,
        metavar="N",
        help="tokens that may wait before chunks are refused (64 times the tokens of a batch)",
    )
    group.add_argument(
        "--reserved-tokens",
        type=int,
        metavar="N",
        help="room on top of that for interactive chunks alone (a quarter of it)",
    )
    group.add_argument(
        "--bulk-patience-seconds",
        type=float,
        metavar="S",
        help="a bulk lane without a turn for this long goes first, for one batch (0.5)",
    )
    group.add_argument("--depth", type=int, metavar="N", help="batches with the engine at once (2)")
    group.add_argument(
        "--cold-step-seconds",
        type=float,
        metavar="S",
        help="what a step that compiles, or of a size never seen, may take before the device counts as stuck"
        " (60)",
    )
    group.add_argument(
        "--drain-seconds", type=float, metavar="S", help="time to finish what was accepted when stopped (30)"
    )


def _add_log_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("logs and traces")
    group.add_argument("--log-level", metavar="LEVEL", help=f"{', '.join(_CHOICES['log_level'])} (info)")
    group.add_argument("--log-format", metavar="FORMAT", help="text, or json: an object a line (text)")
    group.add_argument(
        "--otlp-endpoint", metavar="URL", help="OpenTelemetry collector, OTLP over HTTP, for spans (none)"
    )
    group.add_argument("--debug", action="store_true", help="show the traceback of what stops the server")


def _flags_from_environment(environment: Mapping[str, str]) -> list[str]:
    """The `TULIP_` variables spelled as flags; one that is set but empty counts as absent."""
    settings = {_ENVIRONMENT_PREFIX + field.name.upper(): field for field in fields(ServerConfig)}
    keys = sorted(key for key in environment if key.startswith(_ENVIRONMENT_PREFIX))
    if unknown := [key for key in keys if key not in settings]:
        raise ConfigError(f"unknown environment variables: {', '.join(unknown)}")
    return [
        flag for key in keys if environment[key] for flag in _as_flag(settings[key], key, environment[key])
    ]


def _as_flag(setting: Field[Any], key: str, value: str) -> list[str]:
    flag = _flag(setting.name)
    if setting.default is not False:
        return [f"{flag}={value}"]
    if value not in _SWITCH:
        raise ConfigError(f"{key}: {value!r} is neither 1, which switches {flag} on, nor 0")
    return [flag] if _SWITCH[value] else []


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
