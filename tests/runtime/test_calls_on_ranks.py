"""Calls of many shapes on real ranks: loss and gradients of each are one device's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autoshard import InputError, Options, UserError, autoshard
from autoshard.runtime.calls.drawing import Resets
from examples.gpt import GPT, Config
from tests.extended import extended
from tests.spawn import Failure, reports_of_ranks, run_on_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

SHAPES = ((3, 8), (4, 8), (4, 12), (1, 7), (4, 8))  # the first and the last batch may be odd
FEW_SHAPES = SHAPES[:2] + SHAPES[-1:]
ODD_SHAPES = (SHAPES[0], SHAPES[1], SHAPES[3])


def _train(rank: int, recipe: str, shapes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    one = GPT(Config(layers=1, dim=16, heads=4, vocab=32, seq=16)).double()
    model = autoshard(one, mesh, options=Options(recipe=recipe, compile="eager"))
    worst = {"loss": 0.0, "gradient": 0.0}
    for number, (batch, length) in enumerate(shapes):
        tokens = torch.randint(32, (batch, length), generator=torch.Generator().manual_seed(number))
        by_hand = number == 1
        part = (tokens.chunk(2)[2 * rank // ranks],) * 2 if by_hand else model.shard(tokens, tokens)
        loss, expected = model(*part), one(tokens, tokens)
        for each in (loss, expected):
            each.backward()
        pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True)]
        worst["loss"] = max(worst["loss"], float((loss - expected).detach().abs()))
        worst["gradient"] = max(worst["gradient"], *(float((mine - want).abs().max()) for mine, want in pairs))
    parts = model.shard(tokens[:3])
    searches = [remark.text for program in model.programs for remark in program.plan.remarks if remark.pass_name == "search"]
    return worst | {"programs": len(model.programs), "whole": isinstance(parts[0], DTensor), "searches": searches}


@pytest.mark.parametrize(
    ("ranks", "recipe", "shapes"),
    [(4, "fsdp+megatron", FEW_SHAPES), (2, "auto", ODD_SHAPES), extended(2, "auto", SHAPES)],
)
def test_every_shape_has_one_devices_numbers(ranks: int, recipe: str, shapes: tuple[tuple[int, int], ...]) -> None:
    for rank, found in enumerate(run_on_ranks(_train, ranks, recipe, shapes)):
        assert found["loss"] < 1e-10 and found["gradient"] < 1e-10, found
        assert found["programs"] == len(set(shapes)) and found["whole"]
        if rank == 0:  # which plans; the others follow
            assert bool(found["searches"]) == (recipe == "auto")


def _differ(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autoshard(torch.nn.Linear(3, 3), mesh, options=Options(recipe="ddp", compile="eager"))
    model(torch.ones(2 + rank, 3))


def test_ranks_that_make_different_calls_are_named() -> None:
    reports = reports_of_ranks(_differ, 2)
    assert all(isinstance(report, Failure) for report in reports)
    assert {report.message for report in reports} == {
        "ranks make different calls: rank 0 (training, input: float32[2, 3]), rank 1 (training, input: float32[3, 3]); every "
        "rank makes the same call: with parts of the same size, as model.shard(...) gives, or without the last batch, and with "
        "the same dtypes, arguments and settings of the model"
    }


class Scaled(torch.nn.Module):
    """Scales its output, by 1 unless it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale


