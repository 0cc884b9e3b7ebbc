"""Settings: every one both ways, and mistakes named."""

import dataclasses
from pathlib import Path

import pytest

from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError

NEEDED = ["--model", "folder/minilm", "--replica", "127.0.0.1:50051"]

# field: flag and text, environment text, value
BOTH_WAYS = {
    "model": (["--model", "m"], "m", Path("m")),
    "name": (["--served-model-name", "roses"], "roses", "roses"),
    "aliases": (["--alias", "a", "--alias", "b"], "a, b", ("a", "b")),
    "replicas": (["--replica", "h:1", "--replica", "unix:/s"], "h:1,unix:/s", ("h:1", "unix:/s")),
    "start_patience_seconds": (["--start-patience-seconds", "7.5"], "7.5", 7.5),
    "awake_ms": (["--awake-ms", "2.5"], "2.5", 2.5),
    "resolve_seconds": (["--resolve-seconds", "2.5"], "2.5", 2.5),
    "replica_silence_seconds": (["--replica-silence-seconds", "2.5"], "2.5", 2.5),
    "replica_reconnect_seconds": (["--replica-reconnect-seconds", "20.5"], "20.5", 20.5),
    "replica_patience_seconds": (["--replica-patience-seconds", "0.0"], "0.0", 0.0),
    "replica_ca": (["--replica-ca", "ca.pem"], "ca.pem", Path("ca.pem")),
    "replica_certificate": (["--replica-certificate", "c.pem"], "c.pem", Path("c.pem")),
    "replica_key": (["--replica-key", "c.key"], "c.key", Path("c.key")),
    "host": (["--host", "0.0.0.0"], "0.0.0.0", "0.0.0.0"),
    "port": (["--port", "9"], "9", 9),
    "workers": (["--workers", "3"], "3", 3),
    "tls_certificate": (["--tls-certificate", "c.pem"], "c.pem", Path("c.pem")),
    "tls_key": (["--tls-key", "c.key"], "c.key", Path("c.key")),
    "max_connections": (["--max-connections", "50"], "50", 50),
    "max_header_bytes": (["--max-header-bytes", "9000"], "9000", 9000),
    "max_header_count": (["--max-header-count", "20"], "20", 20),
    "header_timeout_seconds": (["--header-timeout-seconds", "2.5"], "2.5", 2.5),
    "body_timeout_seconds": (["--body-timeout-seconds", "2.5"], "2.5", 2.5),
    "write_timeout_seconds": (["--write-timeout-seconds", "2.5"], "2.5", 2.5),
    "grace_seconds": (["--grace-seconds", "5.5"], "5.5", 5.5),
    "drain_delay_seconds": (["--drain-delay-seconds", "1.5"], "1.5", 1.5),
    "max_chunk_tokens": (["--max-chunk-tokens", "4096"], "4096", 4096),
    "max_chunk_inputs": (["--max-chunk-inputs", "7"], "7", 7),
    "max_client_batch_size": (["--max-client-batch-size", "32"], "32", 32),
    "max_body_bytes": (["--max-body-bytes", "1000"], "1000", 1000),
    "max_waiting_tokens": (["--max-waiting-tokens", "20000"], "20000", 20000),
    "max_queue_seconds": (["--max-queue-seconds", "0.5"], "0.5", 0.5),
    "max_bulk_queue_seconds": (["--max-bulk-queue-seconds", "7.5"], "7.5", 7.5),
    "bulk_inputs": (["--bulk-inputs", "5"], "5", 5),
    "bulk_tokens": (["--bulk-tokens", "999"], "999", 999),
    "bulk_patience_seconds": (["--bulk-patience-seconds", "0.25"], "0.25", 0.25),
    "bulk_window": (["--bulk-window", "3"], "3", 3),
    "request_timeout": (["--request-timeout", "2.5"], "2.5", 2.5),
    "auto_truncate": (["--no-auto-truncate"], "false", False),
    "literal_text": (["--parity-tokens"], "1", False),
    "token_ids": (["--token-ids", "model"], "model", "model"),
    "default_prompt_name": (["--default-prompt-name", "query"], "query", "query"),
    "prompts": (["--prompt", "q=a=b", "--prompt", "d="], '{"q": "a=b", "d": ""}', {"q": "a=b", "d": ""}),
    "reranker_template": (["--reranker-template", "B"], "B", "B"),
    "instruction": (["--instruction", "Find recipes"], "Find recipes", "Find recipes"),
    "max_length": (["--max-length", "128"], "128", 128),
    "any_dimensions": (["--any-dimensions"], "yes", True),
    "allow_reference_gap": (["--allow-reference-gap"], "1", True),
    "tokenizer_workers": (["--tokenizer-workers", "2"], "2", 2),
    "api_keys": (["--api-key", "k1,k2", "--api-key", "k3"], "k1, k2, k3", ("k1", "k2", "k3")),
    "api_keys_file": (["--api-keys-file", "keys"], "keys", Path("keys")),
    "open_metrics": (["--open-metrics"], "1", True),
    "cors_allow_origins": (["--cors-allow-origin", "https://a.b"], "https://a.b", ("https://a.b",)),
    "log_format": (["--log-format", "json"], "json", "json"),
    "access_log": (["--access-log"], "1", True),
    "otlp_endpoint": (["--otlp-endpoint", "http://c:4318"], "http://c:4318", "http://c:4318"),
    "log_level": (["--log-level", "debug"], "debug", "debug"),
    "debug": (["--debug"], "on", True),
}
# What a setting needs beside it.
COMPANIONS = {
    "replica_certificate": {"IVY_REPLICA_CA": "ca.pem", "IVY_REPLICA_KEY": "c.key"},
    "replica_key": {"IVY_REPLICA_CA": "ca.pem", "IVY_REPLICA_CERTIFICATE": "c.pem"},
    "tls_certificate": {"IVY_TLS_KEY": "c.key"},
    "tls_key": {"IVY_TLS_CERTIFICATE": "c.pem"},
}
KEYS = {
    "name": "IVY_SERVED_MODEL_NAME",
    "literal_text": "IVY_PARITY_TOKENS",
}


