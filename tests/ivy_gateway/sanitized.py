"""The encoder by itself, under the address and undefined-behaviour sanitizers: `make sanitize`.

Builds `ivy_gateway/compiled_tokenizer/checks` with clang, writes each tokenizer and a corpus of made texts
with the library's ids into files, runs the corpus, then libFuzzer for some seconds. Exit status 1 where any
fails.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import secrets
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ivy_gateway.compiled_tokenizer import bert_characters, pipelines
from ivy_gateway.special_tokens import Json
from tests.ivy_gateway.fuzz_tokenizers import FILES, ROOT, Subject

SOURCES = ROOT / "ivy_gateway" / "unigram"


def string(text: str | bytes) -> bytes:
    """A count and bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(raw)) + raw


def counted(parts: Iterable[bytes]) -> bytes:
    """A count and what it counts."""
    parts = list(parts)
    return struct.pack("<I", len(parts)) + b"".join(parts)


def added_tokens(tokens: Iterable[tuple[str, int, bool, bool]]) -> bytes:
    """A list of added tokens."""
    return counted(string(content) + struct.pack("<iBB", *rest) for content, *rest in tokens)


def byte_bpe_file(content: Json) -> bytes:
    """A byte-level BPE tokenizer."""
    options = pipelines.byte_bpe_options(content)
    flags = (options["ignores_merges"], options["adds_space"], options["cl100k"], options["max_digits"])
    ranges = (options["letters"], options["numbers"], options["white_space"])
    parts, marks, pairs = options["form_c"] or ([], [], [])
    form_c = b"".join(
        (
            counted(struct.pack("<I", c) + string(some) for c, some in parts),
            counted(struct.pack("<IB", *mark) for mark in marks),
            counted(struct.pack("<III", *pair) for pair in pairs),
        )
    )
    return b"".join(
        (
            struct.pack("<BBBBI", 2, *flags),
            *(counted(struct.pack("<II", *ends) for ends in some) for some in ranges),
            b"\1" + form_c if options["form_c"] else b"\0",
            added_tokens(options["added_tokens"]),
            added_tokens(options["normalized_tokens"]),
            counted(struct.pack("<iii", *rule) for rule in options["merges"].tolist()),
            counted(string(piece) + struct.pack("<i", i) for piece, i in options["pieces"]),
        )
    )


def model_file(content: Json) -> bytes:
    """The tokenizer, from the library's own description, as `checks/model_file.hpp` reads it."""
    model = content["model"]
    if model["type"] == "BPE":
        return byte_bpe_file(content)
    added = added_tokens((t["content"], t["id"], t["lstrip"], t["rstrip"]) for t in content["added_tokens"])
    if model["type"] == "Unigram":
        stages = content["normalizer"].get("normalizers", [content["normalizer"]])
        splits = "WhitespaceSplit" in json.dumps(content["pre_tokenizer"])
        pieces = counted(string(piece) + struct.pack("<d", score) for piece, score in model["vocab"])
        charsmap = string(base64.b64decode(stages[0]["precompiled_charsmap"]))
        return struct.pack("<BiBB", 0, model["unk_id"], splits, len(stages) == 2) + charsmap + added + pieces
    characters = bert_characters.of(json.dumps(content["normalizer"], sort_keys=True))
    names = (
        model["continuing_subword_prefix"],
        characters.isolated,
        characters.punctuation,
        characters.reordering,
    )
    unknown = model["vocab"][model["unk_token"]]
    return b"".join(
        (
            struct.pack("<BiI", 1, unknown, model["max_input_chars_per_word"]),
            *map(string, names),
            added,
            counted(struct.pack("<II", *ends) for ends in characters.removed),
            counted(struct.pack("<I", ord(c)) + string(text) for c, text in characters.normalized),
            counted(string(piece) + struct.pack("<i", i) for piece, i in model["vocab"].items()),
        )
    )


def corpus_file(texts: list[str], ids: list[list[int]]) -> bytes:
    """Texts with the library's ids."""
    return b"".join(
        string(text) + counted(struct.pack("<i", i) for i in own)
        for text, own in zip(texts, ids, strict=True)
    )


def build(folder: Path, compiler: str) -> None:
    """Configure and compile the checks."""
    options = [
        "-DIVY_CHECKS=ON",
        "-DIVY_STRICT=ON",
        "-DCMAKE_BUILD_TYPE=None",
        f"-DCMAKE_CXX_COMPILER={compiler}",
    ]
    subprocess.run(["cmake", "-S", SOURCES, "-B", folder, *options], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "corpus", "fuzzer", "-j2"], check=True)


def check(binaries: Path, folder: Path, subject: Subject, seed: int, args: argparse.Namespace) -> bool:
    """One tokenizer: its corpus, then libFuzzer, starting from texts of the corpus."""
    texts = list(itertools.islice(subject.texts(seed, args.shared), args.texts))
    model, corpus, seeds = folder / "model", folder / "corpus", folder / "seeds"
    model.write_bytes(model_file(json.loads(subject.library.to_str())))
    corpus.write_bytes(corpus_file(texts, subject.ids(texts)))
    seeds.mkdir()
    for number, text in enumerate(texts[:200]):
        (seeds / str(number)).write_bytes(text.encode()[:2000])
    runs = [
        [binaries / "corpus", model, corpus],
        [binaries / "fuzzer", f"-max_total_time={args.fuzz_seconds}", "-print_final_stats=1", "-max_len=4096",
         f"-artifact_prefix={folder}/", seeds],
    ]  # fmt: skip
    environment = {**os.environ, "IVY_FUZZ_MODEL": str(model)}
    return all(subprocess.run(run, env=environment, check=False).returncode == 0 for run in runs)


def main() -> int:
    """Build, then check every file in both modes (libFuzzer's time is shared among them)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", default="clang++")
    parser.add_argument("--fuzz-seconds", type=int, default=60, help="of libFuzzer, for each file")
    parser.add_argument("--texts", type=int, default=3000, help="in the corpus of each file and mode")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    args = parser.parse_args()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    failed = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        build(scratch / "build", args.compiler)
        for file, literal in itertools.product(args.files, (True, False)):
            sys.stdout.write(f"{file}, {'literal' if literal else 'parity'}: seed {seed}\n")
            sys.stdout.flush()
            folder = scratch / f"{file}-{literal}"
            folder.mkdir()
            subject = Subject.load(args.shared, file, literal=literal)
            failed += [file] * (not check(scratch / "build", folder, subject, seed, args))
    sys.stdout.write(f"failed: {failed}\n" if failed else "nothing found\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