class Weighs(torch.nn.Module):
    """Weighs its input by Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, weights: Any) -> torch.Tensor:
        return self.layer(x) * sum(weights)


def _give_lists(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autoshard(Weighs(), mesh, options=Options(recipe="ddp", compile="eager"))
    model(torch.ones(2, 3), [float(rank), *range(20), *(100 + rank + 2 * number for number in range(15))])


def test_of_many_arguments_those_that_differ_are_named() -> None:
    reports = reports_of_ranks(_give_lists, 2)
    assert all(isinstance(report, Failure) for report in reports)

    def numbers(rank: int) -> str:
        return ", ".join(f"weights.{21 + number}: {100 + rank + 2 * number}" for number in range(11))

    assert {report.message for report in reports} == {
        f"ranks make different calls: rank 0 (weights.0: 0.0, {numbers(0)}, and 4 more), rank 1 (weights.0: 1.0, {numbers(1)}, "
        "and 4 more); every rank makes the same call: with parts of the same size, as model.shard(...) gives, or without the "
        "last batch, and with the same dtypes, arguments and settings of the model; give many numbers as a tensor"
    }


def _leave_out(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autoshard(Scaled(), mesh, options=Options(recipe="ddp", compile="eager"))
    model(torch.ones(2, 3), *((0.5,) if rank == 0 else ()))


def test_an_argument_that_one_rank_leaves_out_is_said_of_both() -> None:
    for report in reports_of_ranks(_leave_out, 2):
        assert isinstance(report, Failure)
        assert report.message.startswith(
            "ranks make different calls: rank 0 (training, x: float32[2, 3], scale: 0.5), rank 1 (training, x: float32[2, 3], "
            "scale: as by default); every rank makes the same call"
        )


def _cut_twice(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model: Any = autoshard(torch.nn.Linear(3, 3), mesh, options=Options(recipe="fsdp+megatron", compile="eager"))
    parts = model.shard(torch.ones(8, 3))
    model.shard(parts[0].clone())  # nothing says that this is a part
    with pytest.raises(InputError) as error:
        model.shard(*parts)
    return str(error.value)


def test_a_part_of_the_batch_is_not_cut_again() -> None:
    assert set(run_on_ranks(_cut_twice, 2)) == {
        "input 'input' is float32[4, 3], this rank's part of float32[8, 3], which model.shard(...) returned before; use it as it "
        "is, or give model.shard the whole batch"
    }


def _give(rank: int) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoshard.programs").addHandler(handler)
    batch, found = torch.arange(12.0).reshape(4, 3), {}
    for how in ("whole", "constant", "own", "shard"):
        model: Any = autoshard(torch.nn.Linear(3, 3), mesh, options=Options(recipe="ddp", compile="eager"))
        twice = torch.cat([batch, batch])
        given = {"whole": batch, "constant": torch.ones(4, 3), "own": batch + rank, "shard": model.shard(twice[:7])[0]}
        model(given[how])
        if how == "whole":
            model(batch[:2])  # another program, of which the same would be said
        found[how] = list(told)
        told.clear()
    return found


def test_a_whole_batch_that_every_rank_gives_as_its_part_is_told_once() -> None:
    first, second = run_on_ranks(_give, 2)
    assert first == {
        **{"constant": [], "own": [], "shard": []},
        "whole": [
            "the ranks of axis 'dp' gave equal inputs, but each rank is to give its own part of the batch: the same samples are "
            "taken more than once. Cut a whole batch with model.shard(...), or let each rank load other samples with "
            "model.sampler(...)"
        ],
    }
    assert not any(second.values())


def _cut_unlike(rank: int) -> list[list[str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoshard.programs").addHandler(handler)
    batch, found = torch.arange(12.0).reshape(4, 3), list[list[str]]()
    for how in ("own", "same", "noise"):
        model: Any = autoshard(torch.nn.Linear(3, 3), mesh, options=Options(recipe="ddp", compile="eager"))
        given = batch + rank if how == "own" else batch.clone()
        (part,) = model.shard(given)
        if how == "noise":
            part += rank  # in place, so in the whole batch, too
        model(part)
        if how != "noise":
            with torch.no_grad():
                model(*model.shard(given))  # another program, of which the same would be said
        found.append(list(told))
        told.clear()
    return found


def test_ranks_that_cut_unlike_batches_are_told_once() -> None:
    first, second = run_on_ranks(_cut_unlike, 2)
    assert first == [
        [
            "the ranks of axis 'dp' gave model.shard(...) unlike batches, by 'input': each took its part of its own batch, and "
            "the samples in the other parts are left out. Give every rank the same batch, as a loader with one seed does, or let "
            "each rank load its part alone with model.sampler(...), and call the model without model.shard"
        ],
        [],
        [],
    ]
    assert not any(second)


class ReadsTable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor, positions: Tensor, label: Tensor, mask: Tensor) -> Tensor:
        return ((self.layer(x) @ table.T.float()).logsumexp(-1) + positions.sum(-1) + label + mask.sum(-1)).mean()


def _give_a_table(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoshard.programs").addHandler(handler)
    x, whole = torch.randn(4, 6) + rank, torch.arange(24.0).reshape(4, 6)
    positions = torch.arange(6).expand(4, 6)  # equal by design
    label, mask = torch.tensor([0, 1, 1, 0]), torch.arange(6) < torch.tensor([[6], [4], [6], [5]])  # equal by chance
    for inputs, table in product((None, {"table": {"dp": "R"}}), (whole, whole.long())):
        options = Options(recipe="ddp", compile="eager", inputs=inputs)
        model: Any = autoshard(ReadsTable(), mesh, options=options)
        model(x, table, positions, label, mask)
        model(x[:2], table[:2], positions[:2], label[:2], mask[:2])  # another program, of which the same would be said
    return told


def test_a_table_that_is_taken_for_a_part_of_the_batch_is_told_once() -> None:
    first, second = run_on_ranks(_give_a_table, 2)
    assert first == 2 * [
        "the ranks of axis 'dp' gave equal values of input 'table', but other inputs differ: it has as many rows as a rank's "
        "part of the batch, so it is taken for a part, and all parts are joined. If each rank is to read all of it, say so with "
        "Options(inputs={'table': {'dp': 'R'}})"
    ]
    assert second == []


class Generator(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 6)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.layer(z).tanh()


class Discriminator(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(self.layer(x)[:, 0], y)


def _train_gan(models: tuple[Any, Any], batch: tuple[Any, ...], steps: int) -> list[torch.Tensor]:
    """Train both models as DCGAN does (Radford et al. 2016), and return the parameters."""
    generator, discriminator = models
    z, real, ones, zeros = batch
    of_generator, of_discriminator = (torch.optim.SGD(model.parameters(), lr=0.5) for model in models)
    for _ in range(steps):
        of_discriminator.zero_grad()
        fake = generator(z)
        (discriminator(real, ones) + discriminator(fake.detach(), zeros)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        again = checkpoint(discriminator, fake, ones, use_reentrant=True)  # computed again in the backward, of a leaf
        (discriminator(fake * 2, ones) + again + 0.1 * fake.square().mean()).backward()
        of_generator.step()
    return [parameter for model in models for parameter in model.parameters()]


def _gan(rank: int, batch: int) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    models = Generator().double(), Discriminator().double()
    options = Options(recipe="fsdp", compile="eager")
    sharded: tuple[Any, ...] = tuple(autoshard(model, mesh, options=options) for model in models)
    z, real, ones = (torch.randn(batch, n, dtype=torch.float64) for n in (4, 6, 1))
    given = z, real, ones[:, 0] * 0 + 1, ones[:, 0] * 0
    generator, discriminator = sharded
    pairs = [discriminator.shard(real, labels) for labels in given[2:]]
    mine = _train_gan(sharded, (*generator.shard(z), *pairs[0], pairs[1][1]), 3)
    weights = zip(mine, _train_gan(models, given, 3), strict=True)
    return max(float((p.detach().full_tensor() - q).abs().max()) for p, q in weights)  # type: ignore[attr-defined]


@pytest.mark.parametrize("batch", [8, 7], ids=("even", "odd"))
def test_a_gan_trains_as_on_one_device(batch: int) -> None:
    assert max(run_on_ranks(_gan, 2, batch)) < 1e-12


class Prototypes(torch.nn.Module):
    """Return the mean of even and of odd samples, or the loss of samples with given means."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, means: torch.Tensor | None = None) -> torch.Tensor:
        h = self.layer(x)
        if means is None:
            return torch.stack([h[::2].mean(0), h[1::2].mean(0)])
        return torch.cdist(h, means).log_softmax(-1)[:, 0].mean()


