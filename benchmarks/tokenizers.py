"""The compiled tokenizer against `tokenizers` and sentencepiece: same ids, same texts, one run.

    python -m benchmarks.tokenizers [--quick] [--share]

XLM-R's and Qwen3's vocabularies on XQuAD in seven languages, MiniLM's on English. All texts are unseen: each
side is warmed on other passages of the language and meets every timed text once. One-thread figures are
processor time of the process, which other load on the machine hardly moves; figures of all threads are wall
time. The sentencepiece model is written from the same pieces, scores and charsmap.

`--share`: what part of `/score` requests tokenization is, with the extension and without
(`benchmarks/tokenizer_share.py`).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as sp_model
from tokenizers import Tokenizer

from benchmarks import report, tokenizer_share
from benchmarks.tokenizer_files import read_content
from benchmarks.xquad import SHARED, Xquad
from ivy_gateway.compiled_tokenizer.encoder import FastEncoder, Frame, Side, fast_encoder
from ivy_gateway.special_tokens import Json, Templates, literal_form

LANGUAGES = ("ar", "de", "en", "hi", "ru", "th", "zh")
LENGTHS = (32, 128, 512, 4096)
NUM_PASSAGES = 100
MAX_LENGTH = 512
# Passages of a language: to warm on, to encode as a batch and as documents, to make texts of some length of.
WARM, BATCH, LONG = slice(0, 60), slice(60, 160), slice(160, 240)
REACH = {"encode": 6.0, "batch": 5.0, "pairs": 4.0}
AIM = {"encode": 8.0, "batch": 7.0, "pairs": 6.0, "sentencepiece": 1.0}


@dataclass
class Sides:
    """Everything that is compared. The library has a cache of words: an object of its own for each use."""

    content: Json
    single: Tokenizer
    batch: Tokenizer
    all_threads: Tokenizer
    pairs: Tokenizer
    ours: FastEncoder
    ours_all_threads: FastEncoder
    sentencepiece: sentencepiece.SentencePieceProcessor | None

    @classmethod
    def load(cls, name: str) -> Sides:
        """All sides of one file, in literal mode, as it is served."""
        content = read_content(SHARED, name)
        form = json.dumps(literal_form(content))
        single, batch, all_threads, pairs = (Tokenizer.from_str(form) for _ in range(4))
        processor = sentencepiece_of(content) if content["model"]["type"] == "Unigram" else None
        threads = (os.cpu_count() or 1) - 1
        return cls(
            content,
            single,
            batch,
            all_threads,
            pairs,
            fast_encoder(single),
            fast_encoder(single, threads),
            processor,
        )

    def warm(self, texts: Sequence[str]) -> None:
        """Let every side see `texts`."""
        for tokenizer in (self.single, self.batch, self.all_threads, self.pairs):
            tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        for encoder in (self.ours, self.ours_all_threads):
            encoder.encode(list(texts))
        if self.sentencepiece is not None:
            self.sentencepiece.encode(list(texts))


def sentencepiece_of(content: Json) -> sentencepiece.SentencePieceProcessor:
    """A sentencepiece model of the same pieces, scores and charsmap."""
    kinds = {"<unk>": 2} | dict.fromkeys(("<s>", "</s>", "<pad>", "<mask>"), 3)  # unknown, control
    model = sp_model.ModelProto()
    for piece, score in content["model"]["vocab"]:
        model.pieces.add(piece=piece, score=score, type=kinds.get(piece, 1))
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = 1
    trainer.bos_id, trainer.pad_id, trainer.eos_id, trainer.unk_id = 0, 1, 2, 3
    normalizer.precompiled_charsmap = base64.b64decode(content["normalizer"]["precompiled_charsmap"])
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def processor_seconds(work: Callable[[], object], warm: Callable[[], object] = lambda: None) -> float:
    """Processor time of one call of `work`, right after `warm`."""
    warm()
    began = time.process_time()
    work()
    return time.process_time() - began


def wall_seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def texts_of_length(sides: Sides, passages: Sequence[str], length: int, num_tokens: int) -> list[str]:
    """Consecutive stretches of `passages` of `length` tokens each, about `num_tokens` in all."""
    whole = " ".join(passages)
    # A tokenizer of its own finds them: those that are measured have not seen them.
    offsets = Tokenizer.from_str(sides.single.to_str()).encode(whole, add_special_tokens=False).offsets
    count = min(len(offsets), num_tokens) // length
    bounds = [offsets[i * length][0] for i in range(count)]
    return [whole[a:b] for a, b in zip(bounds, [*bounds[1:], offsets[count * length - 1][1]], strict=True)]


def one_by_one(sides: Sides, warm: list[str], texts: list[str]) -> dict[str, float]:
    """Processor seconds of a call for each text, right after calls for each of `warm`."""
    calls: dict[str, Callable[[str], object]] = {
        "ours": lambda text: sides.ours.encode([text]),
        "encode": lambda text: sides.single.encode(text).ids,
        "batch": lambda text: sides.batch.encode_batch_fast([text])[0].ids,
    }
    if sides.sentencepiece is not None:
        calls["sentencepiece"] = sides.sentencepiece.encode
    return {name: _seconds_of_each(call, warm, texts) for name, call in calls.items()}


def _seconds_of_each(call: Callable[[str], object], warm: list[str], texts: list[str]) -> float:
    for text in warm:
        call(text)
    return processor_seconds(lambda: [call(text) for text in texts])


def at_once(sides: Sides, warm: list[str], texts: list[str]) -> dict[str, float]:
    """Seconds of one call for all texts: of the processor with one thread, wall with all."""
    seconds = {
        "ours": processor_seconds(lambda: sides.ours.encode(texts), lambda: sides.ours.encode(warm)),
        "batch": processor_seconds(
            lambda: [e.ids for e in sides.batch.encode_batch_fast(texts)],
            lambda: sides.batch.encode_batch_fast(warm),
        ),
        "batch_warm": processor_seconds(lambda: [e.ids for e in sides.batch.encode_batch_fast(texts)]),
        "ours_all_threads": wall_seconds(lambda: sides.ours_all_threads.encode(texts)),
    }
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    work = lambda: [e.ids for e in sides.all_threads.encode_batch_fast(texts)]  # noqa: E731
    seconds["all_threads"] = wall_seconds(work)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sides.sentencepiece is not None:
        processor = sides.sentencepiece
        seconds["sentencepiece"] = processor_seconds(
            lambda: processor.encode(texts, num_threads=1), lambda: processor.encode(warm, num_threads=1)
        )
    return seconds


def pairs(sides: Sides, warm: list[str], query: str, documents: list[str]) -> dict[str, float]:
    """Processor seconds of one query with every document, each pair cut to the limit in its document."""
    template = Templates.read(sides.content, segments=False).pair
    first, between, last = template.pieces
    theirs = sides.pairs
    theirs.enable_truncation(MAX_LENGTH, strategy="only_second")
    found: list[list[list[int]]] = []

    def ours() -> None:
        (own,) = sides.ours.ids([query])
        prefix = [*first.ids, *own, *between.ids]
        room = MAX_LENGTH - len(prefix) - len(last.ids)
        frame = Frame(Side(prefix, [0] * len(prefix)), Side(last.ids, [0] * len(last.ids)), room=room)
        found.append(sides.ours.encode(documents, [frame]).lists())

    def library() -> None:
        encodings = theirs.encode_batch_fast([(query, document) for document in documents])
        found.append([encoding.ids for encoding in encodings])

    seconds = {
        "ours": processor_seconds(ours, lambda: sides.ours.encode(warm)),
        "batch": processor_seconds(library, lambda: theirs.encode_batch_fast([("", text) for text in warm])),
    }
    theirs.no_truncation()
    assert found[0] == found[1], "other ids than the library's"
    return seconds


def cut_early(sides: Sides, warm: list[str], texts: list[str]) -> dict[str, float]:
    """Processor seconds of texts of 4,096 tokens cut to 512: the library encodes all of each before."""
    frame = Frame(room=MAX_LENGTH)
    sides.batch.enable_truncation(MAX_LENGTH)
    work = lambda: sides.batch.encode_batch_fast(texts, add_special_tokens=False)  # noqa: E731
    seconds = {
        "ours": processor_seconds(lambda: sides.ours.encode(texts, [frame]), lambda: sides.ours.encode(warm)),
        "batch": processor_seconds(work, lambda: sides.batch.encode_batch_fast(warm)),
    }
    sides.batch.no_truncation()
    return seconds


def measure(sides: Sides, language: str, num_tokens: int) -> list[dict[str, Any]]:
    """All cases of one language."""
    xquad = Xquad.load(language)
    warm = list(xquad.passages[WARM])
    sides.warm(warm)
    documents = list(xquad.passages[BATCH])
    # Pairs first: their object of the library has not seen these passages either.
    question = xquad.questions[xquad.answers.index(BATCH.start)]
    rows = [
        {
            "language": language,
            "case": f"1 query x {NUM_PASSAGES}",
            "count": len(documents),
            **pairs(sides, warm, question, documents),
        },
        {
            "language": language,
            "case": f"{NUM_PASSAGES} passages",
            "count": len(documents),
            **at_once(sides, warm, documents),
        },
    ]
    passages = list(xquad.passages[LONG])
    for length in LENGTHS:
        share = len(passages) if length == LENGTHS[-1] else len(passages) // 6
        part, passages = passages[:share], passages[share:]
        texts = texts_of_length(sides, part, length, max(length, num_tokens))
        assert texts, f"{language}: no text of {length} tokens"
        rows.append(
            {
                "language": language,
                "case": f"1 x {length}",
                "count": len(texts),
                **one_by_one(sides, warm, texts),
            }
        )
    rows.append(
        {
            "language": language,
            "case": "4096 cut to 512",
            "count": len(texts),
            **cut_early(sides, warm, texts),
        }
    )
    for row in rows:
        row["ratios"] = ratios(row)
    return rows


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """How many times faster than each other side."""
    others = {name: seconds for name, seconds in row.items() if isinstance(seconds, float)}
    compared = {name: s / others["ours"] for name, s in others.items() if not name.startswith("ours")}
    if "all_threads" in compared:
        compared["all_threads"] = others["all_threads"] / others["ours_all_threads"]
    return {name: round(ratio, 1) for name, ratio in compared.items()}


def lowest(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The lowest ratio of each kind over all languages and cases."""
    plain = [row for row in rows if not row["case"].startswith(("1 query", "4096 cut"))]
    found = {
        name: min(row["ratios"][name] for row in plain if name in row["ratios"])
        for name in ("encode", "batch", "batch_warm", "all_threads", "sentencepiece")
        if any(name in row["ratios"] for row in plain)
    }
    found["pairs"] = min(row["ratios"]["batch"] for row in rows if row["case"].startswith("1 query"))
    return found


