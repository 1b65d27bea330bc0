"""Encoders and encoder-decoders of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from benchmarks.models.case import ENCODER_DECODER, VOCABULARY, Case, padding, tokens
from benchmarks.models.language import SMALL


def _masked(batch: int, length: int) -> dict[str, Any]:
    ids, labels = tokens(batch, length), tokens(batch, length)
    labels[:, ::2] = -100  # positions that are not predicted
    return {"input_ids": ids, "labels": labels, "attention_mask": padding(batch, length)}


def _classified(batch: int, length: int) -> dict[str, Any]:
    inputs = {"input_ids": tokens(batch, length), "attention_mask": padding(batch, length)}
    return inputs | {"labels": torch.randint(3, (batch,))}


def _translated(batch: int, length: int) -> dict[str, Any]:
    inputs = {"input_ids": tokens(batch, length), "attention_mask": padding(batch, length)}
    return inputs | {"labels": tokens(batch, length // 2)}


DEBERTA = SMALL | {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
ALBERT = SMALL | {"embedding_size": 32}
DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": 64,
    "hidden_dim": 128,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
BART = ENCODER_DECODER | {"max_position_embeddings": 64}

CASES = (
    Case("BERT", lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)), _masked, is_fast=True),
    Case("BERT classifier", lambda: hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=3)), _classified),
    Case("RoBERTa", lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL)), _masked),
    Case("ALBERT", lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**ALBERT)), _masked),
    Case("DistilBERT", lambda: hf.DistilBertForMaskedLM(hf.DistilBertConfig(**DISTILBERT)), _masked),
    Case("DeBERTa v2", lambda: hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**DEBERTA)), _masked, is_fast=True),
    Case("T5", lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), _translated, is_fast=True),
    Case("BART", lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)), _translated),
)
