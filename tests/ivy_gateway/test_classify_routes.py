"""`/predict`, `/classify`, `/similarity`, `POST /` and `/embed_sparse`: shapes, order, traps, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip, embedding_row, score_row

pytestmark = pytest.mark.asyncio(loop_scope="module")

LABELS = ("joy", "anger", "calm")
LONG = "tea " * 300


def label_row(token_ids: np.ndarray) -> np.ndarray:
    return np.array([len(token_ids) % 5, token_ids.sum() % 7, 1], np.float32) / 3


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def classifier(start_gateway):
    tulip = FakeTulip(task=pb.TASK_SCORE, dimensions=3)
    tulip.row = label_row
    async with start_gateway(tulip, max_client_batch_size=50) as gateway:
        pipeline = gateway.pipeline
        pipeline.profile = dataclasses.replace(pipeline.profile, labels=LABELS, score_activation="softmax")
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(start_gateway):
    async with start_gateway(prompts={"query": "ask: "}, max_client_batch_size=50) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(start_gateway):
    async with start_gateway(FakeTulip(task=pb.TASK_SCORE, dimensions=1)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def ids(minilm):
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda *texts: np.array(tokenizer.encode(*texts).ids, np.int32)


@pytest.fixture(scope="module")
def expected(ids):
    """From a text or a pair to its labels, best first, as `/predict` shows them."""

    def labels(*texts, raw=False):
        logits = label_row(ids(*texts))
        shown = logits if raw else softmax(logits)
        order = sorted(range(3), key=lambda i: (-logits[i], i))
        return [{"score": pytest.approx(float(shown[i]), rel=1e-5), "label": LABELS[i]} for i in order]

    return labels


# /predict


async def test_a_text_and_a_flat_pair_give_one_flat_list(classifier, expected):
    assert (await classifier.post("/predict", inputs="tea")).json() == expected("tea")
    assert (await classifier.post("/predict", inputs=["tea"])).json() == expected("tea")
    assert (await classifier.post("/predict", inputs=["tea", "a cup"])).json() == expected("tea", "a cup")


@pytest.mark.parametrize(
    "batch", [[["tea"]], [["tea", "a cup"]], [["tea"], ["oak", "shelf"], ["a ferry"], ["x", ""]]]
)
async def test_a_batch_gives_a_list_of_lists_in_order(classifier, expected, batch):
    reply = await classifier.post("/predict", inputs=batch)
    assert reply.json() == [expected(*texts) for texts in batch]
    assert {"x-compute-tokens", "x-inference-time", "x-truncated-inputs"} <= reply.headers.keys()


@pytest.mark.parametrize("fields", [{"raw_scores": True}, {"function_to_apply": "none"}])
async def test_raw_scores_are_logits_in_the_same_order(classifier, expected, fields):
    reply = await classifier.post("/predict", inputs=["tea", "a cup"], **fields)
    assert reply.json() == expected("tea", "a cup", raw=True)


async def test_top_k_keeps_the_best_labels(classifier, expected):
    reply = await classifier.post("/predict", inputs=[["tea"], ["oak"]], top_k=2)
    assert reply.json() == [expected("tea")[:2], expected("oak")[:2]]


async def test_labels_that_the_files_do_not_name_are_numbered(scorer, ids):
    reply = (await scorer.post("/predict", inputs=["tea", "cup"])).json()
    score = 1 / (1 + np.exp(-score_row(ids("tea", "cup"))[0]))
    assert reply == [{"score": pytest.approx(float(score), rel=1e-5), "label": "LABEL_0"}]


async def test_long_inputs_are_cut_or_refused(classifier):
    cut = await classifier.post("/predict", inputs=[["tea"], [LONG]])
    assert cut.headers["x-truncated-inputs"] == "1"
    refused = await classifier.post("/predict", inputs=[["tea"], [LONG]], truncate=False)
    assert refused.status_code == 422
    assert "inputs[1]" in refused.json()["error"]


PREDICT = [
    ({}, 422, "`inputs` is required"),
    ({"inputs": ""}, 400, "inputs"),
    ({"inputs": []}, 400, "`inputs` cannot be empty"),
    ({"inputs": ["", ""]}, 400, "inputs"),
    ({"inputs": [["a"], [""], ["b"], ["", ""]]}, 400, "inputs[1], inputs[3]"),
    ({"inputs": [["a"], []]}, 422, "`inputs[1]` must be one text or a pair"),
    ({"inputs": ["a", "b", "c"]}, 422, "each item of a batch is a list of its own"),
    ({"inputs": [["a", "b", "c"]]}, 422, "`inputs[0]` must be one text or a pair, got a list of 3"),
    ({"inputs": ["a", ["b"]]}, 422, "`inputs[1]` must be a string, got a list"),
    ({"inputs": [["a"], "b", 3]}, 422, "`inputs[2]` must be a string, got an integer"),
    ({"inputs": [["a", 3]]}, 422, "`inputs[0][1]` must be a string"),
    ({"inputs": 3}, 422, "`inputs` must be a string"),
    ({"inputs": {"text": "a"}}, 422, "`inputs` must be a string, got an object"),
    ({"inputs": [["a"]] * 51}, 422, "batch size 51 > maximum allowed batch size 50"),
    ({"inputs": "a", "raw_scores": "no"}, 422, "`raw_scores`"),
    ({"inputs": "a", "top_k": 0}, 422, "`top_k`"),
    ({"inputs": "a", "function_to_apply": "sigmoid"}, 422, "none, softmax"),
    ({"inputs": "a", "truncation_direction": "up"}, 422, "right, left"),
    ({"inputs": "a", "instruction": "x"}, 422, "a lone text takes none"),
    ({"inputs": ["a", "b"], "instruction": "x"}, 422, "`instruction` is not supported"),
]


@pytest.mark.parametrize(("body", "status", "words"), PREDICT)
async def test_predict_refuses(classifier, body, status, words):
    reply = await classifier.post("/predict", **body)
    assert reply.status_code == status
    assert words in reply.json()["error"]
    assert reply.json()["error_type"] == ("Empty" if status == 400 else "Validation")


# /classify


async def test_classify_gives_probabilities_in_the_models_order(classifier, ids):
    texts = ["tea", "oak shelf", "a ferry"]
    reply = (await classifier.post("/classify", input=texts, model="minilm")).json()
    assert (reply["object"], reply["model"]) == ("list", "minilm")
    assert reply["id"].startswith("classify-")
    assert [item["index"] for item in reply["data"]] == [0, 1, 2]
    for text, item in zip(texts, reply["data"], strict=True):
        logits = label_row(ids(text))
        assert item["label"] == LABELS[int(logits.argmax())]
        assert item["num_classes"] == 3
        np.testing.assert_allclose(item["probs"], softmax(logits), rtol=1e-5)
    tokens = sum(len(ids(text)) for text in texts)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_classify_takes_a_text_objects_and_ids(classifier, ids):
    listed = (await classifier.post("/classify", input=["green tea"])).json()["data"]
    flat = ids("green tea").tolist()
    for given in ("green tea", [{"text": "green tea"}], flat, [flat]):
        assert (await classifier.post("/classify", input=given)).json()["data"] == listed


@pytest.mark.parametrize("fields", [{"use_activation": False}, {"raw_scores": True}])
async def test_classify_without_activation_gives_logits(classifier, ids, fields):
    reply = (await classifier.post("/classify", input="tea", **fields)).json()["data"]
    np.testing.assert_allclose(reply[0]["probs"], label_row(ids("tea")), rtol=1e-6)


CLASSIFY = [
    ({}, 400, "input", "`input` is required"),
    ({"input": ""}, 400, "input", "cannot be empty"),
    ({"input": ["a", ""]}, 400, "input[1]", "input[1]"),
    ({"input": ["a", 3]}, 400, "input[1]", "`input[1]`"),
    ({"input": [[10**6]]}, 400, "input[0]", "1000000"),
    ({"input": ["a"] * 51}, 400, None, "batch size 51"),
    ({"input": "a", "model": "nope"}, 404, "model", "served: minilm"),
    ({"messages": [{"role": "user", "content": "a"}]}, 400, "messages", "no chat template"),
    ({"input": "a", "add_special_tokens": False}, 400, "add_special_tokens", "true or absent"),
    ({"input": "a", "use_activation": 1}, 400, "use_activation", "a boolean"),
    ({"input": LONG, "truncate": False}, 400, "input[0]", "256"),
]


@pytest.mark.parametrize(("body", "status", "param", "words"), CLASSIFY)
async def test_classify_refuses(classifier, body, status, param, words):
    reply = await classifier.post("/classify", **body)
    assert reply.status_code == status
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]


# /similarity


def unit(vector):
    return vector / np.linalg.norm(vector)


async def test_similarity_is_cosine_in_order(embedder, ids):
    sentences = ["a ship", "bread", "a ferry"]
    body = {"inputs": {"source_sentence": "a ferry", "sentences": sentences}}
    reply = await embedder.post("/similarity", **body)
    source = unit(embedding_row(ids("a ferry")))
    expected = [source @ unit(embedding_row(ids(sentence))) for sentence in sentences]
    np.testing.assert_allclose(reply.json(), expected, atol=1e-6)
    assert reply.headers["x-compute-tokens"] == str(sum(len(ids(s)) for s in ["a ferry", *sentences]))
    for parameters in ({"prompt_name": "query"}, {"input_type": "search_query"}):
        prompted = await embedder.post("/similarity", **body, parameters=parameters)
        source = unit(embedding_row(ids("ask: a ferry")))
        expected = [source @ unit(embedding_row(ids("ask: " + sentence))) for sentence in sentences]
        np.testing.assert_allclose(prompted.json(), expected, atol=1e-6)
    empty = await embedder.post("/similarity", **body, parameters={})
    assert empty.json() == reply.json()


SIMILARITY = [
    ({}, 422, "`inputs` is required"),
    ({"inputs": "a"}, 422, "`inputs` must be an object"),
    ({"inputs": {"sentences": ["a"]}}, 422, "`inputs.source_sentence` is required"),
    ({"inputs": {"source_sentence": 3, "sentences": ["a"]}}, 422, "`source_sentence` must be a string"),
    ({"inputs": {"source_sentence": "", "sentences": ["a"]}}, 400, "`inputs.source_sentence` cannot be"),
    ({"inputs": {"source_sentence": "a"}}, 422, "`inputs.sentences`"),
    ({"inputs": {"source_sentence": "a", "sentences": "b"}}, 422, "`inputs.sentences`"),
    ({"inputs": {"source_sentence": "a", "sentences": []}}, 400, "`inputs.sentences` cannot be empty"),
    ({"inputs": {"source_sentence": "a", "sentences": ["b", "", "c", ""]}}, 400, "sentences[1], inputs.sent"),
    ({"inputs": {"source_sentence": "a", "sentences": ["b"] * 50}}, 422, "batch size 51"),
    ({"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": 3}, 422, "`parameters`"),
    (
        {"inputs": {"source_sentence": "a", "sentences": [LONG]}, "parameters": {"truncate": False}},
        422,
        "256",
    ),
]


@pytest.mark.parametrize(("body", "status", "words"), SIMILARITY)
async def test_similarity_refuses(embedder, body, status, words):
    reply = await embedder.post("/similarity", **body)
    assert reply.status_code == status
    assert words in reply.json()["error"]


# POST / and /invocations


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_an_embedder_does_what_the_body_asks_for(embedder, path):
    for body, target in (
        ({"inputs": "tea"}, "/embed"),
        ({"inputs": ["tea", "oak"], "normalize": False, "options": {"wait_for_model": True}}, "/embed"),
        ({"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}, "/similarity"),
        ({"query": "tea", "texts": ["oak", "cup"], "raw_scores": True}, "/rerank"),
    ):
        reply = await embedder.post(path, **body)
        assert reply.status_code == 200
        assert reply.json() == (await embedder.post(target, **body)).json()
    hub = await embedder.post(path, inputs=["tea"], parameters={"normalize": False, "prompt_name": "query"})
    flat = await embedder.post("/embed", inputs=["tea"], normalize=False, prompt_name="query")
    assert hub.json() == flat.json()


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_a_classifier_nests_its_reply_for_the_hubs_client(classifier, expected, path):
    assert (await classifier.post(path, inputs="tea")).json() == expected("tea")
    for parameters in ({}, {"function_to_apply": None, "top_k": None}):
        assert (await classifier.post(path, inputs="tea", parameters=parameters)).json() == [expected("tea")]
    kept = await classifier.post(path, inputs="tea", parameters={"top_k": 1, "function_to_apply": "softmax"})
    assert kept.json() == [expected("tea")[:1]]


async def test_a_documents_body_is_answered_as_an_object(scorer):
    reply = (await scorer.post("/invocations", query="tea", documents=["oak", "cup"])).json()
    assert len(reply["results"]) == 2
    refused = await scorer.post("/invocations", query="tea", documents=[])
    assert refused.json()["error"]["param"] == "documents"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 422, "`inputs` is required"),
        ({"query": "tea"}, 422, "`documents` is required"),
        ({"inputs": "a", "parameters": "x"}, 422, "`parameters` must be an object"),
    ],
)
async def test_root_refuses(embedder, body, status, words):
    reply = await embedder.post("/", **body)
    assert reply.status_code == status
    assert words in reply.json()["error"]


async def test_get_on_the_root_is_health(embedder):
    reply = await embedder.client.get("/")
    assert (reply.status_code, reply.content) == (200, b"")


# what a model cannot do


async def test_wrong_tasks(embedder, scorer):
    for gateway, path, body in (
        (embedder, "/predict", {"inputs": "tea"}),
        (scorer, "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        (embedder, "/embed_sparse", {"inputs": "tea"}),
        (scorer, "/embed_sparse", {"inputs": "tea"}),
    ):
        reply = await gateway.post(path, **body)
        assert (reply.status_code, reply.json()["error_type"]) == (424, "Backend")
    refused = await embedder.post("/classify", input="tea")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_supported")
