"""The gateway's settings: one frozen object, from flags and from `IVY_*` in the environment.

Each setting is declared once, as a field below; its flag, its environment key and its line in `--help`
follow from that. A flag wins over the environment. Knows nothing of the model's files: what they say is
`model_profile`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

from ivy_gateway.errors import StartupError, UsageError
from protos.frames import ADDRESS_PREFIX, MAX_SOCKET_PATH_BYTES

ENVIRONMENT_PREFIX = "IVY_"
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
OWN_ID_POLICIES = ("reject", "model")
TOKEN_ID_POLICIES = (*OWN_ID_POLICIES, "cl100k_base")  # beyond: names of other models' vocabularies
RERANKER_TEMPLATES = ("auto", "A", "B", "none")

_ADDRESS = re.compile(r"unix:/.+|frames:/.+|(dns:)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,]+")
_API_KEY = re.compile(r"[!-~]+")
_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class _Setting:
    """How one field is spelled outside: `--name` and `IVY_NAME`, or `IVY_PLURAL` for a repeatable flag."""

    name: str
    parse: Callable[[str], Any]
    help: str
    plural: str = ""
    inverted: bool = False  # the flag states the opposite of the field
    metavar: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def key(self) -> str:
        return ENVIRONMENT_PREFIX + (self.plural or self.name).replace("-", "_").upper()


def check_api_key(key: str, source: str) -> str:
    """`key` itself. Raises `StartupError`, which never repeats it, unless a header can carry it."""
    if not _API_KEY.fullmatch(key):
        raise StartupError(f"{source}: a key must be visible ASCII characters without spaces")
    return key


def _check_socket_path(path: str, source: str) -> None:
    if not hasattr(socket, "AF_UNIX"):
        raise StartupError(f"{source}: this system has no Unix sockets")
    if (length := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
        raise StartupError(
            f"{source}: a path of {length} bytes; a socket's has at most {MAX_SOCKET_PATH_BYTES}"
        )


def _boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError(f"{text!r} is neither true nor false") from None


def _names(text: str) -> tuple[str, ...]:
    """Comma-separated names; white space around them does not count."""
    return tuple(part.strip() for part in text.split(","))


def _prompt(text: str) -> dict[str, str]:
    """`name=text`, or a JSON object of such pairs (the only form for several in the environment)."""
    if text.startswith("{"):
        prompts = json.loads(text)
        if all(isinstance(value, str) for value in prompts.values()):
            return dict(prompts)
        raise ValueError("every prompt in the JSON object must be a string")
    name, equals, prompt = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is not name=text")
    return {name: prompt}


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return parse


def default_tokenizer_workers() -> int:
    """One thread per core, at most four.

    One thread makes over a million tokens a second, and four feed several replicas; with more, the share of
    the work that needs the GIL (ids to arrays, about 3 %) starts to delay the event loop. Further cores are
    better spent on `workers`.
    """
    return min(os.cpu_count() or 1, 4)


@functools.cache
def _folder_name(folder: Path) -> str:
    """Its own name, whatever leads to it: asked for once, because every reply carries it."""
    return folder.resolve().name


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Settings of one gateway process, checked when made.

    Raises `StartupError` naming the setting at fault.
    """

    model: Annotated[Path, _Setting("model", Path, "folder of the model's own files")]
    name: Annotated[
        str | None, _Setting("served-model-name", str, "the model's name for clients (the folder's name)")
    ] = None
    aliases: Annotated[
        tuple[str, ...], _Setting("alias", _names, "a further name to answer to", plural="aliases")
    ] = ()
    replicas: Annotated[
        tuple[str, ...],
        _Setting(
            "replica",
            _names,
            "a server: host:port, unix:/path, dns:host:port for every address that the name has, or"
            " frames:/path: its --frames-socket, the quickest way on one machine",
            plural="replicas",
        ),
    ] = ()
    resolve_seconds: Annotated[
        float, _Setting("resolve-seconds", float, "between two lookups of dns: names")
    ] = 5.0
    replica_silence_seconds: Annotated[
        float,
        _Setting("replica-silence-seconds", float, "without a heartbeat until a server gets no more work"),
    ] = 1.5
    replica_reconnect_seconds: Annotated[
        float,
        _Setting("replica-reconnect-seconds", float, "without a heartbeat until a connection is given up"),
    ] = 10.0
    replica_patience_seconds: Annotated[
        float,
        _Setting("replica-patience-seconds", float, "that requests wait after the last server went; 0: none"),
    ] = 5.0
    start_patience_seconds: Annotated[
        float,
        _Setting(
            "start-patience-seconds", float, "that the start waits for a first server; then requests get 503"
        ),
    ] = 2.0
    replica_ca: Annotated[
        Path | None,
        _Setting(
            "replica-ca",
            Path,
            "certificates to trust: servers are spoken to by TLS, but for frames:/path",
            metavar="FILE",
        ),
    ] = None
    replica_certificate: Annotated[
        Path | None,
        _Setting("replica-certificate", Path, "the gateway's own, for mutual TLS", metavar="FILE"),
    ] = None
    replica_key: Annotated[
        Path | None, _Setting("replica-key", Path, "the key of --replica-certificate", metavar="FILE")
    ] = None
    host: Annotated[str, _Setting("host", str, "address to listen on")] = "127.0.0.1"
    port: Annotated[int, _Setting("port", int, "port to listen on; 0 takes a free one")] = 8080
    workers: Annotated[int, _Setting("workers", int, "gateway processes that share the port")] = 1
    awake_ms: Annotated[
        float,
        _Setting(
            "awake-ms",
            float,
            "milliseconds that a worker looks for more bytes, instead of sleeping, after some came or went:"
            " takes a core for each worker while requests come in; 0: off",
            metavar="MS",
        ),
    ] = 0.0
    tls_certificate: Annotated[
        Path | None,
        _Setting("tls-certificate", Path, "serve https with this certificate (chain)", metavar="FILE"),
    ] = None
    tls_key: Annotated[
        Path | None, _Setting("tls-key", Path, "the key of --tls-certificate", metavar="FILE")
    ] = None
    max_connections: Annotated[
        int, _Setting("max-connections", int, "open connections of each process; further ones get a 503")
    ] = 4096
    max_header_bytes: Annotated[
        int, _Setting("max-header-bytes", int, "of a request's line and headers; more get a 431")
    ] = 32 * 1024
    max_header_count: Annotated[int, _Setting("max-header-count", int, "headers of a request")] = 100
    header_timeout_seconds: Annotated[
        float, _Setting("header-timeout-seconds", float, "for a request's headers to arrive")
    ] = 10.0
    body_timeout_seconds: Annotated[
        float, _Setting("body-timeout-seconds", float, "for a request's body to arrive")
    ] = 60.0
    write_timeout_seconds: Annotated[
        float, _Setting("write-timeout-seconds", float, "that a client may take no byte of its reply")
    ] = 30.0
    grace_seconds: Annotated[
        float, _Setting("grace-seconds", float, "for accepted requests to finish after SIGTERM")
    ] = 30.0
    drain_delay_seconds: Annotated[
        float,
        _Setting("drain-delay-seconds", float, "after SIGTERM: /health is 503, all else still served"),
    ] = 0.0

    max_chunk_tokens: Annotated[
        int, _Setting("max-chunk-tokens", int, "tokens of one message to a replica")
    ] = 16384
    max_chunk_inputs: Annotated[
        int, _Setting("max-chunk-inputs", int, "inputs of one message to a replica")
    ] = 256
    max_client_batch_size: Annotated[int, _Setting("max-client-batch-size", int, "inputs of one request")] = (
        2048
    )
    max_body_bytes: Annotated[int, _Setting("max-body-bytes", int, "bytes of one request")] = 16 * 1024 * 1024
    max_waiting_tokens: Annotated[
        int, _Setting("max-waiting-tokens", int, "tokens inside the gateway before new requests are refused")
    ] = 1024 * 1024
    max_queue_seconds: Annotated[
        float,
        _Setting(
            "max-queue-seconds",
            float,
            "of interactive work that may wait while more comes in than goes out; 0: no such limit",
        ),
    ] = 2.0
    max_bulk_queue_seconds: Annotated[
        float, _Setting("max-bulk-queue-seconds", float, "the same for bulk work; 0: no such limit")
    ] = 15.0
    bulk_inputs: Annotated[
        int, _Setting("bulk-inputs", int, "more inputs than this make a request a bulk one")
    ] = 32
    bulk_tokens: Annotated[
        int, _Setting("bulk-tokens", int, "more tokens than this make a request a bulk one")
    ] = 16384
    bulk_patience_seconds: Annotated[
        float, _Setting("bulk-patience-seconds", float, "that bulk work lets younger requests go first")
    ] = 0.5
    bulk_window: Annotated[
        int, _Setting("bulk-window", int, "chunks of one bulk request that a server has at a time")
    ] = 2
    request_timeout: Annotated[
        float, _Setting("request-timeout", float, "seconds before a request is given up")
    ] = 30.0

    auto_truncate: Annotated[
        bool, _Setting("auto-truncate", _boolean, "cut inputs over the limit instead of refusing them")
    ] = True
    literal_text: Annotated[
        bool,
        _Setting(
            "parity-tokens",
            _boolean,
            "read special-token spellings in user text as the tokenizer file does, not as plain characters",
            inverted=True,
        ),
    ] = True
    token_ids: Annotated[
        str,
        _Setting(
            "token-ids",
            _choice(*TOKEN_ID_POLICIES),
            "token ids on /v1/embeddings: reject; model (its own); cl100k_base (OpenAI's, read back as text)",
        ),
    ] = "reject"  # noqa: S105 - not a password
    default_prompt_name: Annotated[
        str | None, _Setting("default-prompt-name", str, "prompt of texts whose request names none")
    ] = None
    prompts: Annotated[
        Mapping[str, str],
        _Setting("prompt", _prompt, "name=text, or a JSON object: add or replace prompts", plural="prompts"),
    ] = field(default_factory=dict)
    reranker_template: Annotated[
        str,
        _Setting(
            "reranker-template",
            _choice(*RERANKER_TEMPLATES),
            "form of a language model's pairs: A or B, as its card has both; none: the tokenizer's own pairs;"
            " auto: A for Qwen3-Reranker",
        ),
    ] = "auto"
    instruction: Annotated[
        str | None,
        _Setting("instruction", str, "what a reranker is told to look for by default (its card's sentence)"),
    ] = None
    max_length: Annotated[
        int | None, _Setting("max-length", int, "tokens of one input; may only lower the model's own limit")
    ] = None
    any_dimensions: Annotated[
        bool,
        _Setting("any-dimensions", _boolean, "shorten vectors even where the model's files do not allow it"),
    ] = False
    allow_reference_gap: Annotated[
        bool,
        _Setting(
            "allow-reference-gap", _boolean, "serve even if ids are not those of the model's reference file"
        ),
    ] = False
    tokenizer_workers: Annotated[
        int, _Setting("tokenizer-workers", int, "tokenizing threads of each process (cores, at most 4)")
    ] = field(default_factory=default_tokenizer_workers)

    api_keys: Annotated[
        tuple[str, ...],
        _Setting(
            "api-key",
            _names,
            "a key: clients must send one; other users of the machine can see flags",
            plural="api-keys",
        ),
    ] = field(default=(), repr=False)
    api_keys_file: Annotated[
        Path | None, _Setting("api-keys-file", Path, "file of further keys, one a line; # starts a comment")
    ] = None
    open_metrics: Annotated[bool, _Setting("open-metrics", _boolean, "serve /metrics without a key")] = False
    cors_allow_origins: Annotated[
        tuple[str, ...],
        _Setting(
            "cors-allow-origin",
            _names,
            "an origin whose web pages may ask; * is all, none is none",
            plural="cors-allow-origins",
        ),
    ] = ("*",)

    log_format: Annotated[
        str, _Setting("log-format", _choice(*LOG_FORMATS), "text, or json: one object a line")
    ] = "text"
    access_log: Annotated[bool, _Setting("access-log", _boolean, "a line in the log for each request")] = (
        False
    )
    otlp_endpoint: Annotated[
        str | None,
        _Setting("otlp-endpoint", str, "http(s) URL of a collector: send traces (needs the extra `tracing`)"),
    ] = None
    log_level: Annotated[str, _Setting("log-level", _choice(*LOG_LEVELS), ", ".join(LOG_LEVELS))] = "info"
    debug: Annotated[bool, _Setting("debug", _boolean, "asyncio's slow checks, tracebacks in the log")] = (
        False
    )

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_addresses()
        self._check_access()
        self._check_certificates()
        if self.max_waiting_tokens < self.max_chunk_tokens:
            raise StartupError(
                f"--max-waiting-tokens {self.max_waiting_tokens} is below"
                f" --max-chunk-tokens {self.max_chunk_tokens}: no full chunk could ever wait"
            )
        if not all(self.model_names):
            raise StartupError("--served-model-name and --alias must not be empty")
        if self.token_ids not in TOKEN_ID_POLICIES:
            raise StartupError(f"--token-ids {self.token_ids!r} is not one of {', '.join(TOKEN_ID_POLICIES)}")
        if self.reranker_template not in RERANKER_TEMPLATES:
            known = ", ".join(RERANKER_TEMPLATES)
            raise StartupError(f"--reranker-template {self.reranker_template!r} is not one of {known}")

    @property
    def served_model_name(self) -> str:
        """The name that replies carry: as set, else the folder's."""
        return _folder_name(self.model) if self.name is None else self.name

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name a request may use, the served one first."""
        return (self.served_model_name, *self.aliases)

    @classmethod
    def given(cls, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
        """The fields that flags and environment set, and to what; errors as in `from_args`."""
        return _from_environment(environ) | _from_flags(argv)

    @classmethod
    def from_args(cls, argv: Sequence[str], environ: Mapping[str, str]) -> GatewayConfig:
        """Read flags (without the program's name) and the `IVY_*` keys of `environ`.

        Raises `StartupError` for an unknown flag or key (with the nearest known spelling), for a value that
        cannot be read and for settings that contradict each other: a `UsageError` where the flags cannot be
        read at all. `--help` prints and exits.
        """
        settings = cls.given(argv, environ)
        if "model" not in settings:
            raise StartupError("no model: give its folder by --model or IVY_MODEL")
        return cls(**settings)

    def _check_ranges(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise StartupError(f"{_SETTINGS[name].flag} must be above zero, not {value}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise StartupError(
                    f"{_SETTINGS[name].flag} must not be below zero, and be finite, not {value}"
                )
        if not 0 <= self.port <= 65535:
            raise StartupError(f"--port {self.port} is outside 0 to 65535")
        if self.port == 0 and self.workers > 1:
            raise StartupError("--port 0 takes a free port in each process: it needs --workers 1")

    def _check_addresses(self) -> None:
        if not self.replicas:
            raise StartupError("no replica: give at least one by --replica or IVY_REPLICAS")
        for address in self.replicas:
            match = _ADDRESS.fullmatch(address)
            if match is None or int(match["port"] or 1) not in range(1, 65536):
                raise StartupError(
                    f"--replica {address!r} is neither host:port, dns:host:port, unix:/path nor frames:/path"
                )
            if address.startswith(ADDRESS_PREFIX):
                _check_socket_path(address.removeprefix(ADDRESS_PREFIX), f"--replica {address!r}")
        if self.replica_reconnect_seconds < self.replica_silence_seconds:
            raise StartupError(
                f"--replica-reconnect-seconds {self.replica_reconnect_seconds} is below"
                f" --replica-silence-seconds {self.replica_silence_seconds}"
            )
        if len(set(self.replicas)) < len(self.replicas):
            raise StartupError("--replica names one address twice")

    def _check_certificates(self) -> None:
        if (self.replica_certificate is None) != (self.replica_key is None):
            raise StartupError("--replica-certificate and --replica-key are given together or not at all")
        if self.replica_certificate is not None and self.replica_ca is None:
            raise StartupError("--replica-certificate needs --replica-ca: it is for TLS to the servers")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise StartupError("--tls-certificate and --tls-key are given together or not at all")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise StartupError(f"--otlp-endpoint {self.otlp_endpoint!r} is no http:// or https:// URL")

    def _check_access(self) -> None:
        for key in self.api_keys:
            check_api_key(key, "--api-key")
        for origin in self.cors_allow_origins:
            alone = origin in ("*", "none") and len(self.cors_allow_origins) == 1
            if not alone and not _ORIGIN.fullmatch(origin):
                raise StartupError(
                    f"--cors-allow-origin {origin!r} is no origin (https://host or https://host:port);"
                    " * and none stand alone"
                )


_SETTINGS: dict[str, _Setting] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(GatewayConfig, include_extras=True).items()
}
_POSITIVE = (
    "workers",
    "max_chunk_tokens",
    "max_chunk_inputs",
    "max_client_batch_size",
    "max_body_bytes",
    "max_waiting_tokens",
    "request_timeout",
    "max_length",
    "resolve_seconds",
    "replica_silence_seconds",
    "replica_reconnect_seconds",
    "max_connections",
    "max_header_bytes",
    "max_header_count",
    "header_timeout_seconds",
    "body_timeout_seconds",
    "write_timeout_seconds",
    "bulk_inputs",
    "bulk_tokens",
    "bulk_window",
    "tokenizer_workers",
)
_NOT_NEGATIVE = (
    "awake_ms",
    "start_patience_seconds",
    "replica_patience_seconds",
    "grace_seconds",
    "drain_delay_seconds",
    "max_queue_seconds",
    "max_bulk_queue_seconds",
    "bulk_patience_seconds",
)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields set by `IVY_*` keys. An empty value is no value, so that templates can leave keys blank."""
    fields = {setting.key: name for name, setting in _SETTINGS.items()}
    values: dict[str, Any] = {}
    for key, text in environ.items():
        if not key.startswith(ENVIRONMENT_PREFIX):
            continue
        if key not in fields:
            raise StartupError(f"{key} in the environment is no setting{_nearest(key, list(fields))}")
        if text:
            values |= _read(fields[key], key, [text])
    return values


def _from_flags(argv: Sequence[str]) -> dict[str, Any]:
    parser = _parser()
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise UsageError(f"unknown flag {unknown[0]}{_nearest(unknown[0].partition('=')[0], known)}")
    values: dict[str, Any] = {}
    for name, texts in vars(given).items():
        values |= _read(name, _SETTINGS[name].flag, texts)
    return values


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; the nearest known one is {close[0]}" if close else ""


def _read(name: str, source: str, texts: list[str]) -> dict[str, Any]:
    """Field `name` with the value written at `source`; the last text counts, or all of a repeatable flag."""
    setting = _SETTINGS[name]
    try:
        values = [setting.parse(text) for text in texts]
    except ValueError as error:
        kind = UsageError if source == setting.flag else StartupError
        raise kind(f"{source}: {error}") from error
    if not setting.plural:
        return {name: not values[-1] if setting.inverted else values[-1]}
    if setting.parse is _prompt:
        return {name: {key: prompt for part in values for key, prompt in part.items()}}
    return {name: tuple(item for part in values for item in part)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ivy",
        description="HTTP gateway for embedding and reranking replicas.",
        epilog="Each flag has an environment key, shown in brackets; the flag wins.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    defaults = {f.name: f.default for f in dataclasses.fields(GatewayConfig)}
    for name, setting in _SETTINGS.items():
        _add_flag(parser, name, setting, defaults[name])
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, setting: _Setting, default: object) -> None:
    if setting.parse is _boolean:
        shown = f", default: {'on' if default != setting.inverted else 'off'}"
        text = f"{setting.help} [{setting.key}{shown}]"
        parser.add_argument(setting.flag, dest=name, action="append_const", const="true", help=text)
        off = f"--no-{setting.name}"
        parser.add_argument(off, dest=name, action="append_const", const="false", help=argparse.SUPPRESS)
        return
    shown = "" if default in (None, (), dataclasses.MISSING) else f", default: {default}"
    metavar = setting.metavar or {"int": "N", "float": "SECONDS", "Path": "FOLDER"}.get(
        setting.parse.__name__, "TEXT"
    )
    text = f"{setting.help} [{setting.key}{shown}]"
    parser.add_argument(setting.flag, dest=name, action="append", metavar=metavar, help=text)
