"""Hopper GEMMs that overlap their start with the end of the kernel in front (`Early` says how).

Extends the toolchain's GEMM class through its own methods; nothing of the package is changed. Attributes
set on the GEMM object before it is traced switch each part on; off, the kernel is the toolchain's own.

A kernel that releases its successor at once may find two successors resident. So nothing here reads what an
earlier kernel wrote before `griddepcontrol.wait`, and every block waits; weights may be read before.
"""

# mypy: disable-error-code="misc, untyped-decorator"
# (The DSL's classes and decorators have no types.)

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.experimental import primitives
from cutlass.pipeline import PipelineUserType
from quack.epilogue.frontend import EpiMod
from quack.gemm_sm90 import GemmSm90
from quack.pipeline import make_pipeline_state

from rose_engine.kernels.cute.config import Early

Traced = Any  # what the DSL hands around while it traces a kernel; it has no types of its own


def attributes(early: Early) -> tuple[tuple[str, bool], ...]:
    """`early` as attributes of the GEMM object; none at all for `NONE`."""
    names = {Early.RELEASE: "release_early", Early.WEIGHTS: "weights_early", Early.EPILOGUE: "epilogue_early"}
    return tuple((name, True) for flag, name in names.items() if flag in early)


def _wait_for_previous_kernels() -> None:
    primitives.griddepcontrol(primitives.GridDepAction.WAIT)


def _release_next_kernel() -> None:
    primitives.griddepcontrol(primitives.GridDepAction.LAUNCH_DEPENDENTS)


class _DenseRows:
    """Stands for the toolchain's varlen manager where rows are one dense matrix."""

    varlen_m = False

    def offset_batch_epi(self, tensor_MNL: Traced, batch: Traced) -> Traced:
        return tensor_MNL[None, None, batch]


class EarlyStart(GemmSm90):
    """Mixin in front of a minted Hopper GEMM class; cooperative tiles, one tile a block."""

    release_early = False
    weights_early = False
    epilogue_early = False

    def make_ab_pipeline(self, *args: Traced, **kwargs: Traced) -> Traced:
        """First thing every thread of the kernel runs."""
        if self.release_early:
            _release_next_kernel()
        if self.weights_early:
            self.use_pdl = False  # from here on read inside the kernel only: no wait before the weights
        return super().make_ab_pipeline(*args, **kwargs)

    def load_tma(self, *args: Traced, **kwargs: Traced) -> Traced:
        """K tiles to shared memory, run by the loading warp."""
        load = self._load_weights_first if self.weights_early else super().load_tma
        return load(*args, **kwargs)

    @cute.jit
    def _load_weights_first(
        self, pipeline: Traced, state: Traced, copies: Traced, k_tiles: Traced, k_tile_start: Traced = 0
    ) -> Traced:
        copy_a, copy_b, _ = copies
        early = min(k_tiles, self.ab_stage)
        weights = state.clone()
        for k_tile in cutlass.range(early, unroll=1):
            pipeline.producer_acquire(weights)
            copy_b(k_tile_start + k_tile, weights.index, tma_bar_ptr=pipeline.producer_get_barrier(weights))
            weights.advance()
        _wait_for_previous_kernels()
        for k_tile in cutlass.range(early, unroll=1):
            copy_a(k_tile_start + k_tile, state.index, tma_bar_ptr=pipeline.producer_get_barrier(state))
            state.advance()
        for k_tile in cutlass.range(early, k_tiles, unroll=1):
            pipeline.producer_acquire(state)
            barrier = pipeline.producer_get_barrier(state)
            copy_a(k_tile_start + k_tile, state.index, tma_bar_ptr=barrier)
            copy_b(k_tile_start + k_tile, state.index, tma_bar_ptr=barrier)
            state.advance()
        return state

    # What the early epilogue needs, noted where the kernel makes it and used before its main loop.

    def epi_get_smem_tensors(self, params: Traced, storage: Traced) -> Traced:
        """The epilogue's shared memory by operand."""
        self._params, self._smem = params, super().epi_get_smem_tensors(params, storage)
        return self._smem

    def make_epi_pipeline(self, *args: Traced, **kwargs: Traced) -> Traced:
        """The pipeline that carries the epilogue's tiles to shared memory."""
        self._epi_pipeline = super().make_epi_pipeline(*args, **kwargs)
        return self._epi_pipeline

    def get_scheduler_class(self, *args: Traced, **kwargs: Traced) -> Traced:
        """The scheduler, made to note a block's first (with one tile a block: only) tile."""
        scheduler = super().get_scheduler_class(*args, **kwargs)
        return _noting_first_tile(self, scheduler) if self.epilogue_early else scheduler

    def mma(self, *args: Traced, **kwargs: Traced) -> Traced:
        """The main loop, run by the multiplying warps."""
        if self.epilogue_early:
            self._prefetch(constant=True)
            _wait_for_previous_kernels()
            self._prefetch(constant=False)
            self._load_tiles()
        return super().mma(*args, **kwargs)

    def _prefetch(self, constant: bool) -> None:
        """Vectors to shared memory: weights (`constant`), or what earlier kernels wrote."""
        tidx, _, _ = cute.arch.thread_idx()
        for op in self._epi_ops:
            if getattr(op, "constant", None) is constant:
                op.prefetch(self, getattr(self._params, op.name), self._smem[op.name], self._first_tile, tidx)

    def _load_tiles(self) -> None:
        """Queue the loads of every tile operand: the residual, the rotary table."""
        if self.epi_c_stage > 0:
            operands = (self._params, self._smem, self._first_tile, _DenseRows(), self._epi_pipeline)
            self._issue_tile_loads(self.epi_tile_load_g2s_copy_fns(*operands))

    @cute.jit
    def _issue_tile_loads(self, copies: Traced) -> None:
        subtiles = cute.zipped_divide(cute.make_layout(self.cta_tile_shape_mnk[:2]), self.epi_tile).shape[1]
        order = cute.make_ordered_layout(subtiles, order=(0, 1) if const_expr(self.epi_m_major) else (1, 0))
        assert cute.size(subtiles) <= self.epi_c_stage, "an early epilogue needs a stage for every subtile"
        state = make_pipeline_state(PipelineUserType.Producer, self.epi_c_stage)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            for subtile in cutlass.range_constexpr(cute.size(subtiles)):
                self._epi_pipeline.producer_acquire(state)
                for copy in copies:
                    copy(src_idx=order.get_hier_coord(subtile), producer_state=state)
                self._epi_pipeline.producer_commit(state)
                state.advance()

    def epilogue(self, *args: Traced, **kwargs: Traced) -> Traced:
        """The epilogue; its tile operands are on their way already when it starts early."""
        if self.epilogue_early:
            kwargs["copy_C"] = None
        return super().epilogue(*args, **kwargs)


def _noting_first_tile(gemm: Traced, scheduler: Traced) -> Traced:
    class NotingFirstTile(scheduler):
        def initial_work_tile_info(self, **kwargs: Traced) -> Traced:
            work = super().initial_work_tile_info(**kwargs)
            gemm._first_tile = work.tile_idx
            return work

    return NotingFirstTile


@functools.cache
def _with_early_start(gemm_class: Traced) -> Traced:
    fields = {"EpilogueParams": gemm_class.EpilogueParams, "__module__": gemm_class.__module__}
    return type(gemm_class.__name__, (EarlyStart, gemm_class), fields)


class HopperEpilogue(EpiMod):
    """An epilogue whose GEMM classes can start early."""

    def _mint(self, *mint_key: Traced) -> Traced:
        return _with_early_start(super()._mint(*mint_key))
