"""`python -m tests.chaos.named_gateway`: the gateway, on a machine whose DNS is a file.

The file that `CHAOS_NAMES` names is JSON: an object of host names, each with the list of its addresses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ivy_gateway import resolver
from ivy_gateway.__main__ import main


async def lookup(host: str, port: int) -> list[str]:
    """Every address of `host`. Raises `OSError`."""
    names = json.loads(Path(os.environ["CHAOS_NAMES"]).read_text())
    if host not in names:
        raise OSError(f"{host}: name not known")
    return [f"{address}:{port}" for address in names[host]]


if __name__ == "__main__":
    resolver.Resolver.__init__.__defaults__ = (lookup,)
    sys.exit(main(sys.argv[1:]))
