"""pplx-embed: the Qwen3 trunk with every layer seeing the whole sequence; int8 rows by its own quantiser."""

from __future__ import annotations

import torch

from rose_engine.errors import EngineConfigError
from rose_engine.models.base import Family, TrunkFacts
from rose_engine.models.decoder_config import CAUSAL, FULL
from rose_engine.models.qwen3 import QWEN3_WEIGHTS, Qwen3Trunk, qwen3_facts
from rose_engine.settings_file import SettingsFile


class PplxTrunk(Qwen3Trunk):
    """A Qwen3 trunk that refuses float16."""

    def fill_buffers(self, device: torch.device) -> None:  # noqa: ARG002 - the loader's signature
        """Raises `EngineConfigError` when the weights were loaded in float16."""
        dtype = self.decoder.tokens.weight.dtype
        if dtype == torch.float16:
            raise EngineConfigError(
                "dtype: float16 overflows in pplx-embed models (rows become NaN); use bfloat16 or float32"
            )


def pplx_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a pplx-embed trunk; `use_bidirectional_attention` is true unless the file says otherwise."""
    bidirectional = config.optional("use_bidirectional_attention", bool, True)
    return qwen3_facts(config, FULL if bidirectional else CAUSAL)


FAMILY = Family(facts=pplx_facts, build=PplxTrunk, weights=QWEN3_WEIGHTS, quantizes=True)
