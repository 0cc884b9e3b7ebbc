"""What each GEMM of a decoder layer does to its accumulator before it is stored.

Written per element (or per pair of adjacent columns) for the toolchain, which compiles them into the GEMM.
Weight rows are prepared so that the two members of a pair are neighbours: the halves of a rotary pair, a gate
and its up. `rose_engine.kernels.cute.reference` says the same in plain torch.
"""

# mypy: disable-error-code="misc, untyped-decorator"
# (The DSL's classes and decorators have no types.)

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from quack.activation import swiglu
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import torch2cute_dtype_map
from quack.epilogue.head_rmsnorm import HeadRstd
from quack.epilogue.math import pack, unpack
from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad, TileLoad, VecLoad
from quack.epilogue.rotary import rotary_cos_sin_load

from rose_engine.kernels.cute.early import HopperEpilogue, Traced


class Columns(RowVecLoad):
    """A constant of each column `[1, N]`; an early epilogue loads it before anything else."""

    constant = True

    @cute.jit
    def prefetch(
        self, gemm: Traced, param: Traced, smem_tensor: Traced, tile_coord: Traced, tidx: Traced
    ) -> None:
        """Put this tile's values into shared memory."""
        tile_n = const_expr(gemm.cta_tile_shape_mnk[1])
        limit = min(cute.size(param, mode=[1]) - tile_coord[1] * tile_n, tile_n)
        values_N = cute.local_tile(param[0, None], (tile_n,), (tile_coord[1],))
        for first in cutlass.range_constexpr(0, tile_n, gemm.num_epi_warps * cute.arch.WARP_SIZE):
            column = first + tidx
            if column < limit:
                smem_tensor[column] = values_N[column]

    @cute.jit
    def begin(self, gemm: Traced, param: Traced, smem_tensor: Traced, ctx: Traced) -> list[Traced]:
        """The epilogue's view of the vector; see `VecLoad`."""
        if const_expr(not gemm.epilogue_early):
            self.prefetch(gemm, param, smem_tensor, ctx.tile_coord_mnkl, ctx.tidx)
        return _spread_over_tile(self, gemm, smem_tensor, ctx)


class RowScale(ColVecLoad):
    """Inverse root mean square of each row, from partial sums of squares `[M, P]` over `width` columns.

    The GEMM that made the rows stored one sum a column tile; adding up P of them here costs less than a
    kernel of its own. With the scale already in shared memory (`prefetch`), `begin` only hands it out.
    """

    constant = False

    def __init__(self, name: str, width: int, eps: float) -> None:
        super().__init__(name)
        self.width, self.eps = width, eps

    def config_key(self) -> tuple[object, ...]:
        """What tells one such operand from another in the cache of compiled kernels."""
        return self.width, self.eps

    def host_arg_key(self, value: Traced) -> object:
        """Type and number of partial sums: the kernel is compiled for them."""
        return None if value is None else (torch2cute_dtype_map[value.dtype], value.shape[-1])

    def host_fake_arg(self, key: Traced, fctx: Traced) -> Traced:
        """A stand-in to compile against."""
        dtype, parts = key
        aligned = parts if parts in (1, 2) else 4 if parts % 4 == 0 else 1
        return make_fake_tensor(dtype, (fctx.m, parts), leading_dim=1, divisibility=aligned)

    @cute.jit
    def prefetch(
        self, gemm: Traced, param: Traced, smem_tensor: Traced, tile_coord: Traced, tidx: Traced
    ) -> None:
        """Put this tile's scales into shared memory."""
        tile_m = const_expr(gemm.cta_tile_shape_mnk[0])
        parts = const_expr(param.shape[1])
        limit = min(cute.size(param, mode=[0]) - tile_coord[0] * tile_m, tile_m)
        sums_MP = cute.local_tile(param, (tile_m, parts), (tile_coord[0], 0))
        for first in cutlass.range_constexpr(0, tile_m, gemm.num_epi_warps * cute.arch.WARP_SIZE):
            row = first + tidx
            if row < limit:
                sums = cute.make_rmem_tensor(parts, Float32)
                cute.autovec_copy(sums_MP[row, None], sums)
                total = Float32(0.0)
                for part in cutlass.range_constexpr(parts):
                    total += sums[part]
                smem_tensor[row] = cute.math.rsqrt(total * (1.0 / self.width) + self.eps, fastmath=True)

    @cute.jit
    def begin(self, gemm: Traced, param: Traced, smem_tensor: Traced, ctx: Traced) -> list[Traced]:
        """The epilogue's view of the vector; see `VecLoad`."""
        if const_expr(not gemm.epilogue_early):
            self.prefetch(gemm, param, smem_tensor, ctx.tile_coord_mnkl, ctx.tidx)
        return _spread_over_tile(self, gemm, smem_tensor, ctx)


