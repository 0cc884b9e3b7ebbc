"""Qwen3 trunks against `transformers.Qwen3Model`, with the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from rose_engine.attention.base import RaggedLayout
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.errors import CheckpointError, EngineConfigError
from rose_engine.layers.decoder import DecoderPlan, unmeasured_plan
from rose_engine.models.qwen3 import qwen3_facts
from rose_engine.models.rotary_config import read_rotary
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch
from tests.models.parity import (
    assert_rows_close,
    device_batch,
    edit_config,
    load_trunk,
    random_ids,
    randomize,
    run_trunk,
    save,
)

VOCABULARY, MAX_LENGTH = 97, 64
RAGGED = [(1,), (MAX_LENGTH,), (1, 5, MAX_LENGTH, 2, 33, 1), (7, 7, 7), (3, 64)]
PATHS = ["plain", "folded"]


def tiny_config(**changes: object) -> Qwen3Config:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    return Qwen3Config(**(settings | changes))


@pytest.fixture(scope="module")
def reference() -> Qwen3Model:
    return randomize(Qwen3Model(tiny_config()))


@pytest.fixture
def folder(reference: Qwen3Model, tmp_path: Path) -> Path:
    return save(reference, tmp_path)


@torch.inference_mode()
def reference_states(model: Qwen3Model, ids) -> list[torch.Tensor]:
    return [model(torch.from_numpy(i).long()[None]).last_hidden_state[0] for i in ids]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_hidden_states(reference: Qwen3Model, folder: Path, lengths: tuple[int, ...], path: str):
    ids = random_ids(lengths, VOCABULARY)
    trunk = load_trunk(folder)
    trunk.decoder.adopt(DecoderPlan(above=path))
    for got, wanted in zip(run_trunk(trunk, ids), reference_states(reference, ids), strict=True):
        assert_rows_close(got, wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
        {"num_hidden_layers": 1, "rms_norm_eps": 1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", PATHS)
def test_other_shapes(tmp_path: Path, changes: dict[str, object], path: str):
    model = randomize(Qwen3Model(tiny_config(**changes)))
    trunk = load_trunk(save(model, tmp_path))
    trunk.decoder.adopt(DecoderPlan(above=path))
    ids = random_ids((1, 9, 40), VOCABULARY)
    for got, wanted in zip(run_trunk(trunk, ids), reference_states(model, ids), strict=True):
        assert_rows_close(got, wanted)


def test_every_token_sees_all_where_the_file_says_so(tmp_path: Path):
    model = randomize(Qwen3Model(tiny_config(is_causal=False)))
    trunk = load_trunk(save(model, tmp_path))
    ids = random_ids((1, 9, MAX_LENGTH), VOCABULARY)
    for got, wanted in zip(run_trunk(trunk, ids), reference_states(model, ids), strict=True):
        assert_rows_close(got, wanted)
    assert [
        spec.window for spec in qwen3_facts(SettingsFile.read(tmp_path / "config.json")).attention_specs
    ] == [(-1, -1)]


def test_a_sequence_does_not_depend_on_its_neighbours(folder: Path):
    trunk = load_trunk(folder)
    ids = random_ids((5, 64, 1, 30), VOCABULARY)
    together = run_trunk(trunk, ids)
    for index, token_ids in enumerate(ids):
        (alone,) = run_trunk(trunk, [token_ids])
        assert_rows_close(together[index], alone, tolerance=5e-6)


@pytest.mark.parametrize("path", PATHS)
def test_spare_tokens_and_empty_slots_change_nothing(folder: Path, path: str):
    """As in a captured graph: more rows than tokens, more slots than sequences, and none of it is seen."""
    trunk = load_trunk(folder)
    trunk.decoder.adopt(DecoderPlan(above=path))
    ids = random_ids((5, 1, 9), VOCABULARY)
    wanted = torch.cat(run_trunk(trunk, ids))
    batch = device_batch(ids)
    spare = torch.zeros(6, dtype=torch.int32)
    cu_lengths = torch.cat((batch.layout.cu_lengths, batch.layout.cu_lengths[-1:].expand(3)))
    layout = RaggedLayout(cu_lengths, MAX_LENGTH, 6, None)
    padded = DeviceBatch(
        torch.cat((batch.token_ids_T, spare)), torch.cat((batch.position_ids_T, spare)), None, layout
    )
    with torch.inference_mode():
        got = trunk(padded, SdpaBackend().bind(layout))
    assert_rows_close(got[: len(wanted)], wanted, tolerance=5e-6)


def test_prefixed_names_and_a_language_model_head(reference: Qwen3Model, tmp_path: Path):
    plain_folder, prefixed_folder = tmp_path / "plain", tmp_path / "prefixed"
    plain_folder.mkdir()
    prefixed_folder.mkdir()
    save(reference, plain_folder)
    save(reference, prefixed_folder, "model.", **{"lm_head.weight": torch.ones(VOCABULARY, 48)})
    ids = random_ids((4, 6), VOCABULARY)
    plain, prefixed = (run_trunk(load_trunk(folder), ids) for folder in (plain_folder, prefixed_folder))
    assert all(torch.equal(a, b) for a, b in zip(plain, prefixed, strict=True))


def test_rope_theta_in_either_place(folder: Path):
    edit_config(folder, rope_parameters=None, rope_theta=123456)
    assert read_rotary(SettingsFile.read(folder / "config.json"), 16).theta == 123456.0
    edit_config(folder, rope_parameters={"rope_theta": 777.0, "rope_type": "default"})
    assert read_rotary(SettingsFile.read(folder / "config.json"), 16).theta == 777.0


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_variants_are_refused_by_name(folder: Path, values: dict[str, object], named: str):
    edit_config(folder, **values)
    with pytest.raises(CheckpointError, match=named):
        qwen3_facts(SettingsFile.read(folder / "config.json"))


@pytest.mark.parametrize("path", PATHS)
def test_a_rotation_stretched_by_yarn(tmp_path: Path, path: str):
    """As the model card has long inputs served; its magnitude is not one."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": MAX_LENGTH // 4,
    }
    model = randomize(Qwen3Model(tiny_config(rope_parameters=yarn)))
    trunk = load_trunk(save(model, tmp_path))
    trunk.decoder.adopt(DecoderPlan(above=path))
    ids = random_ids((1, 9, MAX_LENGTH), VOCABULARY)
    for got, wanted in zip(run_trunk(trunk, ids), reference_states(model, ids), strict=True):
        assert_rows_close(got, wanted)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotations_that_follow_the_sequence_are_refused(folder: Path, key: str):
    edit_config(folder, **{key: {"rope_type": "dynamic", "factor": 4.0}})
    with pytest.raises(CheckpointError, match="dynamic"):
        load_trunk(folder)


