"""The table of supported families in `models.md`, read off the engine's registry and the parity tests.

    python -m docs.support_table           # write it
    python -m docs.support_table --check   # status 1 when the file says something else

A family's windows are those of the default configuration that transformers has for it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from rose_engine.attention.base import AttentionSpec
from rose_engine.config import DTYPES
from rose_engine.errors import EngineConfigError
from rose_engine.models.base import Family
from rose_engine.models.registry import FAMILY_MODULES, find_family
from rose_engine.score_spec import CLASSIFIERS
from rose_engine.settings_file import SettingsFile

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- support table: python -m docs.support_table -->\n", "<!-- end of support table -->\n"
HEADER = (
    "family",
    "`model_type`",
    "embedding",
    "reranking",
    "dtypes",
    "attention windows",
    "parity test",
    "against",
)

# Types that transformers has no configuration of its own for, and the one that their files follow.
_CONFIGURED_AS = {"bidirectional_pplx_qwen3": "qwen3", "new": "gte"}
# What published checkpoints state and transformers' defaults do not, where a family needs it.
_PUBLISHED_KEYS = {
    "deberta-v2": {
        "relative_attention": True,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "norm_rel_ebd": "layer_norm",
    }
}
_PARITY_TESTS = {"bert": "tests/rose_engine/test_bert.py"}  # others: tests/models/test_parity_<module>.py


@dataclass(frozen=True, slots=True)
class SupportedFamily:
    """One module of `rose_engine.models` and the `model_type`s that it serves."""

    module: str
    model_types: tuple[str, ...]

    @property
    def family(self) -> Family:
        """The registry's entry."""
        return find_family(self.model_types[0])

    @property
    def title(self) -> str:
        """The first words of the module's docstring."""
        text = importlib.import_module(f"rose_engine.models.{self.module}").__doc__ or ""
        return text.partition(":")[0]

    @property
    def embedding(self) -> str:
        """Every family embeds; one also rounds its rows."""
        return "yes, and int8 or binary" if self.family.quantizes else "yes"

    @property
    def reranking(self) -> str:
        """Whether a classification head is known; a decoder's can also be asked for one word or another."""
        if not all(model_type in CLASSIFIERS for model_type in self.model_types):
            return "no"
        pooling = CLASSIFIERS[self.model_types[0]](self.config).pooling
        return "classifier, yes / no" if pooling == "lasttoken" else "classifier"

    @property
    def config(self) -> SettingsFile:
        """transformers' default configuration, as published checkpoints complete it."""
        model_type = self.model_types[-1]
        default = AutoConfig.for_model(_CONFIGURED_AS.get(model_type, model_type)).to_dict()
        return SettingsFile(Path("config.json"), default | _PUBLISHED_KEYS.get(model_type, {}))

    @property
    def dtypes(self) -> str:
        """Those that the trunk does not refuse."""
        return ", ".join(name for name, dtype in DTYPES.items() if not self._refuses(dtype))

    def _refuses(self, dtype: torch.dtype) -> bool:
        """Whether the trunk, on the meta device, refuses weights of `dtype`."""
        family, config = self.family, self.config
        with torch.device("meta"):
            trunk = family.build(config, family.facts(config)).to(dtype)
        try:
            getattr(trunk, "fill_buffers", lambda _: None)(torch.device("meta"))
        except EngineConfigError:
            return True
        return False

    @property
    def windows(self) -> str:
        """Of its layers, each distinct one once."""
        return "; ".join(describe_window(spec) for spec in self.family.facts(self.config).attention_specs)

    @property
    def parity_test(self) -> Path:
        """Relative to the repository."""
        return Path(_PARITY_TESTS.get(self.module, f"tests/models/test_parity_{self.module}.py"))

    @property
    def reference_classes(self) -> Iterator[str]:
        """transformers' models that the parity test imports."""
        for node in ast.walk(ast.parse((ROOT / self.parity_test).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "transformers":
                yield from (f"`{name.name}`" for name in node.names if _is_model(name.name))

    def cells(self) -> tuple[str, ...]:
        """One row of the table, under `HEADER`."""
        types = ", ".join(f"`{model_type}`" for model_type in self.model_types)
        test = f"[{self.parity_test.name}](../{self.parity_test})"
        against = ", ".join(self.reference_classes)
        return self.title, types, self.embedding, self.reranking, self.dtypes, self.windows, test, against


def supported_families() -> list[SupportedFamily]:
    """Every family of the registry, by title."""
    modules = sorted(set(FAMILY_MODULES.values()))
    served = ((module, tuple(t for t, m in FAMILY_MODULES.items() if m == module)) for module in modules)
    return sorted((SupportedFamily(*entry) for entry in served), key=lambda entry: entry.title.lower())


def _is_model(name: str) -> bool:
    return name.endswith("Model") and name != "PreTrainedModel"


def describe_window(spec: AttentionSpec) -> str:
    """Which tokens one token sees, in words."""
    left, right = spec.window
    if spec.full:
        words = "all"
    elif spec.causal:
        words = "causal"
    elif right == 0:
        words = f"causal, {left + 1} tokens"
    else:
        words = f"{left} before, {right} after"
    return f"{words}, with bias" if spec.biased else words


def pinned_transformers() -> str:
    """The version in `constraints.txt`: what the parity tests run against."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith("transformers=="))


def table() -> str:
    """The table in Markdown, and which transformers it was compared with."""
    rule = ("---",) * len(HEADER)
    rows = (HEADER, rule, *(entry.cells() for entry in supported_families()))
    lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{lines}\n\nParity is tested against transformers {pinned_transformers()}.\n"


def updated(page: str) -> str:
    """`page` with the table as it should be, between its two markers."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    assert start, f"{PAGE.name} lacks the line {START}"
    assert end, f"{PAGE.name} lacks the line {END}"
    return f"{before}{START}{table()}{END}{after}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the table of supported families.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when it is stale")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    new_page = updated(page)
    if check and new_page != page:
        sys.exit(f"{PAGE.name} is stale: run python -m docs.support_table")
    PAGE.write_text(new_page, encoding="utf-8")


if __name__ == "__main__":
    main()
