"""What a model folder says: every rule from small folders, and one real one."""

import json

import pytest

from ivy_gateway.errors import InvalidValue, StartupError
from ivy_gateway.model_profile import AllowedDimensions, ModelProfile, uses_segments

BERT = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}
XLMR_RERANKER = {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "model_type": "xlm-roberta",
    "max_position_embeddings": 514,
    "pad_token_id": 1,
    "id2label": {"0": "LABEL_0"},
}


@pytest.fixture
def folder(tmp_path):
    """Writes a model folder: `folder(config, **{"file.json": content})`."""

    def write(config, files=None):
        contents = {"tokenizer.json": {}, "config.json": config} | (files or {})
        for name, content in contents.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content))
        return tmp_path

    return write


def modules(*types, pooling=None):
    listed = [
        {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{t.rpartition('.')[2]}", "type": t}
        for i, t in enumerate(types)
    ]
    return {"modules.json": listed[::-1]} | ({"1_Pooling/config.json": pooling} if pooling else {})


def test_minilm(minilm):
    profile = ModelProfile.read(minilm)
    assert (profile.task, profile.model_type, profile.max_length) == ("embed", "bert", 256)
    assert (profile.pooling, profile.normalize, profile.do_lower_case) == ("mean", True, False)
    assert profile.prompts == {"query": "", "document": ""}
    assert profile.default_prompt_name is None
    assert profile.similarity_fn_name == "cosine"
    assert profile.tokenizer_file.is_file()
    assert uses_segments(minilm)


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (BERT, {}, 512),
        (BERT, {"sentence_bert_config.json": {"max_seq_length": 256}}, 256),
        (BERT, {"sentence_bert_config.json": {"max_seq_length": 1024}}, 512),
        (BERT, {"tokenizer_config.json": {"model_max_length": 128}}, 128),
        (BERT, {"tokenizer_config.json": {"model_max_length": 1e30}}, 512),
        (BERT, {"sentence_bert_config.json": {"max_seq_length": None}}, 512),
        (XLMR_RERANKER, {}, 512),
        (XLMR_RERANKER, {"sentence_xlm-roberta_config.json": {"max_seq_length": 100}}, 100),
        ({"model_type": "qwen3", "max_position_embeddings": 32768}, {}, 32768),
    ],
)
def test_the_least_limit_counts(folder, config, files, expected):
    assert ModelProfile.read(folder(config, files)).max_length == expected


def test_an_override_only_lowers_the_limit(folder):
    path = folder(BERT)
    assert ModelProfile.read(path, max_length=100).max_length == 100
    with pytest.raises(StartupError, match="--max-length 513 is above the model's own limit of 512"):
        ModelProfile.read(path, max_length=513)


def test_a_model_without_any_limit_needs_one_given(folder):
    path = folder({"model_type": "t5"})
    with pytest.raises(StartupError, match="--max-length"):
        ModelProfile.read(path)
    assert ModelProfile.read(path, max_length=64).max_length == 64


def test_prompts_come_from_the_file_and_the_operator_wins(folder):
    files = {
        "config_sentence_transformers.json": {
            "prompts": {"query": "q: ", "passage": "p: "},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        }
    }
    path = folder(BERT, files)
    profile = ModelProfile.read(path)
    assert profile.prompts == {"query": "q: ", "document": "", "passage": "p: "}
    assert (profile.default_prompt_name, profile.similarity_fn_name) == ("query", "dot")
    own = ModelProfile.read(path, prompts={"query": "Q ", "new": "N "}, default_prompt_name="new")
    assert own.prompts == {"query": "Q ", "document": "", "passage": "p: ", "new": "N "}
    assert own.default_prompt_name == "new"
    with pytest.raises(StartupError, match="'nope' is not among the model's prompts: 'query', 'document'"):
        ModelProfile.read(path, default_prompt_name="nope")