def refusal(argv, environ=None):
    with pytest.raises(StartupError) as caught:
        GatewayConfig.from_args(argv, environ or {})
    return caught.value.message


def test_no_setting_is_left_out_of_this_table():
    assert set(BOTH_WAYS) == {field.name for field in dataclasses.fields(GatewayConfig)}


@pytest.mark.parametrize("field", BOTH_WAYS)
def test_a_flag_and_its_environment_key_say_the_same(field):
    flags, text, value = BOTH_WAYS[field]
    base = {"IVY_MODEL": "folder/minilm", "IVY_REPLICAS": "127.0.0.1:50051", "PATH": "/bin"}
    base |= COMPANIONS.get(field, {})
    by_flag = GatewayConfig.from_args(flags, {k: v for k, v in base.items() if k != f"IVY_{field.upper()}"})
    by_key = GatewayConfig.from_args([], base | {KEYS.get(field, f"IVY_{field.upper()}"): text})
    assert getattr(by_flag, field) == getattr(by_key, field) == value


def test_a_flag_wins_over_the_environment():
    config = GatewayConfig.from_args([*NEEDED, "--port", "1"], {"IVY_PORT": "2", "IVY_WORKERS": ""})
    assert (config.port, config.workers) == (1, 1)


def test_the_last_of_two_opposite_flags_counts():
    assert GatewayConfig.from_args([*NEEDED, "--no-auto-truncate", "--auto-truncate"], {}).auto_truncate
    assert GatewayConfig.from_args([*NEEDED, "--parity-tokens", "--no-parity-tokens"], {}).literal_text


