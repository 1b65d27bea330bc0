"""A model of the table: how it is built, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
ENCODER_DECODER = {  # the configuration that BART and Whisper share
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
LENGTH = 16
BATCH = 8

Inputs = Callable[[int, int], dict[str, Any]]  # batch size and sequence length -> keyword arguments


@dataclass(frozen=True)
class Case:
    """A model from a library, unmodified, in a small configuration, and keyword arguments as its documentation has them.

    `setting` is what of the configuration had to differ from the library's default, besides sizes. The model is left out
    where its `package` is not installed.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    setting: str = ""
    is_transformer: bool = True
    package: str = "transformers"
    is_fast: bool = False  # in the half that `make test-models` runs
    second: dict[str, int] = field(default_factory=lambda: {"batch": 4, "length": LENGTH})

    def is_installed(self) -> bool:
        return find_spec(self.package) is not None

    def first_call(self) -> dict[str, Any]:
        """Return the arguments of the first call, with seeded values."""
        torch.manual_seed(1)
        return self.inputs(BATCH, LENGTH)

    def second_call(self) -> dict[str, Any]:
        """Return the arguments of a call of another shape."""
        torch.manual_seed(2)
        return self.inputs(self.second["batch"], self.second["length"])

    def model(self) -> nn.Module:
        """Build the model from a seed, in training mode."""
        torch.manual_seed(0)
        return self.build().train()


def tokens(batch: int, length: int) -> Tensor:
    """Return random token ids above those that libraries use as marks."""
    return torch.randint(4, VOCABULARY, (batch, length))


def padding(batch: int, length: int) -> Tensor:
    """Return an attention mask in which one sequence in four ends early."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[::4, length - 3 :] = 0
    return mask
