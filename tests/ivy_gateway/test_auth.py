"""API keys on every path and method, their spellings, the 401 by family; what browsers may do."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from ivy_gateway import access
from ivy_gateway.access import ApiKeys
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError
from tests.ivy_gateway.fake_tulip import FakeTulip

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = ("first-key", "second/key+=")
PROBES = ("/live", "/health", "/ping")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(start_gateway):
    async with start_gateway(api_keys=KEYS) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unguarded(start_gateway):
    async with start_gateway(cors_allow_origins=("https://a.example",)) as gateway:
        yield gateway


def routes_of(gateway) -> set[str]:
    return set(gateway.client._transport.app.openapi()["paths"]) | {"/openapi.json", "/docs"}


# who gets in


async def test_every_route_needs_a_key_under_any_method_and_spelling(guarded):
    paths = routes_of(guarded) - set(PROBES)
    assert len(paths) > 25
    for path in paths | {"/v1", "/nothing", "/v1/nothing"}:
        spellings = {path, path + "/", "/" + path, path.upper(), path + "?key=first-key", "/v1" + path}
        for spelling in spellings:
            for method in METHODS if spelling == path else ("GET", "POST"):
                reply = await guarded.client.request(method, "http://ivy" + spelling)
                assert reply.status_code == 401, (method, spelling)
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.headers["x-request-id"]


@pytest.mark.parametrize("probe", PROBES)
async def test_probes_need_none_but_what_looks_like_them_does(guarded, probe):
    assert (await guarded.client.get(probe)).status_code == 200
    for spelling in (
        probe + "/",
        "/" + probe,
        probe.upper(),
        "/v1" + probe,
        probe + "/../embed",
        probe + "%2f",
    ):
        assert (await guarded.client.get("http://ivy" + spelling)).status_code == 401, spelling


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {} ", "{}", " {} "])
async def test_any_key_opens_with_bearer_or_bare(guarded, key, form):
    headers = {"authorization": form.format(key)}
    reply = await guarded.client.post("/embed", json={"inputs": "tea"}, headers=headers)
    assert reply.status_code == 200
    assert (await guarded.client.get("/v1/models", headers=headers)).status_code == 200
    assert (await guarded.client.get("/nothing", headers=headers)).status_code == 404


@pytest.mark.parametrize(
    "value",
    [
        "", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-key2", "Bearer FIRST-KEY",
        "first-key,second/key+=",
        "Basic first-key", "Token first-key", "Bearer Bearer first-key", "Bearer first-key second/key+=",
        "Bearer \xff\xfe", "Bearer " + "x" * 5000,
    ],
)  # fmt: skip
async def test_wrong_keys(guarded, value):
    headers = {b"authorization": value.encode("latin-1")}
    reply = await guarded.client.post("/embed", json={"inputs": "tea"}, headers=headers)
    assert reply.status_code == 401
    assert "first-ke" not in reply.text


async def test_two_authorization_headers_are_none(guarded):
    headers = [("authorization", "Bearer wrong"), ("authorization", "Bearer first-key")]
    assert (await guarded.client.get("/info", headers=headers)).status_code == 401


async def test_keys_elsewhere_do_not_count(guarded):
    reply = await guarded.client.get("/info?api_key=first-key", headers={"x-api-key": "first-key"})
    assert reply.status_code == 401


async def test_a_request_without_a_key_reaches_no_server(start_gateway):
    tulip = FakeTulip()
    async with start_gateway(tulip, api_keys=KEYS) as gateway:
        for path, field in (("/embed", "inputs"), ("/v1/embeddings", "input"), ("/", "inputs")):
            assert (await gateway.post(path, **{field: "tea"})).status_code == 401
        assert tulip.requests == []


@pytest.mark.parametrize(
    ("path", "nested"),
    [
        ("/embed", False),
        ("/predict", False),
        ("/info", False),
        ("/", False),
        ("/nothing", False),
        ("/v1/embeddings", True),
        ("/embeddings", True),
        ("/score", True),
        ("/classify", True),
        ("/v2/rerank", True),
        ("/v1/models", True),
        ("/models", True),
        ("//embeddings/", True),
        ("/v1/nothing", True),
        ("/detokenize", True),
    ],
)
async def test_the_401_speaks_the_paths_family(guarded, path, nested):
    content = (await guarded.client.post("http://ivy" + path)).json()
    if nested:
        assert content["error"]["type"] == "authentication_error"
        assert content["error"]["code"] == "invalid_api_key"
    else:
        assert isinstance(content["error"], str)
        assert content["error_type"] == "Unauthorized"
    assert content["code"] == 401


async def test_metrics_are_open_by_flag_only(guarded, start_gateway):
    assert (await guarded.client.get("/metrics")).status_code == 401
    async with start_gateway(api_keys=KEYS, open_metrics=True) as gateway:
        assert (await gateway.client.get("/metrics")).status_code == 200
        assert (await gateway.client.get("/metrics/")).status_code == 401
        assert (await gateway.client.get("/info")).status_code == 401


async def test_without_keys_everybody_gets_in(unguarded):
    assert (await unguarded.post("/embed", inputs="tea")).status_code == 200
    headers = {"authorization": "Bearer whatever"}
    assert (await unguarded.client.get("/info", headers=headers)).status_code == 200


# keys from a file


def config_with(path, *keys: str) -> GatewayConfig:
    return GatewayConfig(model=path.parent, replicas=("h:1",), api_keys=keys, api_keys_file=path)


async def test_a_file_adds_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# for the search team\none-key\n\n  other-key \n")
    keys = ApiKeys.read(config_with(path, "flag-key"))
    assert all(keys.admits(key) for key in (b"one-key", b"Bearer other-key", b"flag-key"))
    assert not any(keys.admits(key) for key in (b"", b"# for the search team", b"one-key\nother-key"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no key"),
        (b"# none\n\n", "holds no key"),
        (b"good\ntwo words\n", "line 2: a key must be visible ASCII"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
async def test_a_broken_file_stops_the_start_without_showing_keys(tmp_path, content, words):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=words) as caught:
        ApiKeys.read(config_with(path))
    assert "two words" not in caught.value.message


async def test_settings_do_not_show_keys_when_printed(tmp_path):
    assert "hidden-key" not in repr(config_with(tmp_path / "keys", "hidden-key"))


async def test_every_key_is_compared_whatever_the_others_gave(monkeypatch):
    compared = []
    monkeypatch.setattr(
        access.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b
    )
    keys = ApiKeys(["a", "bb", "ccc"])
    assert keys.admits(b"Bearer a")
    assert not keys.admits(b"Bearer dddd")
    assert compared == [(32, 32)] * 6


# browsers


PREFLIGHT = {
    "origin": "https://a.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-request-id",
}


async def test_a_preflight_carries_no_key_and_needs_none(guarded):
    reply = await guarded.client.options("/embed", headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "*"
    allowed = reply.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("authorization", "content-type", "x-request-id"))
    assert reply.headers["access-control-allow-methods"] == "GET, POST, OPTIONS"
    plain = await guarded.client.options("/embed", headers={"origin": "https://a.example"})
    assert plain.status_code == 401


async def test_a_page_can_read_replies_and_refusals(guarded):
    origin = {"origin": "https://a.example"}
    refused = await guarded.client.post("/embed", json={"inputs": "tea"}, headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
    headers = origin | {"authorization": "Bearer first-key"}
    reply = await guarded.client.post("/embed", json={"inputs": "tea"}, headers=headers)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")
    assert "x-truncated-inputs" in reply.headers["access-control-expose-headers"]


async def test_only_listed_origins_where_there_is_a_list(unguarded):
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        reply = await unguarded.client.post("/embed", json={"inputs": "tea"}, headers={"origin": origin})
        assert reply.status_code == 200
        assert reply.headers.get("access-control-allow-origin") == allowed
    refused = await unguarded.client.options("/embed", headers=PREFLIGHT | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers


async def test_none_turns_it_off(start_gateway):
    async with start_gateway(cors_allow_origins=("none",)) as gateway:
        reply = await gateway.client.options("/embed", headers=PREFLIGHT)
        assert reply.status_code == 405
        assert "access-control-allow-origin" not in reply.headers


async def test_keys_follow_their_file_and_a_broken_file_changes_nothing(start_gateway, tmp_path, monkeypatch):
    monkeypatch.setattr(access, "FOLLOW_SECONDS", 0.02)
    file = tmp_path / "keys"
    file.write_text("old-key\n")
    async with start_gateway(api_keys_file=file) as gateway:

        async def admitted(key: str) -> bool:
            reply = await gateway.client.get("/info", headers={"authorization": f"Bearer {key}"})
            return reply.status_code == 200

        assert [await admitted(key) for key in ("old-key", "new-key")] == [True, False]
        other = tmp_path / "other"
        other.write_text("new-key\nthird-key\n")
        other.replace(file)
        async with asyncio.timeout(20):
            while not await admitted("new-key"):
                await asyncio.sleep(0.02)
        assert [await admitted(key) for key in ("old-key", "third-key")] == [False, True]
        file.write_text("# nothing\n")
        await asyncio.sleep(0.2)
        file.unlink()
        await asyncio.sleep(0.2)
        assert await admitted("new-key")
