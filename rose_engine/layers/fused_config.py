"""How a fused decoder layer runs for a class of token counts, and the classes measured on an H200.

Knows no weights and no toolchain.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rose_engine.kernels.cute.config import Early, GemmConfig, JoinedQkv, SplitQkv
from rose_engine.kernels.ragged_attention import AttentionTile


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """How one layer runs for a class of token counts.

    `attention` None: the engine's backend. `output` or `down` None: cuBLAS and a kernel for the row sums.
    """

    qkv: JoinedQkv | SplitQkv
    attention: AttentionTile | None
    output: GemmConfig | None
    gate_up: GemmConfig
    down: GemmConfig | None

    def __post_init__(self) -> None:
        if self.qkv.deferred_norm and self.attention is None:
            raise ValueError("qkv: a deferred norm needs an attention tile, which finishes it")

    def launches(self, part: str) -> bool:
        """Whether the part of this name (see `fused.PARTS`) is a fused GEMM here, and not cuBLAS's."""
        return part not in ("output", "down") or getattr(self, part) is not None

    @property
    def dependent_launches(self) -> bool:
        """Whether every kernel of the layer takes part in programmatic dependent launch."""
        return None not in (self.attention, self.output, self.down)

    def starting(self, early: Early) -> LayerConfig:
        """The same tiles with every GEMM that can starting `early`."""
        return LayerConfig(
            qkv=self.qkv.starting(early),
            attention=self.attention,
            output=self.output and self.output.starting(early),
            gate_up=self.gate_up.starting(early),
            down=self.down and self.down.starting(early),
        )


# Layer configurations by the most tokens they are for, ascending; the last serves all that is left.
ConfigTable = tuple[tuple[int, LayerConfig], ...]

_NARROW = GemmConfig(64, 32, tile_k=128)
_SQUARE = GemmConfig(64, 64)

# Found inside the whole Qwen3-0.6B shape on one H200 (benchmarks/fused.py): what runs beside a GEMM matters,
# so the fastest alone are not the fastest together.
_HUNDRED = LayerConfig(
    qkv=JoinedQkv(_SQUARE, deferred_norm=True),
    attention=AttentionTile(rows=64, keys=128, stages=2),
    output=_NARROW,
    gate_up=GemmConfig(64, 96, cluster_m=2),
    down=_NARROW,
)
_HUNDREDS = LayerConfig(
    qkv=JoinedQkv(GemmConfig(128, 128)),
    attention=AttentionTile(rows=64, keys=64, stages=3, early=True),
    output=_SQUARE,
    gate_up=GemmConfig(128, 192, cluster_m=2),
    down=_SQUARE,
)
_THOUSANDS = LayerConfig(
    qkv=SplitQkv(
        queries_keys=GemmConfig(192, 128, cluster_n=2, pingpong=True),
        values=GemmConfig(128, 128, cluster_n=2, pingpong=True),
    ),
    attention=None,
    output=None,
    gate_up=GemmConfig(128, 192, cluster_n=2, pingpong=True),
    down=None,
)
_ANY = 1 << 31

H200_CONFIGS: ConfigTable = ((128, _HUNDRED), (1024, _HUNDREDS), (_ANY, _THOUSANDS))

_EARLY_QKV = _HUNDRED.qkv.starting(Early.RELEASE | Early.EPILOGUE)  # its weights in front lost 1 %
H200_EARLY_CONFIGS: ConfigTable = (
    (128, dataclasses.replace(_HUNDRED.starting(Early.ALL), qkv=_EARLY_QKV)),
    (1024, _HUNDREDS.starting(Early.ALL)),
    (_ANY, _THOUSANDS),
)
