"""An override of `compose.yaml` for several GPUs: one server each, and a gateway that waits for all of them.

    python deploy/compose_gpus.py 8 > deploy/compose.override.yaml

`docker compose` reads a file of that name by itself. Each further server is the first one's definition with
another device and a cache of its own. Needs PyYAML.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

COMPOSE_FILE = Path(__file__).parent / "compose.yaml"
HEADER = "# Written by `python deploy/compose_gpus.py {num_gpus}`: do not edit.\n"
MAX_GPUS = 16


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("num_gpus", type=int, metavar="N", help=f"GPUs of the machine: 2 to {MAX_GPUS}")
    num_gpus = parser.parse_args().num_gpus
    if not 2 <= num_gpus <= MAX_GPUS:
        parser.error(f"N must be 2 to {MAX_GPUS}, not {num_gpus}: compose.yaml alone serves one GPU")
    sys.stdout.write(HEADER.format(num_gpus=num_gpus))
    yaml.safe_dump(override(num_gpus), sys.stdout, sort_keys=False)


def override(num_gpus: int) -> dict[str, Any]:
    """What `compose.yaml` lacks for `num_gpus` GPUs."""
    first = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))["services"]["tulip-0"]
    further = range(1, num_gpus)
    started = {f"tulip-{gpu}": {"condition": "service_healthy"} for gpu in further}
    services = {"gateway": {"depends_on": started}}
    services |= {f"tulip-{gpu}": server(first, gpu) for gpu in further}
    return {"services": services, "volumes": {f"tulip-{gpu}-cache": {} for gpu in further}}


def server(first: dict[str, Any], gpu: int) -> dict[str, Any]:
    """The definition of the server on GPU `gpu`: that of the first one, of which nothing is shared."""
    service: dict[str, Any] = json.loads(json.dumps(first))
    cache = f"tulip-{gpu}-cache"
    service["volumes"] = [volume.replace("tulip-0-cache", cache) for volume in service["volumes"]]
    service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] = [str(gpu)]
    return service


if __name__ == "__main__":
    main()
