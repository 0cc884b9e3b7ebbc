"""XQuAD texts for measurements: passages and questions of one language, in file order."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

SHARED = Path(os.environ.get("BOUQUET_SHARED", Path(__file__).resolve().parent.parent.parent / "shared"))


@dataclass(frozen=True, slots=True)
class Xquad:
    """240 passages, 1,190 questions, and for each question the index of the passage that answers it."""

    passages: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[int, ...]

    @classmethod
    def load(cls, language: str, folder: Path = SHARED / "data" / "xquad") -> Xquad:
        """Read `xquad.<language>.json`; `OSError` when it is not there."""
        content = json.loads((folder / f"xquad.{language}.json").read_text(encoding="utf-8"))
        paragraphs = [p for article in content["data"] for p in article["paragraphs"]]
        asked = [(qa["question"], i) for i, p in enumerate(paragraphs) for qa in p["qas"]]
        return cls(
            tuple(p["context"] for p in paragraphs), tuple(q for q, _ in asked), tuple(i for _, i in asked)
        )
