"""The scoring head: pooling, a transform where the family has one, one logit per label.

float32 throughout, whatever the trunk is: what orders documents must not be rounded.

Shapes: T packed tokens, B sequences, D width.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from rose_engine.attention.base import RaggedLayout
from rose_engine.checkpoint import WeightRules, load_weights, read_rows, weightless
from rose_engine.errors import CheckpointError
from rose_engine.heads.pooling import pool
from rose_engine.layers.activation import hidden_activation, identity
from rose_engine.score_spec import ClassifierSpec, ScoreSpec, TokenLogitSpec

_LM_HEAD = ("lm_head.weight",)
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")


class ScoringHead(nn.Module):
    """`output(norm(activation(dense(pooled))))`, as `ClassifierSpec` describes it."""

    def __init__(self, spec: ClassifierSpec, width: int) -> None:
        super().__init__()
        has_dense, has_norm = spec.dense is not None, spec.norm is not None
        self.dense = nn.Linear(width, width, bias=spec.dense_bias) if has_dense else nn.Identity()
        self.norm = nn.LayerNorm(width, spec.norm_eps, bias=spec.norm_bias) if has_norm else nn.Identity()
        self.output = nn.Linear(width, spec.num_labels, bias=spec.output_bias)
        self._activation = hidden_activation(spec.activation) if has_dense else identity
        self._pooling = (spec.pooling,)

    @classmethod
    def load(cls, spec: ScoreSpec, width: int, folder: Path, device: torch.device) -> ScoringHead:
        """The head of `folder` on `device`, over hidden states of `width`.

        Raises `CheckpointError` when the weights are not as `spec` says.
        """
        if isinstance(spec, TokenLogitSpec):
            return cls._of_tokens(spec, width, folder, device)
        with weightless():
            head = cls(spec, width)
        load_weights(head, folder, _head_rules(spec), torch.float32, device)
        return head

    @classmethod
    def _of_tokens(cls, spec: TokenLogitSpec, width: int, folder: Path, device: torch.device) -> ScoringHead:
        """One fused row: that of the true token in the language-model head less that of the false one."""
        row_1D = token_row(spec, folder)
        if row_1D.shape[1] != width:
            raise CheckpointError(
                f"{folder}: token rows of width {row_1D.shape[1]}, hidden states of {width}"
            )
        with weightless():
            head = cls(ClassifierSpec(spec.pooling, spec.num_labels, "score", output_bias=False), width)
        head.output.weight = nn.Parameter(row_1D.to(device), requires_grad=False)
        return head

    def forward(self, hidden_TD: Tensor, layout: RaggedLayout) -> Tensor:
        """Logits, float32 `[B, labels]`."""
        pooled_BD = pool(self._pooling, hidden_TD, layout)
        logits: Tensor = self.output(self.norm(self._activation(self.dense(pooled_BD))))
        return logits


def token_row(spec: TokenLogitSpec, folder: Path) -> Tensor:
    """float32 `[1, D]`: the fused row of a language model's folder. Raises `CheckpointError`."""
    ids = [spec.true_token_id] + ([] if spec.false_token_id is None else [spec.false_token_id])
    sources = {True: _EMBEDDINGS, False: _LM_HEAD, None: (*_LM_HEAD, *_EMBEDDINGS)}[spec.tied]
    rows = read_rows(folder, sources, ids).float()
    return rows[:1] - rows[1:].sum(0, keepdim=True)


def _head_rules(spec: ClassifierSpec) -> WeightRules:
    """Only the head's own tensors: the trunk has answered for all others."""
    renames = (
        (rf"^(?:\w+\.)?{re.escape(stored)}\.", f"{ours}.") for ours, stored in spec.stored_names.items()
    )
    return WeightRules(renames=tuple(renames), ignorable=("*",))