def test_the_served_name_is_the_folders_unless_given():
    config = GatewayConfig.from_args([*NEEDED, "--alias", "small"], {})
    assert config.model_names == ("minilm", "small")
    assert GatewayConfig(model=Path("m"), name="roses", replicas=("h:1",)).served_model_name == "roses"


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([*NEEDED, "--max-lenght", "3"], {}, "--max-lenght; the nearest known one is --max-length"),
        (
            NEEDED,
            {"IVY_REPLICA": "h:1"},
            "IVY_REPLICA in the environment is no setting; the nearest known one is",
        ),
        (NEEDED, {"IVY_MODELL": "x"}, "IVY_MODEL"),
        ([*NEEDED, "--port", "ninety"], {}, "--port: "),
        (NEEDED, {"IVY_PORT": "ninety"}, "IVY_PORT: "),
        (NEEDED, {"IVY_DEBUG": "perhaps"}, "IVY_DEBUG: 'perhaps'"),
        ([*NEEDED, "--prompt", "no equals sign"], {}, "is not name=text"),
        (NEEDED, {"IVY_PROMPTS": '{"q": 3}'}, "IVY_PROMPTS: every prompt"),
        (NEEDED, {"IVY_PROMPTS": '{"q": '}, "IVY_PROMPTS: "),
        ([*NEEDED, "--token-ids", "cl100k"], {}, "--token-ids: 'cl100k' is not one of reject, model"),
        ([*NEEDED, "--port"], {}, "--port"),
        (["--replica", "h:1"], {}, "--model"),
        (["--model", "m"], {}, "--replica"),
        (["--model", "m", "--replica", "nowhere"], {}, "'nowhere' is neither host:port, dns:host:port"),
        (["--model", "m", "--replica", "h:70000"], {}, "h:70000"),
        (["--model", "m", "--replica", "frames:"], {}, "'frames:' is neither"),
        (["--model", "m", "--replica", "frames:s"], {}, "'frames:s' is neither"),
        (["--model", "m", "--replica", "frames:/" + 106 * "é"], {}, "213 bytes; a socket's has at most 107"),
        ([*NEEDED, "--awake-ms", "-1"], {}, "--awake-ms must not be below zero"),
        (["--model", "m", "--replica", "h:1,h:1"], {}, "twice"),
        ([*NEEDED, "--workers", "0"], {}, "--workers must be above zero, not 0"),
        ([*NEEDED, "--request-timeout", "nan"], {}, "--request-timeout must be above zero"),
        ([*NEEDED, "--max-length", "-1"], {}, "--max-length must be above zero"),
        ([*NEEDED, "--port", "70000"], {}, "--port 70000"),
        ([*NEEDED, "--grace-seconds", "-1"], {}, "--grace-seconds must not be below zero"),
        ([*NEEDED, "--max-queue-seconds", "inf"], {}, "--max-queue-seconds must not be below zero, and be"),
        ([*NEEDED, "--replica-silence-seconds", "0"], {}, "--replica-silence-seconds must be above zero"),
        ([*NEEDED, "--replica-reconnect-seconds", "1"], {}, "--replica-reconnect-seconds 1.0 is below"),
        ([*NEEDED, "--max-header-count", "0"], {}, "--max-header-count must be above zero"),
        ([*NEEDED, "--log-format", "xml"], {}, "--log-format: 'xml' is not one of text, json"),
        (
            [*NEEDED, "--otlp-endpoint", "collector:4318"],
            {},
            "--otlp-endpoint 'collector:4318' is no http://",
        ),
        ([*NEEDED, "--replica-key", "k"], {}, "--replica-certificate and --replica-key are given together"),
        (["--model", "m", "--replica", "dns:tulip"], {}, "'dns:tulip' is neither"),
        ([*NEEDED, "--port", "0", "--workers", "2"], {}, "--workers 1"),
        ([*NEEDED, "--max-waiting-tokens", "100"], {}, "--max-waiting-tokens 100 is below"),
        ([*NEEDED, "--alias", "a,,b"], {}, "--alias"),
        ([*NEEDED, "--api-key", "two words"], {}, "--api-key: a key must be visible ASCII"),
        ([*NEEDED, "--api-key", "a,,b"], {}, "--api-key: a key must be visible ASCII"),
        ([*NEEDED, "--cors-allow-origin", "a.example"], {}, "--cors-allow-origin 'a.example' is no origin"),
        ([*NEEDED, "--cors-allow-origin", "*,https://a.example"], {}, "'*' is no origin"),
        (NEEDED, {"IVY_API_KEY": "secret"}, "the nearest known one is IVY_API_KEYS"),
    ],
)
def test_mistakes_are_refused_by_name(argv, environ, expected):
    assert expected in refusal(argv, environ)


@pytest.mark.parametrize(
    "address",
    [
        "[::1]:5",
        "dns:tulip.default.svc:50051",
        "a-b.example:65535",
        "unix:/run/x",
        "frames:/run/x",
        "10.0.0.1:1",
    ],
)
def test_addresses(address):
    assert GatewayConfig.from_args(["--model", "m", "--replica", address], {}).replicas == (address,)


def test_help_names_every_flag_and_key(capsys):
    with pytest.raises(SystemExit) as ended:
        GatewayConfig.from_args(["--help"], {})
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for field, (flags, _, _) in BOTH_WAYS.items():
        assert flags[0].replace("--no-", "--") in shown
        assert KEYS.get(field, f"IVY_{field.upper()}") in shown