def test_prompts_may_be_left_out_of_pooling(folder):
    assert ModelProfile.read(folder(BERT)).include_prompt
    files = modules("m.Transformer", "m.Pooling", pooling={"include_prompt": False, "pooling_mode": "mean"})
    profile = ModelProfile.read(folder(BERT, files), prompts={"query": "q: "})
    assert (profile.pooling, profile.include_prompt) == ("mean", False)


@pytest.mark.parametrize(
    ("tokens", "separator"),
    [
        ({"pad_token": "<|endoftext|>"}, "<|endoftext|>"),
        ({"sep_token": {"content": "<|sep|>", "special": True}, "pad_token": "<|pad|>"}, "<|sep|>"),
    ],
)
def test_a_contextual_model_is_told_by_its_code_and_names_its_separator(folder, tokens, separator):
    code = {"AutoModel": "modeling.PPLXQwen3ContextualModel"}
    path = folder({**BERT, "auto_map": code}, {"tokenizer_config.json": tokens})
    assert ModelProfile.read(path).separator == separator
    (path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(StartupError, match="sep_token"):
        ModelProfile.read(path)
    plain = folder({**BERT, "auto_map": {"AutoModel": "m.PPLXQwen3Model"}}, {"tokenizer_config.json": tokens})
    assert ModelProfile.read(plain).separator is None


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, "cls+lasttoken"),
        ({"word_embedding_dimension": 4}, "mean"),
        ({"pooling_mode": ["max", "cls"], "pooling_mode_mean_tokens": True}, "max+cls"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
    ],
)
def test_both_pooling_layouts(folder, pooling, expected):
    types = ("sentence_transformers.base.modules.transformer.Transformer", "x.modules.pooling.Pooling")
    profile = ModelProfile.read(folder(BERT, modules(*types, pooling=pooling)))
    assert (profile.pooling, profile.normalize) == (expected, False)


def test_a_bare_checkpoint_pools_by_its_kind(folder):
    assert ModelProfile.read(folder(BERT)).pooling == "mean"
    causal = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 64}
    assert ModelProfile.read(folder(causal)).pooling == "lasttoken"
    assert ModelProfile.read(folder(causal | {"is_causal": False})).pooling == "mean"


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, {}, "tanh"),
        ({"id2label": {"0": "a", "1": "b"}}, {}, "softmax"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            {"config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            "sigmoid",
        ),
    ],
)
def test_score_activation(folder, config, files, expected):
    profile = ModelProfile.read(folder(XLMR_RERANKER | config, files))
    assert (profile.task, profile.score_activation) == ("score", expected)


def test_activations_are_never_imported_from_a_checkpoint(folder):
    path = folder(XLMR_RERANKER | {"sbert_ce_default_activation_function": "evil.module.Sigmoid"})
    with pytest.raises(StartupError, match=r"evil\.module\.Sigmoid"):
        ModelProfile.read(path)


QWEN3_LM = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 64}
QWEN3_CLASSIFIER = QWEN3_LM | {"architectures": ["Qwen3ForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (QWEN3_LM, {}, ("embed", True, ())),
        (QWEN3_LM | {"classifier_from_token": ["no", "yes"]}, {}, ("score", True, ("LABEL_0",))),
        (
            QWEN3_LM | {"id2label": {"0": "a", "1": "b"}},
            modules("sentence_transformers.base.models.Transformer", "x.LogitScore"),
            ("score", True, ("LABEL_0",)),
        ),
        (QWEN3_CLASSIFIER | {"id2label": {"0": "relevance"}}, {}, ("score", True, ("relevance",))),
        (QWEN3_CLASSIFIER, {}, ("score", False, ("LABEL_0", "LABEL_1"))),
        (QWEN3_LM, modules("a.Transformer", "a.Pooling"), ("embed", False, ())),
        (XLMR_RERANKER, {}, ("score", False, ("LABEL_0",))),
        (BERT, {}, ("embed", False, ())),
    ],
)
def test_language_models_that_score_pairs_by_a_prompt(folder, config, files, expected):
    profile = ModelProfile.read(folder(config, files))
    assert (profile.task, profile.prompted_pairs, profile.labels) == expected
    assert profile.score_activation == ("softmax" if len(profile.labels) > 1 else "sigmoid")


