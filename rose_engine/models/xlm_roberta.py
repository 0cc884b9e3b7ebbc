"""XLM-RoBERTa, RoBERTa, CamemBERT: BERT's trunk with positions that start behind the padding index."""

from __future__ import annotations

from dataclasses import replace

from rose_engine.checkpoint import WeightRules
from rose_engine.models.base import Family, TrunkFacts
from rose_engine.models.bert import BERT_FUSED, BERT_IGNORABLE, BERT_RENAMES, BertTrunk, bert_facts
from rose_engine.settings_file import SettingsFile

DEFAULT_PAD_TOKEN_ID = 1


def xlm_roberta_facts(config: SettingsFile) -> TrunkFacts:
    """BERT's facts; a sequence's first token has position `pad_token_id + 1`, and there is one segment."""
    pad_token_id = config.optional("pad_token_id", int, DEFAULT_PAD_TOKEN_ID)
    facts = bert_facts(config, position_offset=pad_token_id + 1)
    return replace(facts, num_segments=config.optional("type_vocab_size", int, 1))


FAMILY = Family(
    facts=xlm_roberta_facts,
    build=BertTrunk,
    weights=WeightRules(
        renames=((r"^roberta\.", ""), *BERT_RENAMES),
        fused=BERT_FUSED,
        ignorable=(*BERT_IGNORABLE, "lm_head.*"),
    ),
)
