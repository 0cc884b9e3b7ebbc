"""`python -m tulip_server.probe [ADDRESS]`: ask a server for its health; exit status 0 when it serves.

For the health checks of containers. The address is 127.0.0.1 at the port in `TULIP_PORT` unless given.
Knows the standard gRPC health protocol, and nothing of what runs behind it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos.tulip.v1 import inference_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_DEFAULT_PORT = 50051


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Ask once; the exit status: 0 serving, 1 anything else, with one line that says what."""
    options = _parser(environment).parse_args(arguments)
    try:
        answer = _ask(options)
    except OSError as error:
        answer = f"cannot read {error.filename}: {error.strerror}"
    sys.stdout.write(f"{options.address}: {answer}\n")
    return 0 if answer == "SERVING" else 1


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tulip_server.probe", description=main.__doc__)
    default = f"127.0.0.1:{environment.get('TULIP_PORT') or _DEFAULT_PORT}"
    parser.add_argument("address", nargs="?", default=default, help=f"host:port or unix:/path ({default})")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="seconds to wait (3)")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="PEM authorities to trust: speak TLS")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="our own, for mutual TLS")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its key")
    parser.add_argument("--server-name", metavar="NAME", help="in the server's certificate (the address)")
    return parser


def _ask(options: argparse.Namespace) -> str:
    """The health of the inference service, or the gRPC status of a failed call, by name."""
    with _channel(options) as channel:
        try:
            reply = HealthStub(channel).Check(HealthCheckRequest(service=_SERVICE), timeout=options.timeout)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(HealthCheckResponse.ServingStatus.Name(reply.status))


def _channel(options: argparse.Namespace) -> grpc.Channel:
    """Raises `OSError` for a file that cannot be read."""
    if options.ca is None:
        return grpc.insecure_channel(options.address)
    certificate, key = (file and file.read_bytes() for file in (options.certificate, options.key))
    credentials = grpc.ssl_channel_credentials(options.ca.read_bytes(), key, certificate)
    name = options.server_name
    settings = () if name is None else (("grpc.ssl_target_name_override", name),)
    return grpc.secure_channel(options.address, credentials, settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
