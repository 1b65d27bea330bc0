"""Small models with one odd thing each: in how they use the batch, indices, outputs, parameters or modules.

`ODDITIES[name]()` gives one in float64; seed the generator first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Case

BATCH, SEQ = 4, 8


class Two(nn.Module):
    """Two linears; subclasses say what is done with them."""

    def __init__(self, sizes: tuple[int, int, int] = (12, 20, 16)) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2])

    def both(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Phases(Two):
    """The exponential of an imaginary number, whose gradient multiplies by the conjugate of a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(1j * self.both(x)).real


class InputGradients(Two):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.both(x) * y).sum(-1)


class ReturnsParameters(Two):
    """Outputs that are a parameter, a view of one, an input, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        penalty = self.up.weight.pow(2).sum()
        kept = {"weight": self.up.weight, "turned": self.down.weight.t(), "x": x, "scale": self.scale}
        return {"y": self.both(x) * self.scale, "penalty": penalty, **kept}


class SeveralLosses(Two):
    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = self.both(x)
        return y.square().mean(), {"l1": y.abs().mean(), "rows": y.sum(-1)}, y.detach().argmax(-1)


class MergesSharded(nn.Module):
    """Views that merge sharded dims with others, and take heads apart across them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.flat, self.piece = nn.Linear(12, 24), nn.Linear(SEQ * 24, 16), nn.Linear(6, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        pieces = hidden.view(-1, SEQ, 4, 6).permute(0, 2, 1, 3).reshape(-1, 6)
        rest = hidden.reshape(-1).cumsum(0).mean() + hidden.transpose(0, 1).reshape(SEQ, -1).tanh().mean()
        return F.mse_loss(self.flat(hidden.flatten(1)), y) + self.piece(pieces).square().mean() + 1e-3 * rest


class FlatTokens(nn.Module):
    """Tokens without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.down = nn.Embedding(32, 24), nn.Linear(24, 40), nn.Linear(40, 24)
        self.head = nn.Linear(24, 32)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return F.cross_entropy(self.head(x + self.down(F.relu(self.up(x)))), labels)


class Sorts(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        ordered, order = y.sort(-1)
        top, where = y.topk(3, -1)
        mixed = y.gather(-1, order.flip(-1)) * torch.zeros_like(y).scatter_add(-1, where, top)
        sums = y.cumsum(1).tanh().mean() + y.cumprod(-1).mean() + y.logcumsumexp(1).mean()
        picked = y.max(1).values.mean() + y.median(-1).values.mean() + y.kthvalue(2, dim=-1).values.mean()
        return (ordered * torch.arange(16)).mean() + top.square().mean() + mixed.mean() + sums + picked


class Indexes(nn.Module):
    """Lookups in parameters and activations, by tokens and by a list of places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 24))
        self.head = nn.Linear(24, 16)
        self.weights = nn.Parameter(torch.randn(4, 24, 16))

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.table[tokens]
        some = torch.index_select(x, 1, places)
        rows = x[torch.arange(x.shape[0]), tokens[:, 0] % SEQ]
        chosen = torch.einsum("bsd,bsde->bse", x, self.weights[tokens % 4])
        x = x.index_add(1, places, some)
        kept = torch.where(tokens[..., None] > 3, x, 0)
        return self.head(x).square().mean() + rows.tanh().mean() + chosen.square().mean() + kept.mean()


class Empty(Two):
    """Parameters, and a layer between two others, that have no elements, as prompts and adapters of size 0."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"narrow": (0, 16), "wide": (16, 0), "rows": (0, 16), "prompt": (2, 0, 16)}
        self.none = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        y = y + F.linear(F.linear(y, self.none["narrow"]), self.none["wide"])
        y = torch.cat([self.none["prompt"][:1].expand(len(x), 0, 16), y], 1)
        return y.square().mean() + (self.none["rows"] @ y.flatten(0, 1).T).sum()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 20, bias=False), nn.Linear(20, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class SharedExpert(nn.Module):
    """A mixture of modules beside one that sees all; a second loss balances the router."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.shared, self.head = nn.Embedding(32, 24), Expert(), nn.Linear(24, 32)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.router = nn.Linear(24, 4, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(tokens)
        scores = self.router(x).softmax(-1)
        top, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, top)
        mixed = sum(expert(x) * weights[..., k : k + 1] for k, expert in enumerate(self.experts))
        load = F.one_hot(chosen, 4).sum(2).to(scores.dtype).mean((0, 1))
        logits = self.head(x + self.shared(x) + mixed)
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "balance": 0.1 * (scores.mean((0, 1)) * load).sum(),
        }


