"""Small models of every kind that the cases name, with seeded random weights, and the reference beside each.

A kind is a folder that any server loads, and the same model in transformers: float32, eager, one sequence at
a time, with ids made by the model's own tokenizer file. Widths of 64 and two layers: what is compared is
arithmetic, not meaning.
"""

from __future__ import annotations

import functools
import json
import lzma
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel, TemplateProcessing
from tokenizers.processors import Sequence as Processors
from transformers import PreTrainedModel

from tests.models.parity import randomize

WIDTH = 64
ENCODER = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 151_669}
LIMIT = 512

# What the card of Qwen3-Reranker puts around an instruction, a query and a document.
HEADER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
BODY = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
NO, YES = 2152, 9693


# Tokenizers.


@functools.cache
def literal(file: Path) -> Tokenizer:
    """The tokenizer under which a text spells no control token: policy P2, from its own words."""
    content = json.loads(file.read_bytes()) | {"truncation": None, "padding": None}
    model = content["model"]
    if model["type"] == "Unigram":
        spellings = {token["content"] for token in content["added_tokens"]}
        for i, piece in enumerate(model["vocab"]):
            if piece[0] in spellings and i != model["unk_id"]:
                piece[0] = f" \uffff{i} "
    return Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))


@functools.cache
def plain(file: Path) -> Tokenizer:
    """The tokenizer as its file says, but for truncation and padding."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def unpack(shared: Path, name: str, folder: Path) -> Path:
    """Write the shared tokenizer `name` into `folder`; its path."""
    packed = shared / "tokenizers" / name / "tokenizer.json.xz"
    file = folder / "tokenizer.json"
    file.write_bytes(lzma.decompress(packed.read_bytes()))
    return file


def word_pieces(minilm: Path, folder: Path) -> None:
    """The bundled model's tokenizer files."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, folder)


# References.


@dataclass(frozen=True)
class Embedder:
    """A folder and its reference. `pooling` is "mean" or "lasttoken"; vectors have norm 1."""

    folder: Path
    model: PreTrainedModel
    limit: int
    pooling: str

    def ids(self, text: str) -> list[int]:
        """Ids of `text`, literally, cut to the limit; what the template puts behind the text survives."""
        tokenizer = literal(self.folder / "tokenizer.json")
        whole, own = tokenizer.encode(text).ids, tokenizer.encode(text, add_special_tokens=False).ids
        num_special = len(whole) - len(own)
        if len(whole) <= self.limit:
            return whole
        behind = num_special - (1 if num_special > 1 else 0)
        return whole[: self.limit - behind] + whole[len(whole) - behind :]

    def states(self, ids: Sequence[int]) -> np.ndarray:
        """Hidden states of ready ids, `[T, D]`."""
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor(ids)[None]).last_hidden_state[0].numpy()

    def raw(self, ids: Sequence[int]) -> np.ndarray:
        """The pooled row of ready ids, not normalised."""
        states_TD = self.states(ids)
        return states_TD.mean(axis=0) if self.pooling == "mean" else states_TD[-1]

    def embed(self, *texts: str) -> np.ndarray:
        """Unit rows of texts, `[N, D]`."""
        rows = torch.from_numpy(np.stack([self.raw(self.ids(text)) for text in texts]))
        return F.normalize(rows, dim=-1).numpy()


@dataclass(frozen=True)
class CrossEncoder:
    """A folder and its reference, for pairs."""

    folder: Path
    model: PreTrainedModel

    def logits(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """One logit for each document, uncut."""
        tokenizer = literal(self.folder / "tokenizer.json")
        segmented = getattr(self.model.config, "type_vocab_size", 1) > 1
        found = []
        for document in documents:
            pair = tokenizer.encode(query, document)
            inputs = {"input_ids": torch.tensor(pair.ids)[None]}
            if segmented:
                inputs["token_type_ids"] = torch.tensor(pair.type_ids)[None]
            with torch.inference_mode():
                found.append(self.model(**inputs).logits.item())
        return np.array(found, np.float32)


@dataclass(frozen=True)
class YesNoReranker:
    """A folder and its reference: a language model that is asked for yes or no."""

    folder: Path
    model: PreTrainedModel

    def probability(self, query: str, document: str, instruction: str = INSTRUCTION) -> float:
        """Of yes against no, as the model card computes it, the users' words being words."""
        file = self.folder / "tokenizer.json"
        control, words = plain(file), literal(file)
        body = words.encode(BODY.format(instruction, query, document)).ids
        ids = [*control.encode(HEADER).ids, *body, *control.encode(SUFFIX).ids]
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor(ids)[None]).logits[0, -1]
        return logits[[NO, YES]].softmax(dim=0)[1].item()


# Folders.


def _write(model: PreTrainedModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)


_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))


