"""The hash that says whether two engines give equal vectors for equal ids.

Covers the bytes of the weight files and what is done with them; not the folder they lie in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Files are hashed in blocks of this many bytes, several at a time; part of the definition of the hash.
BLOCK_BYTES = 64 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_THREADS = 8


def weights_hash(files: Sequence[Path], facts: Iterable[str]) -> str:
    """16 hexadecimal digits over the bytes of `files`, in this order, and over `facts`.

    SHA-256 of the lengths of the files, the SHA-256 digests of their blocks, and the facts. Raises `OSError`.
    """
    blocks = [(file, start) for file in files for start in range(0, file.stat().st_size, BLOCK_BYTES)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="rose-hash") as pool:
        digests = list(pool.map(_block_digest, blocks))
    whole = hashlib.sha256()
    for file in files:
        whole.update(b"%d;" % file.stat().st_size)
    for digest in digests:
        whole.update(digest)
    for fact in facts:
        whole.update(b"%d:" % len(fact) + fact.encode())
    return whole.hexdigest()[:16]


def _block_digest(block: tuple[Path, int]) -> bytes:
    """Digest of one block; the lock of the interpreter is free while bytes are read and hashed."""
    file, start = block
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(start)
        left = BLOCK_BYTES
        while left and (chunk := stream.read(min(_READ_BYTES, left))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()
