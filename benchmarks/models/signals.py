"""Models of images, sound, and images beside text."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor

from benchmarks.models.case import ENCODER_DECODER, VOCABULARY, Case, padding, tokens
from benchmarks.models.language import GROUPED, SMALL

PIXELS = 16
PATCH = 4
CLASSES = {"num_labels": 10}
IMAGES = {"image_size": PIXELS, "patch_size": PATCH, "num_channels": 3}
ENCODER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE_TOKEN = 3  # the token id that stands for a patch in LLaVA's prompts
FRAMES = 32  # of Whisper's log-Mel spectrogram
SAMPLES = 400  # of wav2vec 2's waveform


def _image(batch: int) -> Tensor:
    return torch.randn(batch, 3, PIXELS, PIXELS)


def _labelled(batch: int, length: int) -> dict[str, Any]:
    return {"pixel_values": _image(batch), "labels": torch.randint(10, (batch,))}


def _segmented(batch: int, length: int) -> dict[str, Any]:
    return {"pixel_values": _image(batch), "labels": torch.randint(10, (batch, PIXELS, PIXELS))}


def _captioned(batch: int, length: int) -> dict[str, Any]:
    text = tokens(batch, length)
    text[:, -1] = VOCABULARY - 1  # the end of text, where CLIP reads its summary
    return {"input_ids": text, "attention_mask": padding(batch, length), "pixel_values": _image(batch), "return_loss": True}


def _asked(batch: int, length: int) -> dict[str, Any]:
    patches = torch.full((batch, (PIXELS // PATCH) ** 2), IMAGE_TOKEN)
    ids = torch.cat([patches, tokens(batch, length)], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": _image(batch), "labels": ids}


def _spoken(batch: int, length: int) -> dict[str, Any]:
    return {"input_features": torch.randn(batch, 16, FRAMES), "labels": tokens(batch, length // 2)}


def _heard(batch: int, length: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, SAMPLES), "labels": torch.randint(10, (batch,))}


def _transcribed(batch: int, length: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, SAMPLES), "labels": tokens(batch, 4)}


def _clip() -> hf.CLIPModel:
    text = ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "eos_token_id": VOCABULARY - 1}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=ENCODER | IMAGES, projection_dim=32))


def _llava() -> hf.LlavaForConditionalGeneration:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**ENCODER, **IMAGES),
        text_config=hf.LlamaConfig(**GROUPED),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=(PIXELS // PATCH) ** 2,
    )
    return hf.LlavaForConditionalGeneration(config)


SWIN = IMAGES | CLASSES | {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 2}
DINOV2 = IMAGES | CLASSES | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2}
SEGFORMER = CLASSES | {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [32, 64],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 64,
}
CONVNEXT = CLASSES | {"patch_size": 4, "num_stages": 2, "hidden_sizes": [32, 64], "depths": [1, 1]}
WHISPER = ENCODER_DECODER | {
    "num_mel_bins": 16,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
WAV2VEC2 = SMALL | {
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
DETERMINISTIC = "apply_spec_augment=False, layerdrop=0"  # else Python draws which frames and layers are left out

CASES = (
    Case("ViT", lambda: hf.ViTForImageClassification(hf.ViTConfig(**ENCODER, **IMAGES, **CLASSES)), _labelled, is_fast=True),
    Case("Swin", lambda: hf.SwinForImageClassification(hf.SwinConfig(**SWIN)), _labelled, is_fast=True),
    Case("DINOv2", lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**DINOV2)), _labelled),
    Case("SegFormer", lambda: hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**SEGFORMER)), _segmented),
    Case(
        "ConvNeXt",
        lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(**CONVNEXT)),
        _labelled,
        is_transformer=False,
    ),
    Case("CLIP", _clip, _captioned, is_fast=True),
    Case("LLaVA", _llava, _asked),
    Case("Whisper", lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)), _spoken, is_fast=True),
    Case(
        "wav2vec 2 classifier",
        lambda: hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**WAV2VEC2, **CLASSES)),
        _heard,
        setting=DETERMINISTIC,
    ),
    Case("wav2vec 2 CTC", lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAV2VEC2)), _transcribed, setting=DETERMINISTIC),
)
