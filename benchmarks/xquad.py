"""XQuAD texts for measurements: passages and questions of one language, in file order."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

SHARED = Path(os.environ.get("BOUQUET_SHARED", Path(__file__).resolve().parent.parent.parent / "shared"))


@dataclass(frozen=True, slots=True)
class Xquad:
    """240 passages of 48 articles, 1,190 questions, and for each the index of the passage that answers it."""

    passages: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[int, ...]
    answer_starts: tuple[int, ...]  # of each question, the character of that passage where the answer begins
    articles: tuple[int, ...]  # of each passage, the number of the article it is from

    @classmethod
    def load(cls, language: str, folder: Path = SHARED / "data" / "xquad") -> Xquad:
        """Read `xquad.<language>.json`; `OSError` when it is not there."""
        content = json.loads((folder / f"xquad.{language}.json").read_text(encoding="utf-8"))
        numbered = [(n, p) for n, article in enumerate(content["data"]) for p in article["paragraphs"]]
        asked = [(qa, i) for i, (_, p) in enumerate(numbered) for qa in p["qas"]]
        return cls(
            passages=tuple(p["context"] for _, p in numbered),
            questions=tuple(qa["question"] for qa, _ in asked),
            answers=tuple(i for _, i in asked),
            answer_starts=tuple(qa["answers"][0]["answer_start"] for qa, _ in asked),
            articles=tuple(n for n, _ in numbered),
        )
