"""The GEMMs of a decoder layer on the device: `interface.FusedGemms` of one or two launches each.

Importing this module imports the CuTe DSL (`toolchain.gemms_module` does). A configuration is compiled on
first use, one to two seconds, for any number of tokens; the object is kept on disk. `objects_of` notes
launches instead: what was noted can be compiled ahead, without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from quack.gemm_runtime import host
from torch import Tensor

from rose_engine.kernels.cute.config import GemmConfig, JoinedQkv, SplitQkv
from rose_engine.kernels.cute.early import HopperEpilogue, attributes
from rose_engine.kernels.cute.epilogues import LayerEpilogues, layer_epilogues, residual_epilogue
from rose_engine.kernels.cute.interface import QkvWeight


@dataclass(frozen=True, slots=True, eq=False)
class GemmCall:
    """One launch: `out = epilogue(rows @ weight.T, operands)`."""

    epilogue: HopperEpilogue
    config: GemmConfig
    rows_TK: Tensor
    weight_NK: Tensor
    out_TN: Tensor | None
    operands: Mapping[str, Tensor | int]

    def launch(self) -> None:
        """Launch it, compiling what was never compiled."""
        self._hand_over(launch=True)

    def compile(self) -> None:
        """Compile it into the cache on disk, unless it is there; needs no device."""
        # The one thing a plan asks the driver, for launches alone; without a device there is nobody to ask.
        asked, host.get_max_active_clusters = host.get_max_active_clusters, _no_clusters
        try:
            self._hand_over(launch=False)
        finally:
            host.get_max_active_clusters = asked

    @property
    def compiled_for(self) -> tuple[object, ...]:
        """What the compiled object depends on besides the types of its operands, which an epilogue fixes."""
        return self.epilogue, self.config, self._num_sums

    def __str__(self) -> str:
        name = self.epilogue.fn.__name__.removeprefix("_")
        return f"{name} {self.config}" + (f" of {self._num_sums} sums" if self._num_sums else "")

    @property
    def _num_sums(self) -> int | None:
        """Partial sums of squares that the row scale is made of; `None` without one."""
        sums_TP = self.operands.get("row_scale")
        return sums_TP.shape[1] if isinstance(sums_TP, Tensor) else None

    def _hand_over(self, *, launch: bool) -> None:
        config, out_TN = self.config, self.out_TN
        self.epilogue.gemm(
            self.rows_TK[None],
            self.weight_NK.t()[None],
            None if out_TN is None else out_TN[None],
            epi_args=self.operands,
            tile_M=config.tile_m,
            tile_N=config.tile_n,
            tile_K=config.tile_k,
            cluster_M=config.cluster_m,
            cluster_N=config.cluster_n,
            pingpong=config.pingpong,
            persistent=not config.early,  # an early kernel prepares the one tile that its block index names
            b_kn=True,
            post_init_attrs=attributes(config.early),
            _launch=launch,
        )


def _no_clusters(*_: object) -> int:
    return 0


class HopperGemms:
    """`FusedGemms` that makes each launch and hands it to `take`, as a rule to be launched."""

    def __init__(self, take: Callable[[GemmCall], None] = GemmCall.launch) -> None:
        self._take = take

    def project_qkv(
        self,
        config: JoinedQkv | SplitQkv,
        residual_TD: Tensor,
        sums_TP: Tensor,
        weight: QkvWeight,
        rotary_TH: Tensor,
        eps: float,
        out_TQ: Tensor,
        head_sums_TS: Tensor | None = None,
    ) -> None:
        """See `FusedGemms.project_qkv`."""
        epilogues = layer_epilogues(residual_TD.shape[1], eps)
        if isinstance(config, SplitQkv):
            for call in _split_calls(config, epilogues, residual_TD, sums_TP, weight, rotary_TH, out_TQ):
                self._take(call)
            return
        operands: dict[str, Tensor | int] = {
            "rotary": rotary_TH,
            "norm": weight.norm_1Q,
            "selector": weight.selector_1Q,
            "row_scale": sums_TP,
        }
        if config.deferred_norm:
            assert head_sums_TS is not None, "a deferred norm needs room for the heads' sums"
            epilogue, operands["head_sums"] = epilogues.qkv_deferred, head_sums_TS[None]
        else:
            epilogue, operands["head_scale"] = epilogues.qkv, weight.head_dim
        self._take(GemmCall(epilogue, config.gemm, residual_TD, weight.weight_QD, out_TQ, operands))

    def project_gate_up(
        self,
        config: GemmConfig,
        residual_TD: Tensor,
        sums_TP: Tensor,
        weight_GD: Tensor,
        eps: float,
        out_TI: Tensor,
    ) -> None:
        """See `FusedGemms.project_gate_up`."""
        epilogue = layer_epilogues(residual_TD.shape[1], eps).gate_up
        operands = {"activation": out_TI[None], "row_scale": sums_TP}
        self._take(GemmCall(epilogue, config, residual_TD, weight_GD, None, operands))

    def add_projection(
        self, config: GemmConfig, rows_TK: Tensor, weight_DK: Tensor, residual_TD: Tensor, sums_TP: Tensor
    ) -> None:
        """See `FusedGemms.add_projection`."""
        operands = {"residual": residual_TD[None], "sums": sums_TP[None]}
        self._take(GemmCall(residual_epilogue(), config, rows_TK, weight_DK, residual_TD, operands))


def objects_of(run: Callable[[HopperGemms], None]) -> tuple[GemmCall, ...]:
    """One launch for each object that is compiled for what `run` launches; nothing is launched here."""
    calls: list[GemmCall] = []
    run(HopperGemms(calls.append))
    return tuple({call.compiled_for: call for call in calls}.values())


def _split_calls(
    config: SplitQkv,
    epilogues: LayerEpilogues,
    residual_TD: Tensor,
    sums_TP: Tensor,
    weight: QkvWeight,
    rotary_TH: Tensor,
    out_TQ: Tensor,
) -> Iterator[GemmCall]:
    split = weight.rotated_columns
    rotated: dict[str, Tensor | int] = {
        "rotary": rotary_TH,
        "head_scale": weight.head_dim,
        "norm": weight.norm_1Q[:, :split],
    }
    heads_QD, values_VD = weight.weight_QD[:split], weight.weight_QD[split:]
    yield GemmCall(
        epilogues.queries_keys, config.queries_keys, residual_TD, heads_QD, out_TQ[:, :split], rotated
    )
    scaled = {"row_scale": sums_TP}
    yield GemmCall(epilogues.values, config.values, residual_TD, values_VD, out_TQ[:, split:], scaled)
