"""Flags, environment, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tulip_server.config import ServerConfig
from tulip_server.errors import ConfigError


def parse(*arguments: str, **environment: str) -> ServerConfig:
    return ServerConfig.from_command_line(list(arguments), environment)


def test_defaults():
    assert parse("--model", "folder") == ServerConfig(model=Path("folder"))


def test_flags_win_over_the_environment_and_that_over_defaults():
    config = parse("--port", "1", TULIP_MODEL="folder", TULIP_PORT="2", TULIP_DEPTH="3")
    assert (config.model, config.port, config.depth) == (Path("folder"), 1, 3)


FLAGS = {
    "model": "folder",
    "model_id": "name",
    "task": "score",
    "host": "::1",
    "port": "0",
    "ready_file": "ready.json",
    "device": "cpu",
    "dtype": "float32",
    "attention": "sdpa",
    "threads": "3",
    "max_batch_tokens": "512",
    "max_batch_sequences": "16",
    "max_waiting_tokens": "2048",
    "depth": "1",
    "drain_seconds": "0.5",
    "metrics_port": "0",
    "log_level": "debug",
    "log_format": "json",
    "otlp_endpoint": "http://127.0.0.1:4318",
    "reserved_tokens": "0",
    "bulk_patience_seconds": "1.5",
    "cold_step_seconds": "90",
    "tls_certificate": "certificate.pem",
    "tls_key": "key.pem",
    "tls_client_ca": "ca.pem",
    "frames_socket": "frames.sock",
}
SOCKET = {"socket": "here.sock", "socket_mode": "660"}


def test_every_setting_is_a_flag_and_a_variable_of_the_same_meaning():
    switches = ("--debug", "--allow-reference-gap")
    flags = parse(*switches, *(f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()))
    variables = parse(
        TULIP_DEBUG="1",
        TULIP_ALLOW_REFERENCE_GAP="1",
        **{f"TULIP_{name.upper()}": value for name, value in FLAGS.items()},
    )
    assert flags == variables
    assert set(ServerConfig.__slots__) == {*FLAGS, *SOCKET, "debug", "allow_reference_gap"}
    assert all(getattr(flags, name) != getattr(ServerConfig(Path("x")), name) for name in FLAGS)


def test_a_socket_takes_the_place_of_host_and_port():
    variables = {f"TULIP_{name.upper()}": value for name, value in SOCKET.items()}
    config = parse("--model=x", "--socket=here.sock", "--socket-mode=660")
    assert config == parse("--model=x", **variables)
    assert (config.socket, config.socket_mode) == (Path("here.sock"), "660")


def test_other_variables_are_nobody_s_business():
    assert parse("--model", "folder", PATH="/bin", TULIPS="red").port == 50051


def test_a_switch_is_1_or_0():
    assert parse("--model", "folder", TULIP_DEBUG="1").debug
    assert not parse("--model", "folder", TULIP_DEBUG="0").debug


def test_an_empty_variable_is_an_absent_one():
    assert parse("--model", "folder", TULIP_PORT="").port == 50051


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "--model"),
        (["--model=x", "--max-tokens=3"], {}, "--max-tokens"),
        (["--model=x", "--max-batch-tok=3"], {}, "--max-batch-tok"),
        (["--model=x"], {"TULIP_PROT": "1", "TULIP_HSOT": "2"}, "TULIP_HSOT, TULIP_PROT"),
        (["--model=x", "--port=http"], {}, "--port"),
        (["--model=x", "--port=65536"], {}, "--port: 65536 is not between 0 and 65535"),
        (["--model=x"], {"TULIP_PORT": "-1"}, "--port: -1"),
        (["--model=x", "--depth=0"], {}, "--depth: 0 is not at least 1"),
        (["--model=x", "--max-waiting-tokens=0"], {}, "--max-waiting-tokens"),
        (["--model=x", "--drain-seconds=-1"], {}, "--drain-seconds"),
        (["--model=x", "--drain-seconds=nan"], {}, "--drain-seconds"),
        (["--model=x", "--log-level=loud"], {}, "--log-level: 'loud' is none of"),
        (["--model=x"], {"TULIP_LOG_FORMAT": "xml"}, "--log-format: 'xml' is none of text, json"),
        (["--model=x", "--socket-mode=777"], {}, "--socket-mode: '777' is none of 600, 660"),
        (["--model=x", "--reserved-tokens=-1"], {}, "--reserved-tokens: -1 is not at least 0"),
        (["--model=x", "--bulk-patience-seconds=-1"], {}, "--bulk-patience-seconds"),
        (["--model=x", "--cold-step-seconds=0.5"], {}, "--cold-step-seconds: 0.5 is not at least 1"),
        (["--model=x", "--otlp-endpoint=localhost:4318"], {}, "--otlp-endpoint: 'localhost:4318' is not"),
        (["--model=x", "--tls-certificate=c"], {}, "--tls-certificate needs --tls-key"),
        (["--model=x", "--tls-key=k"], {}, "--tls-key needs --tls-certificate"),
        (["--model=x", "--tls-client-ca=a"], {}, "--tls-client-ca needs --tls-certificate"),
        (
            ["--model=x", "--tls-certificate=c", "--tls-key=k", "--socket=s"],
            {},
            "--tls-certificate is for TCP",
        ),
        (["--model=x"], {"TULIP_DEBUG": "maybe"}, "TULIP_DEBUG: 'maybe'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(arguments, environment, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig.from_command_line(arguments, environment)


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in FLAGS)
