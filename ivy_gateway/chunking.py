"""Cut a job's inputs into chunks for the replicas, and put the rows together again in the job's order.

Pure functions: knows nothing of replicas, of deadlines or of what the rows mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ivy_gateway.jobs import Chunk, EncodedInput, Lane, Output


def split(
    inputs: Sequence[EncodedInput],
    max_tokens: int,
    max_inputs: int,
    parts: int = 1,
    output: Output = Output.OWN,
    lane: Lane = Lane.INTERACTIVE,
) -> list[Chunk]:
    """Cut `inputs` into consecutive chunks of at most `max_tokens` and `max_inputs`, for `output`, in `lane`.

    Every input is in exactly one chunk, in order; one that is over `max_tokens` by itself forms its own.
    The cost is spread evenly over as many chunks as are needed, and over at least `parts` of them while the
    inputs last: one for each replica that could work at the same time.
    """
    total = sum(item.num_tokens for item in inputs)
    if parts == 1 and total <= max_tokens and 0 < len(inputs) <= max_inputs:
        return [Chunk(tuple(inputs), output, lane)]
    wanted = min(max(parts, -(-total // max_tokens)), max(len(inputs), 1))
    chunks: list[Chunk] = []
    current: list[EncodedInput] = []
    cost = done = 0
    for item in inputs:
        # The next chunk starts where this input's middle passes the even share of the chunks so far.
        share_spent = (done + item.num_tokens / 2) * wanted > (len(chunks) + 1) * total
        if current and (share_spent or cost + item.num_tokens > max_tokens or len(current) == max_inputs):
            chunks.append(Chunk(tuple(current), output, lane))
            current, cost = [], 0
        current.append(item)
        cost += item.num_tokens
        done += item.num_tokens
    return [*chunks, Chunk(tuple(current), output, lane)] if current else chunks


def merge(chunk_rows: Sequence[NDArray[Any]], chunks: Sequence[Chunk]) -> NDArray[Any]:
    """The rows of all chunks, `[R, D]`, in the job's order; a chunk's are in the order of its inputs."""
    assert len(chunk_rows) == len(chunks), "one block of rows per chunk: this is a bug of the caller"
    rows_RD = chunk_rows[0] if len(chunk_rows) == 1 else np.concatenate(chunk_rows)
    indexes = [item.index for chunk in chunks for item in chunk.inputs]
    if indexes == sorted(indexes):
        return rows_RD
    counts = [item.num_rows(chunk.output) for chunk in chunks for item in chunk.inputs]
    parts = np.split(rows_RD, np.cumsum(counts)[:-1])
    return np.concatenate([parts[place] for place in np.argsort(indexes)])