def _write_sentence_transformer(
    model: PreTrainedModel,
    folder: Path,
    pooling: str,
    limit: int,
    *,
    normalize: bool = True,
    **text_settings: object,
) -> None:
    _write(model, folder)
    kinds = _MODULES if normalize else _MODULES[:-1]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    settings = {
        "modules.json": modules,
        "1_Pooling/config.json": {f"pooling_mode_{pooling}": True},
        "sentence_bert_config.json": {"max_seq_length": limit, "do_lower_case": False} | text_settings,
    }
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content))


def encoder(folder: Path, minilm: Path, limit: int = LIMIT, **text_settings: object) -> Embedder:
    """E: BERT, mean pooling. `text_settings` go into the sentence-transformers file."""
    config = transformers.BertConfig(**ENCODER, max_position_embeddings=LIMIT)
    model = randomize(transformers.BertModel(config, add_pooling_layer=False))
    _write_sentence_transformer(model, folder, "mean_tokens", limit, **text_settings)
    word_pieces(minilm, folder)
    return Embedder(folder, model, limit, "mean")


def decoder(folder: Path, shared: Path, limit: int = LIMIT) -> Embedder:
    """D: Qwen3, last token; the tokenizer's template appends the end token."""
    config = transformers.Qwen3Config(
        **DECODER, max_position_embeddings=32_768, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
    )
    model = randomize(transformers.Qwen3Model(config))
    _write_sentence_transformer(model, folder, "lasttoken", limit)
    tokenizer = Tokenizer.from_file(str(unpack(shared, "qwen3", folder)))
    end = TemplateProcessing(
        single="$A <|endoftext|>",
        pair="$A $B:1 <|endoftext|>:1",
        special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))],
    )
    tokenizer.post_processor = Processors([ByteLevel(trim_offsets=False), end])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Embedder(folder, model, limit, "lasttoken")


def xlm_cross_encoder(folder: Path, shared: Path) -> CrossEncoder:
    """X: XLM-RoBERTa's kind, 512 positions behind the padding index; logits for which sigmoid is 1."""
    config = transformers.XLMRobertaConfig(
        **ENCODER,
        vocab_size=250_002,
        max_position_embeddings=LIMIT + 2,
        type_vocab_size=1,
        num_labels=1,
        pad_token_id=1,
    )
    model = randomize(transformers.XLMRobertaForSequenceClassification(config))
    model.classifier.out_proj.weight.data *= 100
    model.classifier.out_proj.bias.data += 60
    _write(model, folder)
    unpack(shared, "xlm-roberta", folder)
    return CrossEncoder(folder, model)


def bert_cross_encoder(folder: Path, minilm: Path) -> CrossEncoder:
    """B: BERT's kind, two segments, one logit."""
    config = transformers.BertConfig(**ENCODER, max_position_embeddings=LIMIT, num_labels=1)
    model = randomize(transformers.BertForSequenceClassification(config))
    model.bert.embeddings.token_type_embeddings.weight.data *= 10  # so that a wrong segment shows
    _write(model, folder)
    word_pieces(minilm, folder)
    return CrossEncoder(folder, model)


def yes_no_reranker(folder: Path, shared: Path) -> YesNoReranker:
    """Y: Qwen3's kind, as first published: nothing in its files says that it is a reranker."""
    config = transformers.Qwen3Config(**DECODER, max_position_embeddings=1024, tie_word_embeddings=True)
    model = randomize(transformers.Qwen3ForCausalLM(config))
    model.model.embed_tokens.weight.data *= 4  # so that logits are far from zero
    _write(model, folder)
    unpack(shared, "qwen3", folder)
    return YesNoReranker(folder, model)


MATRYOSHKA = (1, 16, 128, 256)


def matryoshka(folder: Path, minilm: Path) -> Embedder:
    """M: BERT of width 256 whose files promise shorter vectors and do not normalise."""
    config = transformers.BertConfig(
        **ENCODER | {"hidden_size": MATRYOSHKA[-1]}, max_position_embeddings=LIMIT
    )
    model = randomize(transformers.BertModel(config, add_pooling_layer=False))
    model.config.matryoshka_dimensions = list(MATRYOSHKA)
    _write_sentence_transformer(model, folder, "mean_tokens", LIMIT, normalize=False)
    word_pieces(minilm, folder)
    return Embedder(folder, model, LIMIT, "mean")


def sliding_window(folder: Path, minilm: Path) -> Embedder:
    """W: ModernBERT's kind, one layer full and one local."""
    special = {"pad_token_id": 0, "bos_token_id": 101, "cls_token_id": 101, "eos_token_id": 102}
    config = transformers.ModernBertConfig(
        **ENCODER | special,
        sep_token_id=102,
        vocab_size=30_522,
        max_position_embeddings=LIMIT,
        local_attention=32,
        layer_types=["full_attention", "sliding_attention"],
        _attn_implementation="eager",
    )
    model = randomize(transformers.ModernBertModel(config))
    _write_sentence_transformer(model, folder, "mean_tokens", LIMIT)
    word_pieces(minilm, folder)
    return Embedder(folder, model, LIMIT, "mean")
