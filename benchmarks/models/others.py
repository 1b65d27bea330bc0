"""Models of other libraries and of PyTorch itself: diffusion, adapters, recurrence, graphs, spectra, checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers as hf
from diffusers import DiTTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.models.case import BATCH, VOCABULARY, Case, tokens
from benchmarks.models.language import GROUPED

WIDTH = 32
NODES = 24  # of a graph
EDGES = 64


class Denoiser(nn.Module):
    """The training step of diffusers' examples: predict the noise that was added."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noise: Tensor, **given: Any) -> Tensor:
        return F.mse_loss(self.model(**given).sample, noise)


def _unet() -> nn.Module:
    return Denoiser(
        UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(WIDTH, 2 * WIDTH),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=WIDTH,
            attention_head_dim=8,
            norm_num_groups=8,
        )
    )


def _unet_inputs(batch: int, length: int) -> dict[str, Any]:
    image = torch.randn(batch, 4, 8, 8)
    given = {"sample": image, "timestep": torch.randint(1000, (batch,))}
    return given | {"encoder_hidden_states": torch.randn(batch, length, WIDTH), "noise": torch.randn_like(image)}


def _dit() -> nn.Module:
    return Denoiser(
        DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8
        )
    )


def _dit_inputs(batch: int, length: int) -> dict[str, Any]:
    image = torch.randn(batch, 4, 8, 8)
    given = {"hidden_states": image, "timestep": torch.randint(1000, (batch,))}
    return given | {"class_labels": torch.randint(1000, (batch,)), "noise": torch.randn_like(image)}


def _lora() -> nn.Module:
    adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), adapter)


def _text(batch: int, length: int) -> dict[str, Any]:
    ids = tokens(batch, length)
    return {"input_ids": ids, "labels": ids}


class Tagger(nn.Module):
    """A label for each token, from a bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.lstm(self.embedding(input_ids))[0])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Translator(nn.Module):
    """`nn.Transformer` with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(labels.shape[1])
        source, target = self.embedding(input_ids), self.embedding(labels)
        logits = self.head(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class GraphNetwork(nn.Module):
    """Two rounds of messages along the edges of one graph, summed at their ends (Kipf and Welling 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(edges.shape[1])).clamp(min=1)
        for layer in self.rounds:
            messages = torch.zeros_like(x).index_add(0, target, x[source])
            x = F.relu(layer(messages / degree[:, None])) + x
        return F.cross_entropy(self.head(x), y)


def _graph(batch: int, length: int) -> dict[str, Any]:
    nodes, edges = NODES * batch // BATCH, EDGES * batch // BATCH
    given = {"x": torch.randn(nodes, WIDTH), "edges": torch.randint(nodes, (2, edges))}
    return given | {"y": torch.randint(4, (nodes,))}


class Spectral(nn.Module):
    """Mixes positions by a filter of their spectrum, as FNet and global filter networks do (Rao et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, WIDTH, 2) * 0.02)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        x = x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho")
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Checkpointed(nn.Module):
    """A stack of MLPs of which the backward computes the values again, by one form of `torch.utils.checkpoint`."""

    def __init__(self, *, use_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(4)))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.use_reentrant is None:
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return F.mse_loss(x, y)


def _values(batch: int, length: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, length, WIDTH, requires_grad=True), "y": torch.randn(batch, length, WIDTH)}


def _gradient_checkpointing() -> nn.Module:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))
    model.gradient_checkpointing_enable()
    return model


_OTHER = partial(Case, is_transformer=False)

CASES = (
    _OTHER("diffusers U-Net", _unet, _unet_inputs),
    Case("diffusers DiT", _dit, _dit_inputs, is_fast=True),
    Case("Llama with LoRA", _lora, _text, is_fast=True),
    Case("Llama, gradient_checkpointing_enable", _gradient_checkpointing, _text),
    Case("nn.Transformer", Translator, _text, is_fast=True),
    _OTHER("nn.LSTM", Tagger, _text, is_fast=True),
    _OTHER("graph network", GraphNetwork, _graph, is_fast=True),
    _OTHER("FFT filter", Spectral, _text, is_fast=True),
    _OTHER("checkpoint", partial(Checkpointed, use_reentrant=False), _values, is_fast=True),
    _OTHER("checkpoint, reentrant", partial(Checkpointed, use_reentrant=True), _values),
    _OTHER("checkpoint_sequential", partial(Checkpointed, use_reentrant=None), _values),
)
