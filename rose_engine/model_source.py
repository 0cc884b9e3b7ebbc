"""A model folder, understood: its family, what its files state, and the model they add up to.

Knows nothing of settings beyond the dtype and device that it is asked to build for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rose_engine.checkpoint import load_weights, weight_files
from rose_engine.errors import CheckpointError
from rose_engine.fingerprint import weights_hash
from rose_engine.heads.embedding import EmbeddingHead
from rose_engine.models.base import Family, Model, Trunk, TrunkFacts
from rose_engine.models.registry import find_family
from rose_engine.module_chain import ModuleChain, max_length
from rose_engine.settings_file import SettingsFile


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An embedding model's folder, read but for its weights."""

    folder: Path
    config: SettingsFile
    family: Family
    facts: TrunkFacts
    chain: ModuleChain
    dimensions: int  # D of a row
    max_length: int  # tokens of one sequence, special tokens included

    @classmethod
    def read(cls, folder: Path) -> ModelSource:
        """Raises `CheckpointError` when `folder` is not a model that the engine can serve."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not a folder")
        config = SettingsFile.read(folder / "config.json")
        family = find_family(config.required("model_type", str))
        facts = family.facts(config)
        chain = ModuleChain.read(folder, config)
        return cls(
            folder=folder,
            config=config,
            family=family,
            facts=facts,
            chain=chain,
            dimensions=chain.dimensions(facts.hidden_size),
            max_length=max_length(folder, facts.max_length),
        )

    def load(self, dtype: torch.dtype, device: torch.device) -> Model:
        """The model with its weights. Raises `CheckpointError` when they are not what the files say."""
        return Model(self._load_trunk(dtype, device), EmbeddingHead.load(self.chain, device), self.facts)

    def _load_trunk(self, dtype: torch.dtype, device: torch.device) -> Trunk:
        with torch.device("meta"):
            trunk = self.family.build(self.config, self.facts)
        load_weights(trunk, self.folder, self.family.weights, dtype, device)
        return trunk.eval()

    def weights_hash(self, dtype: torch.dtype) -> str:
        """16 hexadecimal digits, equal wherever equal ids give equal rows; not a matter of the folder."""
        folders = (self.folder, *(dense.folder for dense in self.chain.dense))
        files = [file for folder in folders for file in weight_files(folder)]
        return weights_hash(files, (str(dtype), *self.chain.facts()))

    @property
    def tokenizer_file(self) -> Path | None:
        """The folder's `tokenizer.json`, if it has one."""
        file = self.folder / "tokenizer.json"
        return file if file.is_file() else None
