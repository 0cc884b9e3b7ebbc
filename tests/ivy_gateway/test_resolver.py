"""DNS names that change, fail and hang, by a lookup that the test answers."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ivy_gateway import resolver as resolver_module
from ivy_gateway.resolver import Resolver, system_lookup


class Names:
    """Answers from a table; an exception in it is raised."""

    def __init__(self, **answers) -> None:
        self.answers = answers
        self.asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return [f"{address}:{port}" for address in answer]


async def test_static_addresses_come_first_and_each_address_counts_once():
    names = Names(a=["10.0.0.2", "10.0.0.1"], b=["10.0.0.1", "10.0.0.3"])
    resolver = Resolver(["10.0.0.1:7", "unix:/x", "dns:a:7", "dns:b:7"], names)
    assert list(resolver.known()) == ["10.0.0.1:7", "unix:/x"]
    assert await resolver.resolve() == {
        "10.0.0.1:7": "",
        "unix:/x": "",
        "10.0.0.2:7": "a",
        "10.0.0.3:7": "b",
    }


async def test_a_failing_name_keeps_its_addresses_and_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    names = Names(a=["10.0.0.1"], b=["10.0.0.9"])
    resolver = Resolver(["dns:a:7", "dns:b:7"], names)
    await resolver.resolve()
    names.answers |= {"a": OSError("no such name"), "b": ["10.0.0.8"]}
    for _ in range(3):
        assert set(await resolver.resolve()) == {"10.0.0.1:7", "10.0.0.8:7"}
    assert [r.message for r in caplog.records] == [
        "--replica dns:a:7: no such name; keeping the addresses known: 10.0.0.1:7"
    ]
    names.answers["a"] = ["10.0.0.2"]
    assert set(await resolver.resolve()) == {"10.0.0.2:7", "10.0.0.8:7"}
    assert "resolved again" in caplog.records[-1].message


async def test_an_empty_answer_is_a_failure():
    names = Names(a=["10.0.0.1"])
    resolver = Resolver(["dns:a:7"], names)
    await resolver.resolve()
    names.answers["a"] = []
    assert list(await resolver.resolve()) == ["10.0.0.1:7"]


async def test_a_lookup_that_hangs_is_not_started_twice_and_its_answer_counts_later(monkeypatch):
    monkeypatch.setattr(resolver_module, "LOOKUP_SECONDS", 0.02)
    answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    asked = []

    async def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        return await answer

    resolver = Resolver(["dns:slow:7"], lookup)
    for _ in range(3):
        assert await resolver.resolve() == {}
    answer.set_result(["10.0.0.1:7"])
    assert list(await resolver.resolve()) == ["10.0.0.1:7"]
    assert asked == ["slow"]


async def test_the_systems_own_lookup():
    assert "127.0.0.1:7" in await system_lookup("localhost", 7)
    with pytest.raises(OSError, match=r"."):
        await system_lookup("no-such-name.invalid", 7)
