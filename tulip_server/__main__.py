"""`python -m tulip_server`: flags in, exit status out; see `--help`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from rose_engine.errors import EngineError
from tulip_server.config import ServerConfig
from tulip_server.errors import ConfigError, TulipError


def main(arguments: list[str]) -> int:
    """Run a server to its end. Exit status: 0 drained, 1 could not start or died, 2 bad flags."""
    try:
        config = ServerConfig.from_command_line(arguments)
    except ConfigError as error:
        return _complain(error, 2)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        _serve(config)
    except (TulipError, EngineError) as error:
        if config.debug:
            raise
        return _complain(error, 1)
    except KeyboardInterrupt:  # while the engine was loading
        return 130
    return 0


def _serve(config: ServerConfig) -> None:
    # gRPC reads this when it is imported; what it would write beside our own line helps nobody.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Imported late: `--help` and a bad flag need not wait for torch.
    from rose_engine.config import EngineConfig
    from rose_engine.engine import Engine
    from tulip_server import faults
    from tulip_server.server import serve

    if folder := os.environ.get(faults.FOLDER_VARIABLE):
        faults.install(Path(folder))
    engine_config = EngineConfig(
        model=config.model,
        task=config.task,
        device=config.device,
        dtype=config.dtype,
        attention=config.attention,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_sequences=config.max_batch_sequences,
        threads=config.threads,
    )
    asyncio.run(serve(config, lambda: Engine.load(engine_config)))


def _complain(error: Exception, status: int) -> int:
    print(f"tulip_server: error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