def test_bfloat16_paths_agree(folder: Path):
    ids = random_ids((5, 64, 1, 30), VOCABULARY)
    reference_rows = torch.cat(run_trunk(load_trunk(folder), ids))
    trunk = load_trunk(folder, torch.bfloat16)
    for path in PATHS:
        trunk.decoder.adopt(DecoderPlan(above=path))
        rows = torch.cat(run_trunk(trunk, ids))
        assert rows.dtype == torch.bfloat16
        assert torch.cosine_similarity(rows.float(), reference_rows, dim=1).min() > 0.999


def test_a_plan_picks_by_token_count():
    plan = DecoderPlan(up_to=((128, "folded"), (512, "plain")), above="folded")
    assert [plan.path_for(n) for n in (1, 128, 129, 512, 513)] == [
        "folded",
        "folded",
        "plain",
        "plain",
        "folded",
    ]
    assert plan.paths == {"folded", "plain"}


def test_a_plan_needs_ascending_bounds():
    with pytest.raises(AssertionError, match="ascend"):
        DecoderPlan(up_to=((512, "plain"), (128, "folded")))


def test_a_plan_that_cannot_be_had_changes_nothing(folder: Path):
    trunk = load_trunk(folder)
    before = trunk.decoder.plan
    with pytest.raises(EngineConfigError, match=r"'warp'.*plain"):
        trunk.decoder.adopt(DecoderPlan(above="warp"))
    assert trunk.decoder.plan is before
    assert len(run_trunk(trunk, random_ids((3,), VOCABULARY))) == 1


def test_the_fused_path_needs_its_card(folder: Path):
    with pytest.raises(EngineConfigError, match="fused path"):
        load_trunk(folder).decoder.adopt(DecoderPlan(above="fused"))


def test_float16_is_never_folded(folder: Path):
    trunk = load_trunk(folder, torch.float16)
    with pytest.raises(EngineConfigError, match="float16"):
        trunk.decoder.adopt(DecoderPlan(above="folded"))
    assert "folded" not in unmeasured_plan(torch.float16, torch.device("cuda")).paths
