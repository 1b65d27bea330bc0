"""The examples run as their docstrings say, on this machine's processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.corpus import Corpus
from examples.gpt import GPT, GPT2
from examples.llama import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, TINY, Config, Llama

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = ("--steps", "3", "--sample", "8", "--compile", "eager")


def run(*command: str) -> str:
    """Return the output of a Python command, which must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.slow
@pytest.mark.gloo
def test_train_gpt_starts_its_ranks_and_has_the_loss_of_one_device() -> None:
    two = ("--mesh", "dp=2", "--recipe", "dp=fsdp")
    output = run(str(EXAMPLES / "train_gpt.py"), *two, *SHORT)
    (difference,) = re.findall(r"largest relative difference of the loss over all 3 steps: (\S+)", output)
    assert float(difference) < 1e-5
    assert re.search(r"blocks\.\d-3\n.*  attn\.qkv +In\[B_dp, ", output, re.DOTALL)
    assert "what the model writes" in output


@pytest.mark.slow
@pytest.mark.gloo
def test_long_context_has_the_loss_of_one_device() -> None:
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "long_context.py"))
    output = run(*command, "--seq", "256", "--steps", "3", "--compile", "eager", "--recipe", "context(ring)")
    (difference,) = re.findall(r"largest difference of the loss: (\S+)", output)
    assert float(difference) < 1e-4


@pytest.mark.slow
def test_train_gpt_runs_on_one_device_alone() -> None:
    output = run(str(EXAMPLES / "train_gpt.py"), "--single", *SHORT)
    assert "one device" in output
    assert "fsdp" not in output


@pytest.mark.slow
def test_every_rank_reads_the_same_text_and_labels_are_the_tokens_to_come() -> None:
    corpus, other = (Corpus(vocab=512, seq=16, batch=4) for _ in range(2))
    tokens, labels = corpus.step(3)
    assert torch.equal(tokens, other.step(3)[0])
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert not torch.equal(tokens, corpus.step(4)[0])


@pytest.mark.slow
def test_decoding_gives_the_text_back() -> None:
    corpus = Corpus(vocab=512, seq=16, batch=4)
    start = corpus.decode(corpus.train[:200])
    assert start.startswith(('"""', "#", "import", "from"))
    assert start.isascii()


@pytest.mark.parametrize(
    ("config", "billions"), [(LLAMA3_8B, 8.03), (LLAMA3_70B, 70.55), (LLAMA3_405B, 405.85)], ids=("8B", "70B", "405B")
)
def test_llama_has_its_public_size(config: Config, billions: float) -> None:
    with torch.device("meta"):
        model = Llama(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == billions


def test_gpt2_has_its_public_size() -> None:
    with torch.device("meta"):
        model = GPT(GPT2)
    padding = (GPT2.vocab - 50257) * GPT2.dim
    assert sum(p.numel() for p in model.parameters()) - padding == 124_439_808


def test_tiny_llama_starts_at_the_loss_of_guessing() -> None:
    torch.manual_seed(0)
    model, tokens = Llama(TINY), torch.randint(TINY.vocab, (4, 16))
    assert abs(model(tokens, tokens).item() - torch.tensor(TINY.vocab).log().item()) < 0.1
