"""A small Llama learns to copy 2,048 tokens that it saw 2,048 positions before; each rank has a quarter of every sequence.

    python examples/long_context.py                                  # one device
    torchrun --nproc-per-node 4 examples/long_context.py             # cp=4; ends with the loss of one device

The second half of a sequence is blank; each of its positions has the address of the one to copy. The model finds it by
attention: nothing else reaches that far.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Config, Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard

BLANK, IGNORED = 0, -100
WIDTH = 128  # of an address; 2,048 random ones of that width are told apart


class Copier(nn.Module):
    """A Llama of one layer, whose tokens come with addresses. Rotation is off: all positions look alike to it."""

    def __init__(self, seq: int) -> None:
        super().__init__()
        config = Config(layers=1, dim=WIDTH, heads=1, kv_heads=1, hidden=2 * WIDTH, vocab=32, seq=seq, rope_base=1e30)
        self.llama, self.addresses = Llama(config), nn.Embedding(seq // 2, WIDTH)
        attention = self.llama.layers[0].attention
        for weight in (attention.wq.weight, attention.wv.weight, attention.wo.weight):
            nn.init.orthogonal_(weight)
        with torch.no_grad():
            attention.wk.weight.copy_(attention.wq.weight)  # an address finds itself from the start
        nn.init.normal_(self.llama.tok_embeddings.weight)
        nn.init.normal_(self.addresses.weight)

    def forward(self, tokens: Tensor, addresses: Tensor, labels: Tensor) -> Tensor:
        llama = self.llama
        x = llama.tok_embeddings(tokens) + self.addresses(addresses)
        for layer in llama.layers:
            x = layer(x, llama.cos, llama.sin)
        scores = llama.output(llama.norm(x))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def batches(seq: int, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tokens, addresses and labels, `[1, seq]` each, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    addresses = torch.arange(seq // 2).repeat(2).unsqueeze(0)
    for _ in range(steps):
        seen = torch.randint(1, 32, (1, seq // 2), generator=generator)
        blank, ignored = torch.full_like(seen, BLANK), torch.full_like(seen, IGNORED)
        yield torch.cat((seen, blank), 1), addresses, torch.cat((ignored, seen), 1)


def train(seq: int, steps: int, recipe: str, compile: str) -> list[float]:
    """Return the loss of each step, on one device or on the ranks of torchrun."""
    torch.manual_seed(0)
    model: nn.Module = Copier(seq)
    is_sharded = "RANK" in os.environ
    if is_sharded:
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
        example = next(batches(seq, 1))
        model = autoshard(model, mesh, example, options=Options(recipe={"cp": recipe}, compile=compile))
        if dist.get_rank() == 0:
            print(model.plan)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for batch in batches(seq, steps):
        loss = model(*model.shard(*batch)) if is_sharded else model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipe", default="context", help="such as context(ring)")
    parser.add_argument("--compile", default="inductor", choices=("inductor", "eager"))
    given = parser.parse_args()
    losses = train(given.seq, given.steps, given.recipe, given.compile)
    if "RANK" not in os.environ:
        print("\n".join(f"step {step}: loss {loss:.4f}" for step, loss in enumerate(losses)))
        return
    if dist.get_rank() == 0:
        del os.environ["RANK"]  # the same training on this process alone
        alone = train(given.seq, given.steps, given.recipe, given.compile)
        for step, (loss, one) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}: loss {loss:.4f}, on one device {one:.4f}")
        print(f"largest difference of the loss: {max(abs(a - b) for a, b in zip(losses, alone, strict=True)):.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
