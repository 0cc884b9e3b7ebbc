"""`python -m tulip_server`: flags in, exit status out; see `--help`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tulip_server.config import ServerConfig
from tulip_server.errors import ConfigError
from tulip_server.process import complain, run

if TYPE_CHECKING:
    from rose_engine.engine import Engine


def main(arguments: list[str]) -> int:
    """Run a server to its end. Exit status: 0 drained, 1 could not start or died, 2 bad flags."""
    try:
        config = ServerConfig.from_command_line(arguments)
    except ConfigError as error:
        return complain(error, 2)
    return run(config, lambda: _load(config))


def _load(config: ServerConfig) -> Engine:
    # Imported late: `--help` and a bad flag need not wait for torch.
    from rose_engine.config import EngineConfig
    from rose_engine.engine import Engine
    from tulip_server import faults

    if (asked := faults.Faults.from_environment()) is not None:
        faults.install(asked)
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
    return Engine.load(engine_config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