def _prototypes(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = Prototypes().double()
    model: Any = autoshard(one, mesh, options=Options(recipe="fsdp", compile="eager"))
    found = []
    for batch in (4, 3):  # the two means are as long as a rank's part of four samples
        first, second = torch.randn(2, batch, 6, dtype=torch.float64)
        loss, expected = model(*model.shard(second), model(*model.shard(first))), one(second, one(first))
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        for each in (loss, expected):
            each.backward()
        pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True)]
        found += [float((total / 2 - expected).detach().abs()), *(float((p - q).abs().max()) for p, q in pairs)]
        for each in (model, one):
            each.zero_grad()
    return found


def test_an_output_that_is_whole_is_whole_in_the_next_call() -> None:
    assert all(max(found) < 1e-12 for found in run_on_ranks(_prototypes, 2))


def _outside(rank: int) -> list[float]:
    """Compute the loss and the accuracy outside of the model, with a penalty on parameters."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = torch.nn.Linear(6, 5).double()
    model: Any = autoshard(one, mesh, options=Options(recipe="fsdp", compile="eager"))
    found = []
    for batch in (4, 3):
        x, y = torch.randn(batch, 6, dtype=torch.float64), torch.randint(5, (batch,))
        part, labels = model.shard(x, y)  # the model takes `x`
        named = model.shard(target=y, input=x)
        assert list(named) == ["target", "input"]
        found += [float((a - b).abs().max()) for a, b in ((named["input"], part), (named["target"], labels))]
        output, expected = model(part), one(x)
        penalty, wanted = (sum((p.square().sum() for p in each.parameters()), start=torch.zeros(())) for each in (model, one))
        (torch.nn.functional.cross_entropy(output, labels) + penalty.full_tensor()).backward()
        (torch.nn.functional.cross_entropy(expected, y) + wanted).backward()
        correct = (output.argmax(-1) == labels).sum()
        if batch == 4:
            torch.distributed.all_reduce(correct)
        pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True)]
        found += [abs(int(correct) - int((expected.argmax(-1) == y).sum())), *(float((p - q).abs().max()) for p, q in pairs)]
        for each in (model, one):
            each.zero_grad()
    return found


def test_a_loss_outside_of_the_model_takes_an_odd_batch() -> None:
    assert all(max(found) < 1e-12 for found in run_on_ranks(_outside, 2))


class _Attention(torch.nn.Module):
    """Attention over positions, which `context` splits, and a linear to five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def _odd_sequence(rank: int) -> list[float]:
    """Compute the loss of a sequence that the axis does not divide outside of the model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    one = _Attention().double()
    shapes = torch.randn(2, 16, 8, dtype=torch.float64), torch.randint(5, (2, 16))
    model: Any = autoshard(one, mesh, shapes[:1], options=Options(recipe="context", compile="eager"))
    x, y = torch.randn(2, 13, 8, dtype=torch.float64), torch.randint(5, (2, 13))
    part, labels = model.shard(x, y)
    for output, wanted in ((model(part), labels), (one(x), y)):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), wanted.flatten()).backward()
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    return [float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs]


def test_a_loss_outside_of_the_model_takes_an_odd_sequence() -> None:
    assert all(max(found) < 1e-12 for found in run_on_ranks(_odd_sequence, 2))


class _Adapted(torch.nn.Module):
    """A residual layer with an adapter that has a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base, self.out = torch.nn.RMSNorm(8), torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8)
        self.down, self.up = torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 8, bias=False)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.out(torch.nn.functional.silu(self.base(h) + self.scale * self.up(self.down(h))))


