"""The compiled encoder against the library on many made texts: `python -m tests.ivy_gateway.fuzz_tokenizers`.

Every text is encoded alone and whole, cut at a random limit on a random side, and as the second of a pair
with a random limit; the reference is the library's ids, cut and framed by `ivy_gateway.truncation`. Writes
`fuzz.json` and `fuzz.md` beside the benchmarks' results. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.tokenizer_files import read_content
from ivy_gateway import framing
from ivy_gateway.compiled_tokenizer import byte_letters
from ivy_gateway.compiled_tokenizer.encoder import FastEncoder, fast_encoder
from ivy_gateway.jobs import EncodedInput
from ivy_gateway.special_tokens import Json, Template, Templates, literal_form
from ivy_gateway.templates import Prompt
from ivy_gateway.truncation import Cut, PairLimits, fit_pair, fit_text
from tests.ivy_gateway.byte_pipelines import in_pipeline
from tests.ivy_gateway.fuzz_texts import TextMaker, passages

ROOT = Path(__file__).resolve().parent.parent.parent
# The last ones are Qwen3's vocabulary in the pipelines of other files.
FILES = (
    "xlm-roberta", "xlm-roberta-converter", "flan-t5", "minilm", "qwen3",
    "qwen3-gpt2", "qwen3-roberta", "qwen3-modernbert", "qwen3-qwen35", "qwen3-llama3",
)  # fmt: skip
_BATCH = 1000
_MAX_SHOWN = 5


def ids_by_threads(encoder: FastEncoder, texts: list[str], num_threads: int) -> list[list[list[int]]]:
    """The ids of all texts, as each of so many threads gets them from one encoder at once."""
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(encoder.ids(texts))) for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@dataclass
class Outcome:
    """What one tokenizer in one mode came to."""

    file: str
    mode: str
    seed: int
    texts: int = 0
    truncated: int = 0
    pairs: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    def count(self, texts: Sequence[str], ours: Sequence[object], theirs: Sequence[object]) -> None:
        """Compare text by text."""
        for text, one, other in zip(texts, ours, theirs, strict=True):
            if one != other:
                self.mismatches += 1
                self.examples += [ascii(text)[:200]] * (len(self.examples) < _MAX_SHOWN)


@dataclass
class Subject:
    """A tokenizer in both hands."""

    encoder: FastEncoder
    library: Tokenizer
    templates: Templates
    content: Json

    @classmethod
    def load(cls, shared: Path, name: str, *, literal: bool) -> Subject:
        file, _, pipeline = name.partition("-") if name.startswith("qwen3") else (name, "", "")
        content = read_content(shared, file)
        if pipeline:
            content = in_pipeline(content, pipeline)
        library = Tokenizer.from_str(json.dumps(literal_form(content) if literal else content))
        return cls(fast_encoder(library, 1), library, Templates.read(content, name == "minilm"), content)

    def texts(self, seed: int, shared: Path) -> TextMaker:
        vocab = self.content["model"]["vocab"]
        pieces = list(vocab) if isinstance(vocab, dict) else [piece for piece, _ in vocab]
        if self.content["model"]["type"] == "BPE":
            pieces = byte_letters.texts_of(pieces)
        specials = [token["content"] for token in self.content["added_tokens"]]
        return TextMaker(seed, pieces, specials, passages(shared / "data" / "xquad"))

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The library's."""
        return [e.ids for e in self.library.encode_batch_fast(texts, add_special_tokens=False)]


def compare(subject: Subject, texts: list[str], chance: random.Random, outcome: Outcome) -> None:
    """One batch: whole texts, cut texts, and pairs."""
    ids = subject.ids(texts)
    outcome.count(texts, subject.encoder.ids(texts), ids)
    _compare_cut(subject.encoder, texts, ids, subject.templates.single, chance, outcome)
    _compare_pairs(subject.encoder, texts, ids, subject.templates.pair, chance, outcome)
    outcome.texts += len(texts)
    outcome.truncated += len(texts)
    outcome.pairs += len(texts)


