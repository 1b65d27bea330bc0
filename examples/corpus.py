"""The source files of Python's standard library as training text: real text that is on every machine."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

PIECE = re.compile(rb" ?[A-Za-z]+|\n *|.", re.DOTALL)  # a word, a line break with its indent, or one byte


class Corpus:
    """Text as tokens: the most common words, and bytes for everything else."""

    def __init__(self, *, vocab: int, seq: int, batch: int) -> None:
        self.seq, self.batch = seq, batch
        text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        pieces = PIECE.findall(text)
        counts = Counter(piece for piece in pieces if len(piece) > 1)
        self.pieces = [bytes([byte]) for byte in range(256)] + [p for p, _ in counts.most_common(vocab - 256)]
        numbers = {piece: number for number, piece in enumerate(self.pieces)}
        spelled = ((numbers[piece],) if piece in numbers else piece for piece in pieces)
        tokens = torch.tensor([number for numbers in spelled for number in numbers])
        self.train, self.held_out = tokens.tensor_split([len(tokens) * 19 // 20])
        self.bytes_per_token = len(text) / len(tokens)

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels `[batch, seq]` of one step: the global batch, equal on all ranks."""
        windows = self._windows(self.train, self.batch, self.seq + 1, seed=number)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def prompt(self) -> Tensor:
        """Return a window `[seq]` of held-out text."""
        return self._windows(self.held_out, 1, self.seq, seed=0)[0]

    def decode(self, tokens: Tensor) -> str:
        return b"".join(self.pieces[token] for token in tokens.tolist()).decode(errors="replace")

    @staticmethod
    def _windows(tokens: Tensor, count: int, length: int, *, seed: int) -> Tensor:
        starts = torch.randint(len(tokens) - length, (count, 1), generator=torch.Generator().manual_seed(seed))
        return tokens[starts + torch.arange(length)]
