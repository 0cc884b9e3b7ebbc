"""A Tulip whose engine sleeps instead of computing: overload and fairness on a machine with few cores.

    python -m benchmarks.fixed_rate_server --tokens-per-second N --model FOLDER [--step-overhead-ms M]
        [--dimensions D] [any flag of python -m tulip_server]

The same server, wire and queue as `python -m tulip_server`, over `FixedRateEngine`: a step takes M ms and
then 1/N s for each of its tokens, one step after the other. Of FOLDER only the configuration and the
tokenizer's file are read. A row follows from its own sequence's ids alone (`rose_engine.fake.fake_rows`), so
replies can be checked by value: `expected_row` says what must come. Faults of `BOUQUET_FAULTS` act here too
(`tulip_server/faults.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from rose_engine.batch import Batch, Sequence
from rose_engine.fake import fake_rows
from rose_engine.fixed_rate import FixedRateEngine
from rose_engine.lazy_tensor import Rows
from rose_engine.limits import EngineLimits
from tulip_server.config import ServerConfig
from tulip_server.errors import ConfigError
from tulip_server.faults import Faults
from tulip_server.process import complain, run

DIMENSIONS = 384
MAX_BATCH_TOKENS = 4096
MAX_BATCH_SEQUENCES = 256
MAX_LENGTH = 512  # where the folder does not say


def expected_row(token_ids: SequenceOf[int], dimensions: int = DIMENSIONS) -> Rows:
    """The row `[dimensions]` that the server answers for one sequence of `token_ids`."""
    return fake_rows(Batch.pack([Sequence(np.array(token_ids, np.int32))]), dimensions)[0]


def parse(arguments: list[str]) -> tuple[argparse.Namespace, ServerConfig]:
    """Our own flags, and the server's. Raises `ConfigError` for a bad one of the latter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokens-per-second", type=float, required=True)
    parser.add_argument("--step-overhead-ms", type=float, default=0.0)
    parser.add_argument("--dimensions", type=int, default=DIMENSIONS)
    own, others = parser.parse_known_args(arguments)
    if not (own.tokens_per_second > 0 and own.step_overhead_ms >= 0 and own.dimensions > 0):
        parser.error("a rate, an overhead and dimensions above zero are needed")
    # The model's reference vectors are not what this engine gives.
    return own, replace(ServerConfig.from_command_line(others), allow_reference_gap=True)


def engine(own: argparse.Namespace, config: ServerConfig) -> FixedRateEngine:
    """The engine that those flags describe."""
    faults = Faults.from_environment()
    made = FixedRateEngine(
        own.tokens_per_second,
        own.step_overhead_ms / 1000,
        own.dimensions,
        limits(config),
        fake_rows if faults is None else Compute(faults),
    )
    tokenizer_file = config.model / "tokenizer.json"
    made.description = replace(
        made.description,
        model_id=config.model.resolve().name,
        tokenizer_file=tokenizer_file if tokenizer_file.exists() else None,
    )
    return made


def limits(config: ServerConfig) -> EngineLimits:
    """The folder's own, and the flags' batch."""
    file = config.model / "config.json"
    facts = json.loads(file.read_text()) if file.exists() else {}
    return EngineLimits(
        max_length=facts.get("max_position_embeddings", MAX_LENGTH),
        vocabulary_size=facts.get("vocab_size", 2**31 - 1),
        num_segments=facts.get("type_vocab_size", 1),
        max_batch_tokens=config.max_batch_tokens or MAX_BATCH_TOKENS,
        max_batch_sequences=config.max_batch_sequences or MAX_BATCH_SEQUENCES,
    )


class Compute:
    """`fake_rows`, with the faults that a folder asks for."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __call__(self, batch: Batch, dimensions: int) -> Rows:
        """The rows of `batch`. Raises what a fault raises."""
        self._faults.in_forward()
        rows = fake_rows(batch, dimensions)
        if self._faults.taken("nan"):
            rows[0] = np.nan
        return rows


def main(arguments: list[str]) -> int:
    """Serve until a signal; the exit status is that of `python -m tulip_server`."""
    try:
        own, config = parse(arguments)
    except ConfigError as error:
        return complain(error, 2)
    return run(config, lambda: engine(own, config))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
