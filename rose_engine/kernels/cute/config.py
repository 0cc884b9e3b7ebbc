"""How the GEMMs of a fused decoder layer are tiled and how early they may start.

Knows no toolchain, so it can always be imported; which configuration is best is the layer's to know.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass


class Early(enum.Flag):
    """What a GEMM may do before the kernel in front of it has ended (programmatic dependent launch).

    RELEASE: the next kernel may take free multiprocessors at once, not when this one ends.
    WEIGHTS: the weights of the first K tiles are loaded before waiting for the previous kernel.
    EPILOGUE: what the epilogue reads (residual, rotary table, row scales) is loaded before the main loop.
    """

    NONE = 0
    RELEASE = enum.auto()
    WEIGHTS = enum.auto()
    EPILOGUE = enum.auto()
    ALL = RELEASE | WEIGHTS | EPILOGUE


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One way to run one GEMM: tile of the output in rows and columns, cluster of tiles, schedule.

    `tile_k` None leaves the K tile to the kernel (64). `pingpong` lets two warp groups alternate tiles,
    for launches of many tiles. Raises `ValueError` for combinations that would be wrong or hang.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    tile_k: int | None = None
    early: Early = Early.NONE

    def __post_init__(self) -> None:
        if self.tile_m % 64 or self.tile_n % 32:
            raise ValueError(f"tile {self.tile_m}x{self.tile_n}: needs multiples of 64 rows and 32 columns")
        if self.cluster_m * self.cluster_n not in (1, 2, 4):
            raise ValueError(f"cluster {self.cluster_m}x{self.cluster_n}: needs 1, 2 or 4 tiles")
        if self.pingpong and self.early:
            # Measured: with two warp groups alternating tiles, the early variants never finish.
            raise ValueError("early: not with pingpong, the kernel would hang")
        if Early.WEIGHTS in self.early and Early.RELEASE not in self.early:
            raise ValueError("early: WEIGHTS without RELEASE would never release the next kernel")

    def column_tiles(self, width: int) -> int:
        """Column tiles of an output of `width` columns: also its partial sums of squares a row."""
        return -(-width // self.tile_n)

    def starting(self, early: Early) -> GemmConfig:
        """The same tiles starting `early`, where that is possible at all."""
        return self if self.pingpong else dataclasses.replace(self, early=early)

    def __str__(self) -> str:
        parts = [f"{self.tile_m}x{self.tile_n}", f"c{self.cluster_m}x{self.cluster_n}"]
        parts += [f"k{self.tile_k}"] if self.tile_k else []
        parts += ["pingpong"] if self.pingpong else []
        parts += ["+" + str(self.early.name).lower()] if self.early else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class JoinedQkv:
    """q, k and v in one launch.

    `deferred_norm` leaves QK-norm's division to the attention kernel, which gets the heads' sums of squares:
    a tile may then be half a head, which fills the card at a hundred tokens.
    """

    gemm: GemmConfig
    deferred_norm: bool = False

    def refusal(self, head_dim: int) -> str | None:
        """Why these tiles do not fit heads of `head_dim`; `None` when they do."""
        tile_n = self.gemm.tile_n
        if self.deferred_norm and head_dim % tile_n:
            return f"qkv: with a deferred norm a tile of {tile_n} columns must divide a head of {head_dim}"
        if not self.deferred_norm and tile_n % head_dim:
            return f"qkv: a tile of {tile_n} columns must hold whole heads of {head_dim}"
        return None

    def starting(self, early: Early) -> JoinedQkv:
        """See `GemmConfig.starting`."""
        return JoinedQkv(self.gemm.starting(early), self.deferred_norm)

    def __str__(self) -> str:
        return f"{self.gemm}{' deferred norm' if self.deferred_norm else ''}"


@dataclass(frozen=True, slots=True)
class SplitQkv:
    """q and k in one launch, v in another, each with just the epilogue it needs: pays for many tokens."""

    queries_keys: GemmConfig
    values: GemmConfig
    deferred_norm = False

    def refusal(self, head_dim: int) -> str | None:
        """Why these tiles do not fit heads of `head_dim`; `None` when they do."""
        return JoinedQkv(self.queries_keys).refusal(head_dim)

    def starting(self, early: Early) -> SplitQkv:
        """See `GemmConfig.starting`."""
        return SplitQkv(self.queries_keys.starting(early), self.values.starting(early))

    def __str__(self) -> str:
        return f"{self.queries_keys} / {self.values}"
