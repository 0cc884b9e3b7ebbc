"""One gateway and two servers from their images, started, watched and stopped as an orchestrator would.

Each step checks what the documents promise of it and raises `ExerciseError` when it does not hold.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.exercise import traffic
from deploy.exercise.containers import Container, ExerciseError
from deploy.exercise.image import Image
from deploy.exercise.traffic import Client

API_KEY = "exercise-key"
GATEWAY_PORT = 18080
SERVER_PORTS = (15051, 15052)
METRICS_PORTS = (19401, 19402)
START_SECONDS = 300.0
STEADY_REQUESTS = 120
STOP_SECONDS = 45.0  # stop_grace_period of compose.yaml

_STALL_SECONDS = 5.0  # above the 1.5 s of silence after which a gateway takes a server out


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs, and a client of it."""

    gateway: Container
    servers: tuple[Container, Container]
    client: Client


@contextmanager
def started(gateway: Image, tulip: Image, model: Path, folder: Path) -> Iterator[Deployment]:
    """Gateway first: it must be alive and unhealthy until a server answers."""
    keys = folder / "api-keys.txt"
    keys.write_text(f"# one a line\n{API_KEY}\n")
    with ExitStack() as stack:

        def start(name: str, image: Image, settings: dict[str, str]) -> Container:
            container = Container(name, image, settings, folder / f"{name}.log")
            stack.callback(container.kill)
            return container

        front = start("gateway", gateway, _gateway_settings(model, keys))
        client = Client(f"http://127.0.0.1:{GATEWAY_PORT}", API_KEY)
        wait_for("the gateway to be alive", lambda: client.get("/live") == 200)
        expect(not front.healthy(), "a gateway without servers is unhealthy")
        servers = tuple(start(f"tulip-{i}", tulip, _server_settings(model, i)) for i in range(2))
        for server in servers:
            print(f"{server.name} healthy after {server.until_healthy(START_SECONDS):.1f} s", flush=True)
        front.until_healthy(START_SECONDS)
        yield Deployment(front, (servers[0], servers[1]), client)


def use(deployment: Deployment) -> None:
    """Ordinary requests, mistakes and too much at once, side by side; then a server hangs."""
    client = deployment.client
    expect(client.post("/embed", traffic.SHORT) == 200, "a request with a key is answered")
    expect(client.post("/embed", traffic.SHORT, key="wrong") == 401, "one with a wrong key is not")
    together(
        lambda: traffic.send(client, traffic.ordinary, count=150, workers=2, pause=0.3),
        lambda: traffic.send(client, traffic.mistaken, count=20, workers=1, pause=1.0),
        lambda: traffic.send(client, traffic.heavy, count=24, workers=8, pause=2.0),
    )
    expect(client.answers[429] > 0, "too much at once is refused")
    traffic.send(client, traffic.impatient, count=4, workers=2)
    outcomes = traffic.crowd(f"127.0.0.1:{SERVER_PORTS[0]}", chunks=20, lengths=(200,) * 5)
    expect(set(outcomes) == {"OK", "RESOURCE_EXHAUSTED"}, f"a server takes what it has room for: {outcomes}")
    hang(deployment)
    crash(deployment)


def hang(deployment: Deployment) -> None:
    """One of two servers stops without a word: requests go on, and it comes back when it does."""
    victim, client = deployment.servers[1], deployment.client
    victim.signal(signal.SIGSTOP)
    try:
        end = time.monotonic() + _STALL_SECONDS
        while time.monotonic() < end:
            client.post("/embed", traffic.SHORT)
            time.sleep(0.2)
        expect(deployment.gateway.healthy(), "one server is enough for the gateway's health")
        statuses = traffic.send(client, traffic.ordinary, count=15, workers=1)
        expect(statuses == Counter({200: 15}), f"requests are answered past a hung server: {statuses}")
    finally:
        victim.signal(signal.SIGCONT)
    expect(victim.until_healthy(START_SECONDS) >= 0, "it is healthy again")
    traffic.send(client, traffic.ordinary, count=20, workers=2, pause=0.3)