def markdown(measured: dict[str, list[dict[str, Any]]]) -> str:
    """The report: one table a file, and the lowest ratios against what was asked."""
    parts = ["# The compiled tokenizer: times faster, in one run", "", __doc__.split("\n\n")[2], ""]
    header = ("language, case", "us", "encode", "batch", "batch, seen", "all threads", "sentencepiece")
    for name, rows in measured.items():
        found = lowest(rows)
        lines = [
            (
                f"{row['language']}, {row['case']}",
                f"{1e6 * row['ours'] / row['count']:.1f}",
                *(
                    row["ratios"].get(kind, "")
                    for kind in ("encode", "batch", "batch_warm", "all_threads", "sentencepiece")
                ),
            )
            for row in rows
        ]
        summary = ", ".join(f"{kind} {ratio}x" for kind, ratio in found.items())
        parts += [f"## {name}", "", report.table(header, lines), "", f"Lowest: {summary}.", ""]
    parts += [
        "us: processor time of our side for one text of the case. encode: `Tokenizer.encode`. batch:"
        " `encode_batch_fast`, one thread, also for pairs. seen: the same texts once more, from its cache.",
        "",
    ]
    return "\n".join(parts)


def run(num_tokens: int, languages: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Measure every file."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    measured = {}
    for name, some in (("xlm-roberta", languages), ("minilm", ("en",)), ("qwen3", languages)):
        sides = Sides.load(name)
        measured[name] = [row for language in some for row in measure(sides, language, num_tokens)]
    return measured


def main() -> int:
    """Measure, print, write `results/tokenizers.json` and `.md`; 1 where a figure to reach is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer texts, three languages; nothing is written"
    )
    parser.add_argument("--share", action="store_true", help="the share of tokenization in requests instead")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    if args.share:
        return tokenizer_share.main(args.out)
    measured = run(2048 if args.quick else 8192, ("en", "th", "zh") if args.quick else LANGUAGES)
    content = markdown(measured)
    print(content)
    found = lowest(measured["xlm-roberta"])
    if not args.quick:
        report.write_json(
            "tokenizers", {"measured": measured, "lowest": found, "reach": REACH, "aim": AIM}, args.out
        )
        report.write_markdown("tokenizers", content, args.out)
    return int(any(found[name] < ratio for name, ratio in REACH.items()))


if __name__ == "__main__":
    sys.exit(main())
