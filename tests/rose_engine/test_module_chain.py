"""sentence-transformers folders: both layouts read, and what cannot be honoured refused by name."""

from __future__ import annotations

import json

import pytest

from rose_engine.errors import CheckpointError
from rose_engine.module_chain import DenseSpec, ModuleChain, max_length
from rose_engine.settings_file import SettingsFile

OLD, NEW = "sentence_transformers.models", "sentence_transformers.sentence_transformer.modules.pooling"


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "config.json", {"architectures": ["BertModel"]})
    return tmp_path


def chain_of(folder):
    return ModuleChain.read(folder, SettingsFile.read(folder / "config.json"))


def write_modules(folder, *types, **configs):
    """modules.json of `types` behind a Transformer; `configs` by lower-case class."""
    entries = [{"idx": 0, "path": "", "type": f"{OLD}.Transformer"}]
    for idx, dotted in enumerate(types, 1):
        name = dotted.rpartition(".")[2]
        entries.append({"idx": idx, "path": f"{idx}_{name}", "type": dotted})
        if name.lower() in configs:
            write(folder / f"{idx}_{name}" / "config.json", configs[name.lower()])
    write(folder / "modules.json", entries[::-1])  # idx decides, not the order in the file


MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (MEAN, ("mean",)),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"word_embedding_dimension": 8}, ("mean",)),
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "cls"], **MEAN}, ("mean", "cls")),
        ({"pooling_mode": "weightedmean", **MEAN}, ("weightedmean",)),
        ({"include_prompt": False, **MEAN}, ("mean",)),
    ],
)
def test_pooling_in_both_layouts(folder, pooling, expected):
    write_modules(folder, f"{NEW}.Pooling", pooling=pooling)
    assert chain_of(folder) == ModuleChain(expected)


def test_a_contextual_model_without_modules_quantises(folder):
    code = {"AutoModel": "modeling.PPLXQwen3ContextualModel"}
    write(folder / "config.json", {"architectures": ["PPLXQwen3ContextualModel"], "auto_map": code})
    assert chain_of(folder) == ModuleChain(("mean",), quantize=True)


def test_dense_and_normalize(folder):
    dense = {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity"}
    write_modules(folder, f"{OLD}.Pooling", f"{OLD}.Dense", f"{OLD}.Normalize", pooling=MEAN, dense=dense)
    spec = DenseSpec(folder / "2_Dense", 8, 4, True, "torch.nn.modules.linear.Identity", False)
    chain = chain_of(folder)
    assert chain == ModuleChain(("mean",), (spec,), normalize=True)
    assert chain.dimensions(8) == 4
    with pytest.raises(CheckpointError, match="in_features is 8, its input 16"):
        chain.dimensions(16)


def test_a_dense_module_without_activation_is_tanh(folder):
    write_modules(
        folder, f"{OLD}.Pooling", f"{OLD}.Dense", pooling=MEAN, dense={"in_features": 8, "out_features": 4}
    )
    assert chain_of(folder).dense[0].activation.endswith(".Tanh")


def test_facts_tell_chains_apart(folder):
    spec = DenseSpec(folder, 8, 4, True, "torch.nn.Tanh", False)
    chains = [
        ModuleChain(("mean",)),
        ModuleChain(("cls",)),
        ModuleChain(("mean",), (spec,)),
        ModuleChain(("mean",), (), True),
    ]
    assert len({chain.facts() for chain in chains}) == len(chains)


@pytest.mark.parametrize(
    ("types", "configs", "message"),
    [
        ([f"{OLD}.Pooling", "st_odd.Surprise"], {"pooling": MEAN}, "names Surprise, which is not supported"),
        ([], {}, "chains Transformer, which is not supported"),
        ([f"{OLD}.Normalize", f"{OLD}.Pooling"], {"pooling": MEAN}, "Transformer -> Normalize -> Pooling"),
        ([f"{OLD}.Pooling"], {}, "1_Pooling/config.json: No such file"),
        ([f"{OLD}.Pooling"], {"pooling": {"pooling_mode": "sum"}}, "pooling_mode 'sum' is not supported"),
        (
            [f"{OLD}.Pooling"],
            {"pooling": {"pooling_mode_cls_token": 1}},
            "pooling_mode_cls_token is 1, expected bool",
        ),
        (
            [f"{OLD}.Pooling", f"{OLD}.Dense"],
            {"pooling": MEAN, "dense": {"in_features": 8}},
            "out_features is missing",
        ),
        (
            [f"{OLD}.Pooling", f"{OLD}.Dense"],
            {"pooling": MEAN, "dense": {"module_input_name": "token_embeddings"}},
            "module_input_name 'token_embeddings' is not supported",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(folder, types, configs, message):
    write_modules(folder, *types, **configs)
    with pytest.raises(CheckpointError, match=message):
        chain_of(folder)


@pytest.mark.parametrize("content", [{}, [{"idx": 0}], [3]])
def test_a_malformed_modules_file_is_named(folder, content):
    write(folder / "modules.json", content)
    with pytest.raises(CheckpointError, match=r"modules\.json: "):
        chain_of(folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["BertModel"]}, ("mean",)),
        ({}, ("mean",)),
        ({"architectures": ["Qwen3ForCausalLM"]}, ("lasttoken",)),
        ({"architectures": ["Qwen3ForCausalLM"], "is_causal": False}, ("mean",)),
    ],
)
def test_without_modules_the_architecture_decides(folder, config, expected):
    write(folder / "config.json", config)
    assert chain_of(folder) == ModuleChain(expected)


def test_a_classifier_is_no_embedding_model(folder):
    write(folder / "config.json", {"architectures": ["BertForSequenceClassification"]})
    with pytest.raises(CheckpointError, match="BertForSequenceClassification is a classifier"):
        chain_of(folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": 256}}, 256),
        ({"sentence_xlm-roberta_config.json": {"max_seq_length": 128}}, 128),
        ({"sentence_bert_config.json": {"max_seq_length": 8192}}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": None}}, 512),
        ({"sentence_bert_config.json": {"transformer_task": "feature-extraction"}}, 512),
        ({"tokenizer_config.json": {"model_max_length": 100}}, 100),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 512),
    ],
)
def test_max_length_is_the_least_limit_stated(folder, files, expected):
    for name, content in files.items():
        write(folder / name, content)
    assert max_length(folder, num_positions=512) == expected