def _rescale(rank: int) -> list[float]:
    """Change the scale of one layer between calls; return how far this rank's outputs are from one device's."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one: Any = torch.nn.Sequential(*(_Adapted() for _ in range(6)), torch.nn.Linear(8, 3)).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    model: Any = autoshard(one, mesh, (x,), options=Options(recipe="fsdp", compile="eager"))
    found = []
    for scale in (2.0, 1.0, 0.5):
        one[0].scale = model[0].scale = scale
        output = model(*model.shard(x))
        output.square().mean().backward()
        found.append(float((output - one(x).chunk(2)[rank]).detach().abs().max()))
    return found


def test_a_number_of_one_of_many_layers_changes_between_calls() -> None:
    """The program of the second call is compared with the first's, in the time that its calls take, not their paths."""
    assert all(max(found) < 1e-12 for found in run_on_ranks(_rescale, 2))


def _differentiate(rank: int) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    one = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh()).double()
    model = autoshard(one, mesh, options=Options(recipe="ddp", compile="eager"))
    worst = 0.0
    for batch in (4, 3):  # the part of a rank, and a batch that is whole on both
        x = torch.randn(batch, 4, dtype=torch.float64, requires_grad=True)
        wanted = torch.autograd.grad(one(x).square().mean(), x)[0]
        model(*model.shard(x)).square().mean().backward()
        part = slice(2 * rank, 2 * rank + 2) if batch == 4 else slice(batch)
        assert x.grad is not None
        worst = max(worst, float((x.grad - wanted)[part].abs().max()))
    return worst