def crash(deployment: Deployment) -> None:
    """One of two servers dies under load and is started again: no request fails."""
    victim, client = deployment.servers[1], deployment.client
    statuses = during(victim, signal.SIGKILL, lambda: steady(client))
    expect(statuses == Counter({200: STEADY_REQUESTS}), f"a server dies and nobody notices: {statuses}")
    victim.start()
    victim.until_healthy(START_SECONDS)
    traffic.send(client, traffic.ordinary, count=20, workers=2, pause=0.3)


def stop(deployment: Deployment) -> None:
    """A rolling end: a server under load, the gateway with a request in flight, the last server."""
    first, last = deployment.servers
    client, gateway = deployment.client, deployment.gateway
    statuses = during(first, signal.SIGTERM, lambda: steady(client))
    expect(statuses == Counter({200: STEADY_REQUESTS}), f"a server drains and nobody notices: {statuses}")
    bulk = during(gateway, signal.SIGTERM, lambda: traffic.send(client, traffic.heavy, count=1, workers=1))
    expect(bulk == Counter({200: 1}), f"the gateway finishes what is in flight: {bulk}")
    expect(last.healthy(), "a server outlives its gateway")
    last.signal(signal.SIGTERM)
    expect(last.exit_code(STOP_SECONDS) == 0, "the last server ends with 0")


def steady(client: Client) -> Counter[int]:
    """Ordinary requests, always four at a time: each server has some at every moment."""
    return traffic.send(client, traffic.ordinary, count=STEADY_REQUESTS, workers=4)


def during(container: Container, number: int, work: Callable[[], Counter[int]]) -> Counter[int]:
    """Signal `number` to `container` while `work` runs; what `work` gives. SIGTERM must end it with 0."""
    outcomes: list[Counter[int]] = []
    worker = threading.Thread(target=lambda: outcomes.append(work()))
    worker.start()
    time.sleep(0.3)
    container.signal(number)
    code = container.exit_code(STOP_SECONDS)
    worker.join()
    if code != (wanted := 0 if number == signal.SIGTERM else -number):
        raise ExerciseError(f"{container.name} ended with {code}, not {wanted}: {container.last_words()}")
    return outcomes[0]


def together(*works: Callable[[], object]) -> None:
    """Run all at the same time, to their ends."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_for(what: str, holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Ask until it holds. Raises `ExerciseError` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise ExerciseError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.2)


def expect(holds: bool, promise: str) -> None:
    """Print the promise, or raise `ExerciseError` with it."""
    if not holds:
        raise ExerciseError(f"does not hold: {promise}")
    print(f"ok: {promise}", flush=True)


def _gateway_settings(model: Path, keys: Path) -> dict[str, str]:
    return {
        "IVY_MODEL": str(model),
        "IVY_HOST": "127.0.0.1",
        "IVY_PORT": str(GATEWAY_PORT),
        "IVY_REPLICAS": ",".join(f"127.0.0.1:{port}" for port in SERVER_PORTS),
        "IVY_API_KEYS_FILE": str(keys),
        "IVY_OPEN_METRICS": "true",
        # Small, so that a few bulk requests are too much for the gateway, and already for the servers.
        "IVY_MAX_CHUNK_TOKENS": "1024",
        "IVY_BULK_WINDOW": "8",
        "IVY_MAX_WAITING_TOKENS": "30000",
    }


def _server_settings(model: Path, number: int) -> dict[str, str]:
    return {
        "TULIP_MODEL": str(model),
        "TULIP_HOST": "127.0.0.1",
        "TULIP_PORT": str(SERVER_PORTS[number]),
        "TULIP_METRICS_PORT": str(METRICS_PORTS[number]),
        "TULIP_DEVICE": "cpu",
        "TULIP_THREADS": "1",
        "TULIP_MAX_BATCH_TOKENS": "1024",
        "TULIP_MAX_WAITING_TOKENS": "6200",  # room for one bulk request, not for two
    }
