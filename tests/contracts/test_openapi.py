"""What the OpenAPI document promises: every field that is read is in it, and replies are as it says.

Bodies come from the tables of facts, and from schemathesis, which makes them up from the document itself.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import httpx
import hypothesis
import pytest

from ivy_gateway.routes.body import Fields
from tests.contracts import test_tei, test_vllm
from tests.contracts.facts import Document, Fact
from tests.contracts.gateways import contextual_folder, kinds, serving_all
from tests.ivy_gateway.conftest import start_gateway  # noqa: F401 - a fixture

schemathesis = pytest.importorskip("schemathesis")

# Nobody's words, or words that are accepted without effect.
NOT_READ = {"options"}
TWINS = {"/": "/invocations"}  # paths that only together see all kinds of bodies
NEVER_200 = {"/embed_sparse"}  # no model that is served gives sparse vectors
EXAMPLES = 5  # made-up bodies for each route

CHAT = [{"role": "user", "content": "tea"}]
PAIR = {"source_sentence": "tea", "sentences": ["cup"]}
MORE = [
    ("/embed_all", {"inputs": "tea"}),
    ("/predict", {"inputs": [["tea", "cup"]], "top_k": 1}),
    ("/v1/embeddings", {"messages": CHAT, "add_generation_prompt": True}),
    ("/v1/embeddings", {"input": ["tea", "cup"], "late_chunking": True}),
    ("/v1/embeddings", {"input": "tea", "embedding_type": ["float", "ubinary"]}),
    ("/perplexity/v1/embeddings", {"input": "tea"}),
    ("/pooling", {"messages": CHAT}),
    ("/pooling", {"input": "tea", "task": "classify"}),
    ("/classify", {"messages": CHAT, "add_special_tokens": True}),
    ("/classify", {"input": "tea"}),
    ("/tokenize", {"messages": CHAT, "return_token_strs": True}),
    ("/v1/contextualizedembeddings", {"inputs": [["tea"]], "output_dtype": "ubinary"}),
    ("/v1/embed", {"texts": ["tea"], "embedding_types": ["binary"]}),
    ("/invocations", {"input": "tea"}),
    ("/invocations", {"input": "tea", "task": "token_embed"}),
    ("/invocations", {"input": "tea", "task": "classify"}),
    ("/invocations", {"messages": CHAT}),
    ("/invocations", {"text_1": "tea", "text_2": ["cup"]}),
    ("/invocations", {"data_1": "tea", "data_2": ["cup"]}),
    ("/invocations", {"queries": "tea", "documents": ["cup"]}),
    ("/invocations", {"input_ids": [[101, 5572, 102]]}),
    ("/invocations", {"query": "tea", "documents": ["cup"]}),
    ("/", {"inputs": "tea", "parameters": {"top_k": 1, "normalize": False}}),
    ("/", {"inputs": PAIR, "parameters": {"truncate": True}}),
]


@pytest.fixture(scope="module")
def gateways(start_gateway, minilm, tmp_path_factory) -> Iterator[dict[str, str]]:  # noqa: F811
    contextual = contextual_folder(minilm, tmp_path_factory.mktemp("contextual") / "m")
    with serving_all(start_gateway, kinds(minilm, contextual)) as bases:
        yield bases


@pytest.fixture(scope="module")
def document(gateways) -> Document:
    return Document(httpx.get(f"{gateways['embedder']}/openapi.json", timeout=60).json())


class Reader:
    """Notes which fields of a body anybody reads: `a`, or `a.b` of an object inside."""

    def __init__(self, monkeypatch) -> None:
        self.names: set[str] = set()
        for method in ("get", "require", "boolean", "text", "integer", "choice", "choices", "__contains__"):
            self._note(monkeypatch, method)
        plain_object = Fields.object

        def inner(fields: Fields, name: str) -> Fields:
            self.names.add(self._place(fields) + name)
            found = plain_object(fields, name)
            found.place = f"{self._place(fields)}{name}."
            return found

        monkeypatch.setattr(Fields, "object", inner)

    def _note(self, monkeypatch, method: str) -> None:
        plain = getattr(Fields, method)

        def noting(fields: Fields, name: str, *more, **options):
            self.names.add(self._place(fields) + name)
            return plain(fields, name, *more, **options)

        monkeypatch.setattr(Fields, method, noting)

    @staticmethod
    def _place(fields: Fields) -> str:
        return getattr(fields, "place", "")


def bodies(document: Document) -> Iterator[tuple[str, object]]:
    """Every route's example, all facts' bodies, and some that neither has."""
    yield from document.examples()
    for fact in (*test_tei.FACTS, *test_vllm.FACTS):
        if isinstance(fact, Fact) and isinstance(fact.send, dict) and fact.path in document.posts():
            yield fact.path, fact.send
    yield from MORE


def test_every_field_that_is_read_is_documented(gateways, document, monkeypatch):
    reader = Reader(monkeypatch)
    read = collections.defaultdict(set)
    with httpx.Client(timeout=60) as client:
        for path, body in bodies(document):
            for base in gateways.values():
                reader.names = set()
                reply = client.post(base + path, json=body)
                read[TWINS.get(path, path)] |= reader.names
                assert reply.status_code < 500, (path, body, reply.text)
                problem = document.problem(path, "post", reply)
                assert problem is None, (path, body, problem, reply.text[:300])
    hidden = {path: names - document.fields(path) for path, names in read.items()}
    assert {path: names for path, names in hidden.items() if names} == {}
    assert unread(read, document) == {}
    assert set(read) >= document.posts() - {"/ping", *TWINS}


def unread(read: dict[str, set[str]], document: Document) -> dict[str, set[str]]:
    """Fields that are documented and that nobody looks at, on any path with the same fields."""
    together = collections.defaultdict(set)
    for path, names in read.items():
        together[frozenset(document.fields(path))] |= names
    found = {}
    for path in read.keys() - NEVER_200:
        documented = document.fields(path)
        outer = {name for name in documented if "." not in name}
        found[path] = outer - together[frozenset(documented)] - NOT_READ
    return {path: names for path, names in found.items() if names}


def test_every_field_says_what_it_is(document):
    """A type and a sentence each; and every route with an example and the shapes of all its answers."""
    for path in document.posts() - {"/ping"}:
        for name, schema in document.takes(path)["properties"].items():
            assert schema.get("description"), (path, name)
            assert {"type", "anyOf"} & set(schema), (path, name)
        answers = document.operation(path, "post")["responses"]
        assert answers["200"]["content"]["application/json"]["schema"], path
        assert answers["default"]["content"]["application/json"]["schema"], path


def test_bodies_made_up_from_the_document(gateways):
    """No 5xx and no reply that is not as documented; and each route can be used."""
    answered = collections.defaultdict(collections.Counter)
    for name, base in gateways.items():
        for found in schemathesis.openapi.from_url(f"{base}/openapi.json").get_all_operations():
            operation = found.ok()
            if kind_for(operation.path) == name:
                try_out(operation, base, answered)
    unusable = {
        path for (method, path), statuses in answered.items() if method == "post" and not statuses[200]
    }
    assert unusable == NEVER_200
    assert len(answered) > 30


def kind_for(path: str) -> str:
    """The kind of gateway whose model can do most with a route; of twins, each another one."""
    if "perplexity" in path or "contextualized" in path:
        return "codes"
    scores = ("score", "rerank", "predict", "classify", "invocations")
    return "scorer" if any(word in path for word in scores) else "embedder"


def try_out(operation, base: str, answered) -> None:
    """Send bodies to one route of one gateway, and count its answers."""
    checks = [
        schemathesis.checks.not_a_server_error,
        *(
            schemathesis.checks.CHECKS.get_by_names(
                ["response_schema_conformance", "content_type_conformance"]
            )
        ),
    ]

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy())
    def send(case) -> None:
        reply = case.call(base_url=base, timeout=60)
        answered[operation.method, operation.path][reply.status_code] += 1
        case.validate_response(reply, checks=checks)

    send()
    example = operation.definition.raw.get("requestBody", {}).get("content", {}).get("application/json", {})
    if example:
        reply = httpx.post(base + operation.path, json=example["example"])
        answered[operation.method, operation.path][reply.status_code] += 1