def test_an_input_that_requires_it_gets_its_gradient_also_from_an_odd_batch() -> None:
    assert max(run_on_ranks(_differentiate, 2)) < 1e-12


def _draw(rank: int, planned: bool) -> float:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model, x = build(), torch.ones(4, 4)
    sharded: Any = autoshard(model, mesh, (x,) if planned else None, options=Options(recipe="fsdp", compile="eager"))
    sharded.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in sharded.modules():
        if isinstance(module, Resets):
            module.reset_parameters()
    torch.manual_seed(0)
    one, x = build(), torch.linspace(-1, 1, 16).reshape(4, 4)
    outputs = sharded(*sharded.shard(x)), one(x).chunk(2)[rank]
    assert sharded[0].weight.to_local().numel() == 14
    pairs = [(p.detach().full_tensor(), q) for p, q in zip(sharded.parameters(), one.parameters(), strict=True)]
    return max(float((p - q).detach().abs().max()) for p, q in (*pairs, outputs))


@pytest.mark.parametrize("planned", [True, False], ids=("planned", "at the first call"))
def test_a_model_on_meta_draws_the_values_of_one_device(planned: bool) -> None:
    assert max(run_on_ranks(_draw, 2, planned)) < 1e-6


def _replace_head(rank: int, seed: int) -> float:
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6)).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autoshard(one, mesh, options=Options(recipe="fsdp", compile="eager"))
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    model(x[2 * rank : 2 * rank + 2])
    for each in (model, one):
        torch.manual_seed(0 if each is one else seed * rank)
        each[1] = torch.nn.Linear(8, 4).double()
        each(*(model.shard(x) if each is model else (x,))).square().mean().backward()
    assert model[1].weight.to_local().shape == (2, 8)  # sharded as the other parameters are
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    return max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)


def test_a_replaced_head_is_sharded_and_trained() -> None:
    assert max(run_on_ranks(_replace_head, 2, 0)) < 1e-12
    for report in reports_of_ranks(_replace_head, 2, 1):
        assert isinstance(report, Failure)
        assert report.message.startswith("parameter '1.weight' is replicated on axis 'dp', but ranks 0 and 1 gave different")


class Recurrent(torch.nn.Module):
    """An LSTM that is given its first state: [layers, batch, width], while the batch of `x` is dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.LSTM(6, 10, 2, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        return self.layers(x, (hidden, cell))[0].square().mean()


def test_a_batch_that_is_not_dim_0_is_explained() -> None:
    for unnamed, named, refused in run_on_ranks(_recurrent, 2):
        assert "Expected hidden[0] size (2, 4, 10), got [4, 2, 10]" in unnamed
        assert (
            "call it with arguments that it accepts. Dim 0 of 'x', 'hidden', 'cell' was taken for the batch, and the ranks' "
            "parts were joined there; where the batch is another dim, give Options(inputs={'cell': {'dp': 'S(1)'}}), or 'R' for "
            "one that has no batch\n  "
        ) in unnamed
        assert named == ""
        assert refused.endswith(
            "cannot be called like this: too many positional arguments; model.shard takes the arguments that the model takes: "
            "model.shard(tokens, labels), model.shard(**batch). Tensors for a loss outside of the model go after all of these, "
            "or have a name that the model does not take: x, labels = model.shard(x, labels), "
            "parts = model.shard(**batch, target=labels)"
        )


def _recurrent(rank: int) -> tuple[str, str, str]:
    """Return what is said of a call whose batch is nowhere named, where it is, and of arguments in a tuple."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    call = torch.randn(2, 3, 6), torch.randn(2, 2, 10), torch.randn(2, 2, 10)
    named = {name: {"dp": "S(1)"} for name in ("hidden", "cell")}
    said = []
    for inputs in (None, named):
        torch.manual_seed(0)
        options = Options(recipe="fsdp", compile="eager", inputs=inputs)
        model: Any = autoshard(Recurrent(), mesh, options=options)
        said.append(_said(lambda model=model: model(*call)))  # type: ignore[misc]
    whole = ((torch.randn(4, 3, 6), torch.randn(2, 4, 10), torch.randn(2, 4, 10)), {"more": 1})
    return said[0], said[1], _said(lambda: model.shard(*whole, 1, 2))


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