def _spread_over_tile(op: VecLoad, gemm: Traced, smem_tensor: Traced, ctx: Traced) -> list[Traced]:
    """What `VecLoad.begin_loop` expects: the vector seen as a tile, and registers for a part of it."""
    broadcast = cute.make_layout((ctx.tile_M, ctx.tile_N), stride=op._broadcast_stride())
    tile = ctx.partition_for_epilogue_fn(cute.make_tensor(smem_tensor.iterator, broadcast))
    subtile = cute.group_modes(tile, 3, cute.rank(tile))[None, None, None, 0]
    return [tile, cute.make_rmem_tensor(subtile.layout, gemm.acc_dtype)]


def _square(acc: Traced) -> dict[str, Traced]:
    return {"head_scale": acc * acc}


def _square_scaled(acc: Traced, row_scale: Traced) -> dict[str, Traced]:
    scaled = acc * row_scale
    return {"head_scale": scaled * scaled}


def _rotate(first: Traced, second: Traced, table: Traced) -> Traced:
    cos, sin = unpack(table)
    return pack(first * cos - second * sin, first * sin + second * cos)


def _rotate_selected(first: Traced, second: Traced, table: Traced, selector: Traced) -> Traced:
    """Rotate where `selector` is 1 (q and k columns), leave alone where it is 0 (v columns)."""
    cos, sin = unpack(table)
    selected, _ = unpack(selector)
    cos = (cos - 1.0) * selected + 1.0
    sin = sin * selected
    return pack(first * cos - second * sin, first * sin + second * cos)


def _qkv(
    acc: Traced, rotary: Traced, head_scale: Traced, norm: Traced, selector: Traced, row_scale: Traced
) -> dict[str, Traced]:
    scale = ((head_scale - 1.0) * selector + 1.0) * row_scale
    first, second = unpack(acc * scale * norm)
    return {"D": _rotate_selected(first, second, rotary, selector)}


def _qkv_deferred(
    acc: Traced, rotary: Traced, norm: Traced, selector: Traced, row_scale: Traced
) -> dict[str, Traced]:
    scaled = acc * row_scale
    a, b = unpack(scaled)
    first, second = unpack(scaled * norm)
    return {"D": _rotate_selected(first, second, rotary, selector), "head_sums": pack(a * a, b * b)}


def _queries_keys(acc: Traced, rotary: Traced, head_scale: Traced, norm: Traced) -> dict[str, Traced]:
    # No row scale: QK-norm divides it out again. Only QK-norm's eps is then added to unscaled mean squares,
    # which shows where hidden states are tiny: 0.3 % of q and k at a mean square of 4e-4.
    first, second = unpack(acc * head_scale * norm)
    return {"D": _rotate(first, second, rotary)}


def _values(acc: Traced, row_scale: Traced) -> dict[str, Traced]:
    return {"D": acc * row_scale}


def _gate_up(acc: Traced, row_scale: Traced) -> dict[str, Traced]:
    gate, up = unpack(acc * row_scale)
    return {"activation": swiglu(gate, up)}


def _residual(acc: Traced, residual: Traced) -> dict[str, Traced]:
    total = acc + residual
    return {"D": total, "sums": (total, total)}


@dataclass(frozen=True, slots=True)
class LayerEpilogues:
    """The layer's epilogues, compiled on first use for each configuration and kept on disk."""

    qkv: HopperEpilogue
    qkv_deferred: HopperEpilogue
    queries_keys: HopperEpilogue
    values: HopperEpilogue
    gate_up: HopperEpilogue


@functools.cache
def residual_epilogue() -> HopperEpilogue:
    """Add the residual, store sums of squares: the same for every width."""
    sums = ColVecReduce("sums", scaled=True)
    return HopperEpilogue(_residual, ops={"residual": TileLoad("residual")}, reduces={"sums": sums})


@functools.cache
def layer_epilogues(width: int, eps: float) -> LayerEpilogues:
    """The epilogues for rows of `width` columns, normalised with `eps` (so are the heads)."""
    rotary, norm, selector = rotary_cos_sin_load("rotary"), Columns("norm"), Columns("selector")
    head_scale, row_scale = HeadRstd("head_scale", eps), RowScale("row_scale", width, eps)
    rotated = {"rotary": rotary, "norm": norm}
    scaled = {"selector": selector, "row_scale": row_scale}
    deferred = {"head_sums": ColVecReduce("head_sums")}
    pairs: dict[str, Traced] = {"mode": "acc_pair"}
    head_pairs = pairs | {"prepass_outs": ("head_scale",)}
    every = rotated | scaled | {"head_scale": head_scale}
    heads = rotated | {"head_scale": head_scale}
    return LayerEpilogues(
        qkv=HopperEpilogue(_qkv, ops=every, prepass=_square_scaled, **head_pairs),
        qkv_deferred=HopperEpilogue(_qkv_deferred, ops=rotated | scaled, reduces=deferred, **pairs),
        queries_keys=HopperEpilogue(_queries_keys, ops=heads, prepass=_square, **head_pairs),
        values=HopperEpilogue(_values, ops={"row_scale": row_scale}),
        gate_up=HopperEpilogue(_gate_up, outputs=("activation",), ops={"row_scale": row_scale}, **pairs),
    )
