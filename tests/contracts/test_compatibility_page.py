"""The compatibility page is what its tables say."""

from __future__ import annotations

from docs import compatibility
from ivy_gateway.app import ROUTERS


def test_the_page_is_up_to_date():
    assert compatibility.PAGE.read_text(encoding="utf-8") == compatibility.page(), (
        "run python -m docs.compatibility"
    )


def test_every_route_and_every_client_is_on_it():
    text = compatibility.page()
    paths = {route.path for router in ROUTERS for route in router.routes}
    assert len(paths) > 30
    assert all(f"{path}`" in text for path in paths)
    for client in ("openai", "cohere", "litellm", "perplexity", "hugging_face", "llama_index"):
        assert f"test_{client}" in text