class Stateful(torch.nn.Module):
    """An LSTM whose first call has no state, and whose later calls take that of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.LSTM(6, 10, 3, batch_first=True)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None) -> Any:
        return self.layers(x, state)


def test_a_constraint_may_name_an_input_that_the_first_call_lacks() -> None:
    for worst, said in run_on_ranks(_stateful, 2):
        assert worst < 1e-12
        given = "Options(inputs={'state.0': {'dp': 'S(1)'}, 'state.1': {'dp': 'S(1)'}}), or 'R' for one that has no batch"
        assert said.endswith(f"give {given}"), said


def _stateful(rank: int) -> tuple[float, str]:
    """Return the largest difference from one device, and what is said where no constraint is given."""
    mesh, one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Stateful().double()
    x = torch.linspace(-1, 1, 4 * 3 * 6, dtype=torch.float64).reshape(4, 3, 6)
    part, worst = x[2 * rank : 2 * rank + 2], 0.0
    model, unnamed = (
        autoshard(one, mesh, options=Options(recipe="fsdp", compile="eager", inputs=inputs, progress=False))
        for inputs in ({"state.*": {"dp": "S(1)"}}, None)
    )
    state, expected = None, None
    for _ in range(2):
        output, state = model(part, state)
        whole, expected = one(x, expected)
        output.square().mean().backward()
        whole.square().mean().backward()
        pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True)]
        worst = max(worst, *(float((mine - want).abs().max()) for mine, want in pairs))
        state, expected = (tuple(part.detach() for part in found) for found in (state, expected))
    try:
        unnamed(part, tuple(one.detach() for one in unnamed(part)[1]))
    except UserError as error:
        return worst, str(error).partition("\n")[0]
    return worst, ""


def test_norms_of_an_embedding_are_limited_as_the_message_says() -> None:
    assert max(run_on_ranks(_limit_norms, 2)) == 0


def _limit_norms(rank: int) -> float:
    mesh, one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.nn.Embedding(8, 4).double()
    model: Any = autoshard(one, mesh, (torch.arange(4),), options=Options(recipe="fsdp", compile="eager", progress=False))
    with torch.no_grad():
        model.weight.mul_((0.5 / model.weight.norm(dim=1, keepdim=True)).clamp(max=1))
    assert model.weight.to_local().shape == (4, 4)
    expected = one.weight * (0.5 / one.weight.norm(dim=1, keepdim=True)).clamp(max=1)
    return float((model.weight.full_tensor() - expected).abs().max())


def _compile_the_step(rank: int) -> float:
    torch.manual_seed(0)
    one = torch.nn.Linear(4, 1).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autoshard(one, mesh, options=Options(recipe="fsdp", compile="eager"))
    x = torch.randn(4, 4, dtype=torch.float64)

    def step() -> Tensor:
        loss = model(*model.shard(x)).square().mean()
        loss.backward()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        compiled()
        one(x).square().mean().backward()
    assert model.weight.grad is not None and one.weight.grad is not None
    return float((model.weight.grad.full_tensor() - one.weight.grad).abs().max())


def test_a_compiled_step_cuts_the_batch_and_runs_the_backward() -> None:
    assert max(run_on_ranks(_compile_the_step, 2)) < 1e-12
