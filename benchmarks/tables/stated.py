"""A peer's figures on the same card as they were stated earlier: shown beside ours, never as if run now."""

from __future__ import annotations

SOURCE = (
    "vLLM 0.22.0 on one NVIDIA H200, the same shape with random weights; stated, measured earlier with an"
    " aiohttp client. default: stock flags; tuned: four API processes, 32,768 batched tokens, no prefix cache"
)

# Milliseconds (p50, p99).
LATENCIES: dict[str, dict[str, tuple[float, float | None]]] = {
    "vLLM default": {
        "T1 1 x 128": (12.0, 13.5),
        "T1 1 x 512": (11.6, 12.9),
        "T1 1 x 4096": (24.7, 27.4),
        "T2 5 x 512": (37.8, 62),
        "T2 25 x 512": (77.1, 99),
        "T2 50 x 512": (118.7, 144),
        "T4 1 x 512": (20.9, None),
        "T4 1 x 512, 2 at once": (43.4, None),
        "T4 1 x 512, 4 at once": (31.5, None),
        "T4 1 x 512, 8 at once": (44.1, None),
        "T4 1 x 512, 16 at once": (56.3, None),
    },
    "vLLM tuned": {
        "T1 1 x 128": (11.2, 15.4),
        "T1 1 x 512": (11.4, 15.0),
        "T1 1 x 4096": (23.6, 31.8),
        "T4 1 x 512": (22.7, None),
        "T4 1 x 512, 2 at once": (33.0, None),
        "T4 1 x 512, 4 at once": (44.8, None),
        "T4 1 x 512, 8 at once": (48.2, None),
        "T4 1 x 512, 16 at once": (31.9, None),
    },
}

# Embeddings a second in T3, requests a second in T5.
RATES: dict[str, dict[str, float]] = {
    "vLLM default": {
        "T3 100 x 512, 4 at once": 573,
        "T3 100 x 1024, 4 at once": 267,
        "T3 100 x 4096, 4 at once": 66,
        "T5 1 x 24": 73,
        "T5 1 x 24, 16 at once": 529,
        "T5 1 x 24, 64 at once": 676,
    },
    "vLLM tuned": {
        "T3 100 x 512, 4 at once": 804,
        "T3 100 x 1024, 4 at once": 395,
        "T3 100 x 4096, 4 at once": 79,
    },
}

START_SECONDS = {"vLLM default": 115, "vLLM tuned": 102}
