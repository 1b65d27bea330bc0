"""Causal language models of transformers, called with `labels=`."""

from __future__ import annotations

from typing import Any

import transformers as hf
from torch import nn

from benchmarks.models.case import VOCABULARY, Case, padding, tokens

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2}  # grouped-query attention
HEADS_OF_16 = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _text(batch: int, length: int) -> dict[str, Any]:
    ids = tokens(batch, length)
    return {"input_ids": ids, "labels": ids}


def _padded(batch: int, length: int) -> dict[str, Any]:
    return _text(batch, length) | {"attention_mask": padding(batch, length)}


def _case(name: str, model: type[nn.Module], config: type[Any], sizes: dict[str, Any], **more: Any) -> Case:
    return Case(name, lambda: model(config(**sizes)), more.pop("inputs", _padded), **more)


CASES = (
    _case(
        "GPT-2",
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
        is_fast=True,
    ),
    _case("Llama", hf.LlamaForCausalLM, hf.LlamaConfig, GROUPED, is_fast=True),
    _case("Qwen3", hf.Qwen3ForCausalLM, hf.Qwen3Config, GROUPED | HEADS_OF_16, is_fast=True),
    _case("Mistral", hf.MistralForCausalLM, hf.MistralConfig, GROUPED | {"sliding_window": 8}),
    _case("Gemma", hf.GemmaForCausalLM, hf.GemmaConfig, GROUPED | HEADS_OF_16),
    _case("Gemma 3", hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, GROUPED | HEADS_OF_16 | {"sliding_window": 8}, is_fast=True),
    _case("Granite", hf.GraniteForCausalLM, hf.GraniteConfig, GROUPED),
    _case("Phi", hf.PhiForCausalLM, hf.PhiConfig, SMALL),
    _case("Phi-3", hf.Phi3ForCausalLM, hf.Phi3Config, GROUPED),
    _case("OPT", hf.OPTForCausalLM, hf.OPTConfig, SMALL | {"ffn_dim": 128, "word_embed_proj_dim": 64}, is_fast=True),
    _case(
        "Bloom",
        hf.BloomForCausalLM,
        hf.BloomConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        is_fast=True,
    ),
    _case("Falcon", hf.FalconForCausalLM, hf.FalconConfig, SMALL | {"num_ln_in_parallel_attn": 1}),
    _case("GPT-NeoX", hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, SMALL),
    _case(
        "Mamba",
        hf.MambaForCausalLM,
        hf.MambaConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
        inputs=_text,
        is_transformer=False,
        is_fast=True,
    ),
    _case("Mixtral", hf.MixtralForCausalLM, hf.MixtralConfig, GROUPED | LOCAL_EXPERTS, is_fast=True),
    _case("Qwen3-MoE", hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, GROUPED | HEADS_OF_16 | EXPERTS),
    _case(
        "Qwen3-MoE, router losses",
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        GROUPED | HEADS_OF_16 | EXPERTS | {"output_router_logits": True},
        is_fast=True,
    ),
    _case("GPT-OSS", hf.GptOssForCausalLM, hf.GptOssConfig, GROUPED | HEADS_OF_16 | LOCAL_EXPERTS, is_fast=True),
)