def test_labels_that_do_not_exclude_each_other_show_one_by_one(folder):
    labelled = XLMR_RERANKER | {"id2label": {"0": "a", "1": "b"}}
    assert ModelProfile.read(folder(labelled)).score_activation == "softmax"
    independent = labelled | {"problem_type": "multi_label_classification"}
    assert ModelProfile.read(folder(independent)).score_activation == "sigmoid"


def test_labels_follow_their_positions(folder):
    labelled = XLMR_RERANKER | {"id2label": {"1": "yes", "0": "no"}}
    assert ModelProfile.read(folder(labelled)).labels == ("no", "yes")


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (BERT, {}, AllowedDimensions()),
        (BERT | {"is_matryoshka": True}, {}, AllowedDimensions(smallest=1)),
        (BERT | {"matryoshka_dimensions": [512, 128]}, {}, AllowedDimensions(listed=(128, 512))),
        (BERT | {"model_type": "qwen3"}, {}, AllowedDimensions(smallest=32)),
        (BERT | {"model_type": "bidirectional_pplx_qwen3"}, {}, AllowedDimensions(smallest=128)),
        (
            BERT | {"model_type": "qwen3"},
            modules("m.Transformer", "m.Pooling", "m.Dense"),
            AllowedDimensions(),
        ),
    ],
)
def test_dimensions_are_those_declared_or_of_the_family(folder, config, files, expected):
    assert ModelProfile.read(folder(config, files)).dimensions == expected


def test_the_operator_may_allow_any_dimensions(folder):
    assert ModelProfile.read(folder(BERT), any_dimensions=True).dimensions == AllowedDimensions(smallest=1)


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "message"),
    [
        (AllowedDimensions(), (384,), (64, 385, 0, -5), "--any-dimensions"),
        (AllowedDimensions(smallest=32), (32, 384), (31, 385, 0, -5, 10**9), "outside 32 to 384"),
        (AllowedDimensions(listed=(128, 512)), (128, 384), (64, 512, 0), "is not one of 128"),
    ],
)
def test_checking_dimensions(allowed, good, bad, message):
    for dimensions in good:
        allowed.check(dimensions, 384)
    for dimensions in bad:
        with pytest.raises(InvalidValue, match=message) as caught:
            allowed.check(dimensions, 384, "output_dimension")
        assert caught.value.param == "output_dimension"


def test_segments_are_used_only_where_model_and_tokenizer_have_them(folder):
    assert uses_segments(folder(BERT))
    assert uses_segments(folder(BERT | {"type_vocab_size": 2}))
    assert not uses_segments(folder(BERT | {"type_vocab_size": 1}))
    assert not uses_segments(folder({"model_type": "qwen3"}))
    without = {"tokenizer_config.json": {"model_input_names": ["input_ids", "attention_mask"]}}
    assert not uses_segments(folder(BERT, without))


def test_missing_files_are_named(folder, tmp_path):
    with pytest.raises(StartupError, match="nowhere does not exist"):
        ModelProfile.read(tmp_path / "nowhere")
    path = folder(BERT)
    (path / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"tokenizer\.json is missing"):
        ModelProfile.read(path)
    path = folder(BERT)
    (path / "config.json").unlink()
    with pytest.raises(StartupError, match=r"config\.json is missing"):
        ModelProfile.read(path)


@pytest.mark.parametrize("name", ["config.json", "modules.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[3]", '"text"'])
def test_broken_files_are_named(folder, name, text):
    path = folder(BERT)
    (path / name).write_text(text)
    with pytest.raises(StartupError, match=name.replace(".", r"\.")) as caught:
        ModelProfile.read(path)
    assert "\n" not in caught.value.message
