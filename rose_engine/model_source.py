"""A model folder, understood: its family, what its files state, and the model they add up to.

Knows nothing of settings beyond the dtype and device that it is asked to build for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rose_engine.checkpoint import WeightRules, load_weights, weight_files, weightless
from rose_engine.errors import CheckpointError
from rose_engine.fingerprint import weights_hash
from rose_engine.heads.embedding import EmbeddingHead
from rose_engine.heads.scoring import ScoringHead
from rose_engine.models.base import Family, Head, Model, Trunk, TrunkFacts
from rose_engine.models.registry import find_family
from rose_engine.module_chain import ModuleChain, max_length
from rose_engine.score_spec import ScoreSpec, read_score_spec
from rose_engine.settings_file import SettingsFile

# Keys of `config.json` that move no vector: where the file came from, and what other programs do with it.
_INDECISIVE_KEYS = ("_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's folder, read but for its weights."""

    folder: Path
    config: SettingsFile
    family: Family
    facts: TrunkFacts
    chain: ModuleChain  # of a scorer: only the pooling that its head starts with
    scoring: ScoreSpec | None  # None: the model embeds
    dimensions: int  # D of a row: labels of a scorer
    max_length: int  # tokens of one sequence, special tokens included

    @classmethod
    def read(cls, folder: Path, task: str = "auto") -> ModelSource:
        """Read `folder` as a model for `task`: "embed", "score", or "auto" for what its files say.

        Raises `CheckpointError` when it is not a model that the engine can serve.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not a folder")
        config = SettingsFile.read(folder / "config.json")
        family_name = config.required("model_type", str)
        family = find_family(family_name)
        facts = family.facts(config)
        scoring = read_score_spec(folder, config, task)
        chain = ModuleChain((scoring.pooling,)) if scoring else ModuleChain.read(folder, config)
        if chain.quantize and not family.quantizes:
            raise CheckpointError(f"{folder}: modules.json quantises, which {family_name} models do not")
        return cls(
            folder=folder,
            config=config,
            family=family,
            facts=facts,
            chain=chain,
            scoring=scoring,
            dimensions=scoring.num_labels if scoring else chain.dimensions(facts.hidden_size),
            max_length=max_length(folder, facts.max_length),
        )

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        before_weights: Callable[[Trunk], None] = lambda _: None,
    ) -> Model:
        """The model with its weights; `before_weights` gets the trunk while it is still without them.

        Raises `CheckpointError` when they are not what the files say.
        """
        with weightless():
            trunk = self.family.build(self.config, self.facts)
        before_weights(trunk)
        return Model(self._filled(trunk, dtype, device), self._load_head(device), self.facts)

    def _filled(self, trunk: Trunk, dtype: torch.dtype, device: torch.device) -> Trunk:
        load_weights(trunk, self.folder, self._trunk_rules(), dtype, device)
        return trunk.eval()

    def _trunk_rules(self) -> WeightRules:
        rules = self.family.weights
        if self.scoring is None:
            return rules
        return replace(rules, ignorable=(*rules.ignorable, *self.scoring.not_the_trunks))

    def _load_head(self, device: torch.device) -> Head:
        if self.scoring is None:
            return EmbeddingHead.load(self.chain, device)
        return ScoringHead.load(self.scoring, self.facts.hidden_size, self.folder, device)

    @property
    def task(self) -> str:
        """What its rows are: "embed" or "score"."""
        return "embed" if self.scoring is None else "score"

    def weights_hash(self, dtype: torch.dtype) -> str:
        """16 hexadecimal digits, equal wherever equal ids give equal rows; not a matter of the folder."""
        folders = (self.folder, *(dense.folder for dense in self.chain.dense))
        files = [file for folder in folders for file in weight_files(folder)]
        return weights_hash(files, (str(dtype), *self._head_facts(), _decisive(self.config)))

    def _head_facts(self) -> tuple[str, ...]:
        return self.chain.facts() if self.scoring is None else self.scoring.facts()

    @property
    def tokenizer_file(self) -> Path | None:
        """The folder's `tokenizer.json`, if it has one."""
        file = self.folder / "tokenizer.json"
        return file if file.is_file() else None


def _decisive(config: SettingsFile) -> str:
    """What of `config.json` may move vectors, spelled in one way."""
    decisive = {key: value for key, value in config.values.items() if key not in _INDECISIVE_KEYS}
    return json.dumps(decisive, sort_keys=True)