def _random_cut(template: Template, chance: random.Random) -> Cut:
    limit = template.num_special + int(chance.triangular(1, 120, 8))
    return Cut(chance.random() < 0.9, limit, chance.choice(("right", "right", "left")))


def _compare_cut(
    encoder: FastEncoder,
    texts: list[str],
    ids: list[list[int]],
    template: Template,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    for some in _batches(len(texts)):
        cut = _random_cut(template, chance)
        part = [texts[i] for i in some]
        ours = framing.encode_texts(encoder, part, [Prompt(i, texts[i]) for i in some], template, cut)
        theirs = [fit_text(i, ids[i], template, cut) for i in some]
        outcome.count(part, *_plain(ours, theirs))


def _compare_pairs(
    encoder: FastEncoder,
    texts: list[str],
    ids: list[list[int]],
    template: Template,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    known = dict(zip(texts, ids, strict=True))
    for some in _batches(len(texts)):
        cut = _random_cut(template, chance)
        cut = dataclasses.replace(cut, limit=cut.limit + 12)
        limits = PairLimits(8, chance.choice((7, 40, 512)))
        prompts = [Prompt(i, texts[some[i % 3]], texts[i]) for i in some]
        part = [texts[i] for i in some]
        ours = framing.encode_documents(encoder, part, prompts, known, template, cut, limits, "query")
        theirs = [
            fit_pair(p.index, known[p.text], ids[p.index], template, cut, limits, "query") for p in prompts
        ]
        outcome.count(part, *_plain(ours, theirs))


def _batches(size: int) -> list[list[int]]:
    return [list(range(start, min(start + 50, size))) for start in range(0, size, 50)]


def _plain(*sides: list[EncodedInput]) -> list[list[object]]:
    return [
        [
            (e.index, e.token_ids.tolist(), e.segment_ids is not None and e.segment_ids.tolist(), e.truncated)
            for e in side
        ]
        for side in sides
    ]


def fuzz(
    shared: Path, name: str, *, literal: bool, seed: int, num_texts: int, report: Callable[[str], None]
) -> Outcome:
    """Compare on `num_texts` texts made from `seed`."""
    outcome = Outcome(name, "literal" if literal else "parity", seed)
    report(f"{name}, {outcome.mode}: seed {seed}")
    subject = Subject.load(shared, name, literal=literal)
    maker, chance = subject.texts(seed, shared), random.Random(seed)
    start = time.perf_counter()
    while outcome.texts < num_texts:
        texts = list(itertools.islice(maker, min(_BATCH, num_texts - outcome.texts)))
        compare(subject, texts, chance, outcome)
    outcome.seconds = round(time.perf_counter() - start, 1)
    report(f"{name}, {outcome.mode}: {outcome.mismatches} mismatches in {outcome.texts} texts")
    return outcome


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The report."""
    rows = [
        f"| {o.file} | {o.mode} | {o.seed} | {o.texts:,} | {o.truncated:,} | {o.pairs:,} | {o.mismatches} |"
        for o in outcomes
    ]
    return "\n".join(
        [
            "# The compiled encoder against the library",
            "",
            f"`make fuzz`, `tokenizers` {_version()}: texts made from each seed, compared in every id.",
            "",
            "| file | mode | seed | texts | cut texts | pairs | mismatches |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            *("" for _ in outcomes[:1]),
        ]
    )


def _version() -> str:
    import tokenizers

    return tokenizers.__version__


def main() -> int:
    """Run, print seeds and outcomes, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=100_000, help="for each file and mode")
    parser.add_argument("--seed", type=int, default=None, help="of the first run; default: a fresh one")
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    runs = [(name, literal) for name in args.files for literal in (True, False)]
    outcomes = []
    for offset, (name, literal) in enumerate(runs):
        outcomes.append(
            fuzz(args.shared, name, literal=literal, seed=seed + offset, num_texts=args.texts, report=_say)
        )
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "fuzz.json").write_text(
            json.dumps([dataclasses.asdict(o) for o in outcomes], indent=1) + "\n"
        )
        (args.out / "fuzz.md").write_text(markdown(outcomes))
    return int(any(o.mismatches for o in outcomes))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
