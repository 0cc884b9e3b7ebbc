"""What ragged attention is asked for and how a backend answers; no backend lives here.

Shapes: T packed tokens, B sequences, N query heads, M key / value heads (N is a multiple of M), H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

NO_BIAS = "it adds no bias to the scores"  # a refusal that most backends share


class ScoreBias(Protocol):
    """What is added to the scaled scores of one attention call, before the softmax."""

    def between(self, start: int, count: int, length: int) -> Tensor:
        """The bias of `count` sequences of `length` tokens, the first at packed token `start`.

        `[count or 1, N, length, length]`, queries before keys, in the dtype of the queries. It is also asked
        for a run of tokens of several sequences; what it says across their bounds is masked.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention as a value. A model holds specs, never a backend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: tuple[int, int] = (-1, -1)  # (left, right): (-1, 0) causal, (-1, -1) full, (64, 64) local
    biased: bool = False  # each call brings a bias; few backends can add one
    bias: ScoreBias | None = field(default=None, compare=False, repr=False)  # of one call: see `with_bias`

    @property
    def causal(self) -> bool:
        """Whether a token sees itself and what comes before, without a bound to the left."""
        return self.window == (-1, 0)

    @property
    def full(self) -> bool:
        """Whether every token of a sequence sees every other."""
        return self.window == (-1, -1)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedLayout:
    """Where B sequences lie in T packed tokens, on the device.

    `cu_lengths` is int32 `[B + 1]`, on the device. Inside a captured graph its contents change from
    replay to replay while `max_length`, an upper bound of every length, `num_sequences` and the token
    count stay; spare sequences have length zero and spare tokens lie behind the last sequence.
    `lengths` is what the host knows: exact when eager, `None` inside a graph. `spans_R2`, int32, says which
    tokens are pooled to a row each, by start and end, in order and apart; `None`: those of each sequence.
    """

    cu_lengths: Tensor
    max_length: int
    num_sequences: int
    lengths: tuple[int, ...] | None
    spans_R2: Tensor | None = None


# (q_TNH, k_TMH, v_TMH, spec) -> out_TNH, over the layout it was bound to. Rows of spare tokens are undefined.
Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]


def with_bias(attend: Attend, bias: ScoreBias) -> Attend:
    """`attend` with `bias` added to its scores, for specs that are `biased`."""

    def attend_biased(q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec) -> Tensor:
        assert spec.biased, "a spec that does not say it is biased may be with a backend that adds no bias"
        return attend(q_TNH, k_TMH, v_TMH, replace(spec, bias=bias))

    return attend_biased


class AttentionBackend(Protocol):
    """A library or kernel that can do ragged attention."""

    name: str

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this backend cannot serve `spec`, in a few words; `None` when it can."""
        ...

    def bind(self, layout: RaggedLayout) -> Attend:
        """The attention function for one layout."""
        ...
