"""Pooling, Dense and normalisation on packed tokens, against sentence-transformers on padded ones."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers.sentence_transformer.modules import Dense as ReferenceDense
from sentence_transformers.sentence_transformer.modules import Pooling as ReferencePooling

from rose_engine.errors import CheckpointError
from rose_engine.heads.embedding import EmbeddingHead
from rose_engine.heads.pooling import pool
from rose_engine.module_chain import POOLING_MODES, DenseSpec, ModuleChain
from tests.rose_engine.samples import ragged, spans

WIDTH = 8
LENGTHS = [5, 1, 12, 3, 1]


def hidden_states(num_tokens, seed=0):
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def reference_pool(modes, hidden_TD, lengths):
    sequences = [hidden_TD[span] for span in spans(lengths)]
    features = {
        "token_embeddings": torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=99.0),
        "attention_mask": torch.tensor([[int(i < n) for i in range(max(lengths))] for n in lengths]),
    }
    return ReferencePooling(WIDTH, pooling_mode=list(modes))(features)["sentence_embedding"]


MODES = [*((mode,) for mode in POOLING_MODES), ("mean", "cls"), ("cls", "max", "mean")]


@pytest.mark.parametrize("modes", MODES, ids="+".join)
def test_pooling_equals_sentence_transformers(modes):
    hidden_TD = hidden_states(sum(LENGTHS))
    pooled = pool(modes, hidden_TD, ragged(LENGTHS))
    assert (pooled.shape, pooled.dtype) == ((len(LENGTHS), WIDTH * len(modes)), torch.float32)
    torch.testing.assert_close(pooled, reference_pool(modes, hidden_TD, LENGTHS), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_empty_sequences_and_spare_tokens_touch_no_one(mode):
    hidden_TD = hidden_states(sum(LENGTHS))
    expected = pool((mode,), hidden_TD, ragged(LENGTHS))
    spare_TD = torch.full((7, WIDTH), float("nan"))
    with_empty = ragged([0, 5, 1, 0, 12, 3, 1, 0, 0], in_graph=True)
    pooled = pool((mode,), torch.cat([hidden_TD, spare_TD]), with_empty)
    assert torch.equal(pooled[[1, 2, 4, 5, 6]], expected)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_empty_sequences_need_no_spare_tokens(mode):
    hidden_TD = hidden_states(4)
    assert torch.equal(
        pool((mode,), hidden_TD, ragged([0, 4, 0]))[1:2], pool((mode,), hidden_TD, ragged([4]))
    )


def test_sums_are_float32():
    """A thousand halves of 1 and one of 2048: bfloat16 would stop counting."""
    hidden_TD = torch.ones(1025, WIDTH, dtype=torch.bfloat16)
    hidden_TD[0] = 2048
    pooled = pool(("mean",), hidden_TD, ragged([1025]))
    torch.testing.assert_close(pooled, torch.full((1, WIDTH), (2048 + 1024) / 1025))


def saved_dense(folder, activation, residual=False, out_features=4):
    reference = ReferenceDense(WIDTH, out_features, activation_function=activation)
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    if residual and out_features != WIDTH:
        tensors["residual.weight"] = torch.randn(out_features, WIDTH)
    save_file(tensors, folder / "model.safetensors")
    kind = type(activation)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return reference, tensors, DenseSpec(folder, WIDTH, out_features, True, name, residual)


def head_rows(dense, normalize=False):
    head = EmbeddingHead.load(ModuleChain(("mean",), (dense,), normalize), torch.device("cpu"))
    hidden_TD = hidden_states(sum(LENGTHS))
    with torch.no_grad():
        return pool(("mean",), hidden_TD, ragged(LENGTHS)), head(hidden_TD, ragged(LENGTHS))


ACTIVATIONS = [
    torch.nn.Tanh(),
    torch.nn.Identity(),
    torch.nn.ReLU(),
    torch.nn.GELU(),
    torch.nn.SiLU(),
    torch.nn.Sigmoid(),
    torch.nn.ELU(),
    torch.nn.LeakyReLU(),
    torch.nn.Softplus(),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: type(a).__name__)
def test_dense_equals_sentence_transformers(tmp_path, activation):
    reference, _, spec = saved_dense(tmp_path, activation)
    pooled, rows = head_rows(spec)
    expected = reference({"sentence_embedding": pooled})["sentence_embedding"]
    torch.testing.assert_close(rows, expected.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("out_features", [WIDTH, 4], ids=["same-width", "projected"])
def test_dense_with_residual_adds_its_input(tmp_path, out_features):
    reference, tensors, spec = saved_dense(tmp_path, torch.nn.Tanh(), True, out_features)
    pooled, rows = head_rows(spec)
    residual = pooled @ tensors["residual.weight"].T if out_features != WIDTH else pooled
    torch.testing.assert_close(rows, torch.tanh(reference.linear(pooled)).detach() + residual)


def test_normalised_rows_have_unit_length(tmp_path):
    _, _, spec = saved_dense(tmp_path, torch.nn.Identity())
    plain, unit = head_rows(spec)[1], head_rows(spec, normalize=True)[1]
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(len(LENGTHS)))
    torch.testing.assert_close(unit * plain.norm(dim=1, keepdim=True), plain)


def test_an_activation_from_elsewhere_is_refused(tmp_path):
    spec = DenseSpec(tmp_path, WIDTH, 4, True, "odd_package.Tanh", False)
    with pytest.raises(CheckpointError, match=r"activation 'odd_package\.Tanh' is not supported"):
        EmbeddingHead(ModuleChain(("mean",), (spec,)))


def test_dense_weights_must_be_as_described(tmp_path):
    _, _, spec = saved_dense(tmp_path, torch.nn.Tanh())
    wider = DenseSpec(tmp_path, WIDTH, 5, True, spec.activation, False)
    with pytest.raises(CheckpointError, match=r"linear\.weight: shape \(4, 8\) in the files, \(5, 8\)"):
        EmbeddingHead.load(ModuleChain(("mean",), (wider,)), torch.device("cpu"))
