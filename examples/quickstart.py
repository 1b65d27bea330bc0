"""The whole of it in twenty lines: `torchrun --nproc-per-node 4 examples/quickstart.py`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard


class Classifier(nn.Module):
    """Written for one device; it stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.gelu(self.up(x))), labels)


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)  # the same model and data on every rank
batch = torch.randn(64, 32), torch.randint(10, (64,))
model = autoshard(Classifier(), mesh, args=batch, options=Options(recipe={"dp": "fsdp", "tp": "megatron"}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

if dist.get_rank() == 0:
    print(model.plan)
for step in range(5):
    loss = model(*model.shard(*batch))  # this rank's part of the batch in, the loss of the whole batch out
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
