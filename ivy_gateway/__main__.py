"""`python -m ivy_gateway --model FOLDER --replica HOST:PORT ...`: one gateway.

A setting, file or port that stops it is one line on stderr and exit code 1; 2 for flags that cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError
from ivy_gateway.server import serve


def main(argv: Sequence[str]) -> int:
    """Run the gateway; the exit code."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--ready-file", type=Path)  # for whoever starts the process: not a setting
    known, rest = own.parse_known_args(argv)
    try:
        serve(GatewayConfig.from_args(rest, os.environ), known.ready_file)
    except StartupError as error:
        if "--debug" in rest:
            raise
        print(f"ivy: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
