"""TLS to servers, both ways, and to clients, with certificates made for the test."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest

from ivy_gateway.config import GatewayConfig
from ivy_gateway.credentials import check_server_certificate, replica_credentials
from ivy_gateway.errors import StartupError
from ivy_gateway.replica import LinkSettings
from ivy_gateway.replicas import PoolSettings, ReplicaPool
from ivy_gateway.resolver import Resolver
from tests.ivy_gateway.fake_tulip import FakeTulip
from tests.ivy_gateway.test_replicas import HASH, chunk, soon, until
from tests.ivy_gateway.test_server import gateway_process

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def make(folder: Path, name: str, signer: str | None, alternative: str = "") -> None:
    """`name`.pem and `name`.key, signed by `signer`, or an authority of its own."""
    key, request, made = (str(folder / f"{name}.{end}") for end in ("key", "csr", "pem"))
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)
    if signer is None:
        signs = ("-addext", "keyUsage=critical,keyCertSign")  # Python 3.13 asks for it
        openssl(*new, "-x509", "-out", made, "-days", "2", "-subj", f"/CN={name}", *signs)
        return
    openssl(*new, "-out", request, "-subj", f"/CN={name}")
    extensions = folder / f"{name}.ext"
    names = f"subjectAltName={alternative}\n" if alternative else ""
    extensions.write_text(f"{names}authorityKeyIdentifier=keyid\n")
    authority = ("-CA", str(folder / f"{signer}.pem"), "-CAkey", str(folder / f"{signer}.key"))
    openssl("x509", "-req", "-in", request, *authority, "-CAcreateserial", "-out", made, "-days", "2",
            "-extfile", str(extensions))  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make(folder, "authority", None)
    make(folder, "stranger", None)
    make(folder, "server", "authority", "DNS:tulip.test,IP:127.0.0.1")
    make(folder, "named", "authority", "DNS:tulip.test")
    make(folder, "client", "authority", "DNS:ivy")
    make(folder, "intruder", "stranger", "DNS:ivy")
    return folder


async def start_tls(tulip: FakeTulip, folder: Path, name: str, *, mutual: bool) -> None:
    pair = ((folder / f"{name}.key").read_bytes(), (folder / f"{name}.pem").read_bytes())
    authority = (folder / "authority.pem").read_bytes()
    await tulip.start(credentials=grpc.ssl_server_credentials([pair], authority if mutual else None, mutual))


def settings(minilm: Path, folder: Path, authority: str, own: str | None = None) -> PoolSettings:
    files = {"replica_ca": folder / f"{authority}.pem"}
    if own is not None:
        files |= {"replica_certificate": folder / f"{own}.pem", "replica_key": folder / f"{own}.key"}
    config = GatewayConfig(model=minilm, replicas=("a:1",), **files)
    return PoolSettings(patience_seconds=0, link=LinkSettings(credentials=replica_credentials(config)))


@pytest.mark.parametrize(
    ("authority", "own", "mutual", "works"),
    [
        ("authority", None, False, True),
        ("stranger", None, False, False),
        ("authority", "client", True, True),
        ("authority", None, True, False),
        ("authority", "intruder", True, False),
    ],
)
async def test_who_trusts_whom(minilm, certificates, authority, own, mutual, works):
    tulip = FakeTulip(tokenizer_hash=HASH)
    await start_tls(tulip, certificates, "server", mutual=mutual)
    try:
        pool = ReplicaPool([tulip.address], HASH, settings(minilm, certificates, authority, own))
        async with pool.running():
            if works:
                await until(lambda: pool.num_ready == 1)
                assert len((await pool.infer(chunk(3), soon())).rows) == 1
            else:
                await until(lambda: "not connected" not in pool.statuses()[0].reason)
                await asyncio.sleep(0.3)
                assert pool.num_ready == 0
                assert not tulip.streams
    finally:
        await tulip.stop()


async def test_a_certificate_is_checked_against_the_name_behind_an_address(minilm, certificates, monkeypatch):
    from ivy_gateway import replicas as replicas_module

    tulip = FakeTulip(tokenizer_hash=HASH)
    await start_tls(tulip, certificates, "named", mutual=False)

    async def lookup(host: str, port: int) -> list[str]:
        return [tulip.address]

    monkeypatch.setattr(replicas_module, "Resolver", lambda names: Resolver(names, lookup))
    try:
        for name, works in (("dns:tulip.test:1", True), ("dns:other.test:1", False)):
            pool = ReplicaPool([name], HASH, settings(minilm, certificates, "authority"))
            async with pool.running():
                await until(lambda: any("not connected" not in s.reason for s in pool.statuses()))  # noqa: B023
                await asyncio.sleep(0.3)
                assert (pool.num_ready == 1) is works
    finally:
        await tulip.stop()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"replica_ca": "nothing.pem"}, "--replica-ca .* cannot be read"),
        ({"replica_ca": "client.key"}, "--replica-ca .* holds no certificate"),
        (
            {"replica_ca": "authority.pem", "replica_certificate": "client.pem", "replica_key": "server.key"},
            "do not make a pair",
        ),
        ({"tls_certificate": "server.pem", "tls_key": "client.key"}, "do not make a pair"),
        ({"tls_certificate": "server.pem", "tls_key": "nothing.key"}, "--tls-key .* cannot be read"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start(minilm, certificates, files, words):
    paths = {field: certificates / name for field, name in files.items()}
    config = GatewayConfig(model=minilm, replicas=("a:1",), **paths)
    check = check_server_certificate if config.replica_ca is None else replica_credentials
    with pytest.raises(StartupError, match=words):
        check(config)


@pytest.mark.parametrize(
    "files",
    [
        {"replica_certificate": "client.pem"},
        {"replica_certificate": "client.pem", "replica_key": "client.key"},
        {"tls_certificate": "server.pem"},
        {"tls_key": "server.key"},
    ],
)
def test_half_a_setting_stops_the_start(minilm, certificates, files):
    paths = {field: certificates / name for field, name in files.items()}
    with pytest.raises(StartupError):
        GatewayConfig(model=minilm, replicas=("a:1",), **paths)


async def test_https_for_clients(minilm, certificates, tmp_path):
    flags = (
        "--tls-certificate",
        str(certificates / "server.pem"),
        "--tls-key",
        str(certificates / "server.key"),
    )
    async with gateway_process(minilm, tmp_path, "--port", "0", *flags) as (_, base):
        context = ssl.create_default_context(cafile=str(certificates / "authority.pem"))
        secure = base.replace("http://", "https://")
        async with httpx.AsyncClient(base_url=secure, verify=context) as client:
            assert len((await client.post("/embed", json={"inputs": ["a", "b"]})).json()) == 2
        async with httpx.AsyncClient(base_url=base) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/live")
