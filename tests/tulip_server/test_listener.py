"""Where clients connect: TLS, mutual TLS, Unix sockets, and what is refused at start."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from rose_engine.fake import FakeEngine
from tulip_server.config import ServerConfig
from tulip_server.errors import StartupError
from tulip_server.listener import bound, credentials
from tulip_server.server import Server


@dataclass(frozen=True)
class Authority:
    """A certificate authority of one test, by the openssl command."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir()
        names = ("-subj", "/CN=test authority", "-addext", "basicConstraints=critical,CA:TRUE")
        openssl(folder, "req", "-x509", *NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", *names)
        return cls(folder)

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for 127.0.0.1, and its key."""
        names = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key")
        openssl(
            self.folder,
            "req",
            "-x509",
            *NEW_KEY,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            *names,
            *signed,
        )
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    return Authority.make(tmp_path_factory.mktemp("keys") / "ours")


@asynccontextmanager
async def listening(**settings):
    """A served listener, by the same flags as the command's."""
    config = ServerConfig(model=Path("fake"), port=0, **settings)
    with bound(config) as listener:
        await listener.open()
        server = Server(FakeEngine(), config, listener)
        await server.start()
        try:
            yield listener
        finally:
            await server.drain()


async def describe(channel: grpc.aio.Channel) -> pb.DescribeReply:
    async with channel:
        return await InferenceStub(channel).Describe(pb.DescribeRequest(), timeout=10)


def client(authority: Authority, own: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    certificate, key = (None, None) if own is None else (own[0].read_bytes(), own[1].read_bytes())
    return grpc.ssl_channel_credentials(authority.certificate.read_bytes(), key, certificate)


def tls(authority: Authority, name: str = "server") -> dict[str, Path]:
    certificate, key = authority.issue(name)
    return {"tls_certificate": certificate, "tls_key": key}


# -- TLS


async def test_tls_serves_who_knows_the_authority_and_nobody_in_the_clear(authority):
    async with listening(**tls(authority)) as listener:
        secure = grpc.aio.secure_channel(listener.address, client(authority))
        assert (await describe(secure)).model_id == "fake"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(grpc.aio.insecure_channel(listener.address))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_lets_in_only_certificates_of_its_authority(authority, tmp_path):
    stranger = Authority.make(tmp_path / "theirs")
    async with listening(**tls(authority), tls_client_ca=authority.certificate) as listener:
        known = grpc.aio.secure_channel(listener.address, client(authority, authority.issue("gateway")))
        assert (await describe(known)).model_id == "fake"
        for own in (None, stranger.issue("gateway")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await describe(grpc.aio.secure_channel(listener.address, client(authority, own)))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_files_that_do_not_do_are_named_by_their_flag(authority, tmp_path):
    certificate, key = authority.issue("one")
    _, other_key = authority.issue("two")
    empty = tmp_path / "empty.pem"
    empty.touch()
    for message, files in (
        ("--tls-certificate: .*absent.pem: No such file", (tmp_path / "absent.pem", key, None)),
        ("--tls-key: .*absent.key: No such file", (certificate, tmp_path / "absent.key", None)),
        ("--tls-client-ca: .*absent.pem: No such file", (certificate, key, tmp_path / "absent.pem")),
        ("--tls-certificate .* and --tls-key .* are no PEM pair", (certificate, other_key, None)),
        ("--tls-certificate .* and --tls-key .* are no PEM pair", (empty, key, None)),
        ("--tls-client-ca: .*empty.pem holds no PEM certificate", (certificate, key, empty)),
    ):
        config = ServerConfig(
            model=Path("fake"), tls_certificate=files[0], tls_key=files[1], tls_client_ca=files[2]
        )
        with pytest.raises(StartupError, match=message):
            credentials(config)


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(authority):
    certificate, key = authority.issue("locked")
    openssl(
        authority.folder, "ec", "-in", key.name, "-out", "locked.enc", "-aes256", "-passout", "pass:secret"
    )
    config = ServerConfig(
        model=Path("fake"), tls_certificate=certificate, tls_key=authority.folder / "locked.enc"
    )
    with pytest.raises(StartupError, match="no PEM pair"):
        credentials(config)


# -- Unix sockets


@pytest.mark.parametrize("mode", ["600", "660"])
async def test_a_socket_serves_whom_its_mode_lets_and_is_gone_afterwards(tmp_path, mode):
    path = tmp_path / "tulip.sock"
    umask = os.umask(0o022)
    os.umask(umask)
    async with listening(socket=path, socket_mode=mode) as listener:
        assert listener.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
        assert (await describe(grpc.aio.insecure_channel(listener.address))).model_id == "fake"
    assert not path.exists()
    assert os.umask(umask) == umask


async def test_a_socket_that_a_dead_server_left_is_replaced(tmp_path):
    path = tmp_path / "tulip.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with listening(socket=path) as listener:
        assert (await describe(grpc.aio.insecure_channel(listener.address))).model_id == "fake"


async def test_a_socket_in_use_is_left_alone(tmp_path):
    path = tmp_path / "tulip.sock"
    async with listening(socket=path) as listener:
        with (
            pytest.raises(StartupError, match="in use"),
            bound(ServerConfig(model=Path("fake"), socket=path)),
        ):
            pass
        assert (await describe(grpc.aio.insecure_channel(listener.address))).model_id == "fake"


@pytest.mark.parametrize(
    ("name", "message"), [("file", "no socket"), ("x" * 120, "longer than 107 bytes"), ("a/b", "a/b")]
)
async def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path, name, message):
    (tmp_path / "file").write_text("precious")
    with (
        pytest.raises(StartupError, match=f"--socket: .*{message}"),
        bound(ServerConfig(model=Path("fake"), socket=tmp_path / name)),
    ):
        pass
    assert (tmp_path / "file").read_text() == "precious"