class Contrastive(nn.Module):
    """Every row of the batch against every other (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 16), nn.Linear(10, 16)
        self.heat = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = F.normalize(self.left(x), dim=-1) @ F.normalize(self.right(y), dim=-1).t() * self.heat.exp()
        labels = torch.arange(x.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class BatchStatistics(Two):
    """Statistics over the batch, a batch norm among them, whose buffers change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.both(x))
        z = (y - y.mean(0)) / (y.var(0) + 1e-5).sqrt()
        z = z / z.norm(dim=0).clamp_min(1e-3)
        return y.std() + y.max() + z.amax(0).sum() + z.abs().prod(1).sum() + z.logsumexp(0).sum()


class ChangesBuffers(Two):
    """A moving average and a counter; columns that are overwritten and scaled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        self.average.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        self.calls.add_(1)
        y = y - self.average
        y[..., 0] = 0
        y[:, 1:3] *= 2
        return y.square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.cell, self.decode = nn.Linear(12, 16), nn.GRUCell(16, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(x.shape[0], 16), []
        for step in range(3):
            state = self.cell(self.encode(x[:, step]), state)
            states.append(state)
        return self.decode(torch.stack(states, 1)).square().mean()


class EncoderDecoder(nn.Module):
    """PyTorch's own layers, with cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(24, 4, 40, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        return self.decoder(y, self.encoder(x), tgt_mask=mask, tgt_is_causal=True).square().mean()


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.transpose(0, 1)).square().mean()


class LowRank(nn.Module):
    """A frozen linear and two small ones that learn beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.up = nn.Linear(24, 24), nn.Linear(24, 40)
        self.frozen.requires_grad_(False)
        self.a, self.b = nn.Linear(24, 3, bias=False), nn.Linear(3, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.frozen(x) + 2 * self.b(self.a(x)))).square().mean()


class Float8(nn.Module):
    """A frozen weight in float8, which is converted where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 16).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def _with_float8() -> Case:
    layers = nn.Sequential(nn.Linear(24, 16).double(), Float8(), nn.Linear(20, 12).double())
    return Case(layers, (_x(24).double(),), {})


def _case(model: nn.Module, *inputs: Tensor) -> Case:
    return Case(model.double(), tuple(t.double() if t.is_floating_point() else t for t in inputs), {})


def _needing_gradients() -> Case:
    case = _case(InputGradients(), torch.randn(8, 12), torch.randn(8, 16))
    return Case(case.model, tuple(t.requires_grad_() for t in case.args), {})


def _x(features: int = 12) -> Tensor:
    return torch.randn(BATCH, SEQ, features)


def _tokens(*shape: int) -> Tensor:
    return torch.randint(32, shape or (BATCH, SEQ))


ODDITIES: dict[str, Callable[[], Case]] = {
    "input_gradients": _needing_gradients,
    "returns_parameters": lambda: _case(ReturnsParameters(), torch.randn(8, 12)),
    "phases": lambda: _case(Phases(), _x()),
    "several_losses": lambda: _case(SeveralLosses(), _x()),
    "merges_sharded": lambda: _case(MergesSharded(), _x(), torch.randn(BATCH, 16)),
    "flat_tokens": lambda: _case(FlatTokens(), _tokens(8), _tokens(8)),
    "sorts": lambda: _case(Sorts(), _x()),
    "indexes": lambda: _case(Indexes(), _tokens(), torch.tensor([0, 2, 5])),
    "empty": lambda: _case(Empty(), _x()),
    "shared_expert": lambda: _case(SharedExpert(), _tokens(), _tokens()),
    "contrastive": lambda: _case(Contrastive(), torch.randn(8, 12), torch.randn(8, 10)),
    "batch_statistics": lambda: _case(BatchStatistics(), torch.randn(8, 12)),
    "changes_buffers": lambda: _case(ChangesBuffers(), _x()),
    "recurrent": lambda: _case(Recurrent(), _x()),
    "encoder_decoder": lambda: _case(EncoderDecoder(), _x(24), torch.randn(BATCH, 6, 24)),
    "sequence_first": lambda: _case(SequenceFirst(), _x(24)),
    "low_rank": lambda: _case(LowRank(), _x(24)),
    "float8": _with_float8,
}
