"""Cases that random programs found to fail, each cut down to a few lines: by name, what is wrong without the fix."""

from __future__ import annotations

from tests.random_programs.program import Case, Program, Setting

EMBEDDING = Program(
    {"a0": "torch.randint(4, (8, 16))"}, {"p0": "nn.Parameter(torch.randn(4, 8))"}, ("v0 = F.embedding(a0, self.p0)",)
)
FOUND: dict[str, Case] = {
    "an output that recipes of two axes shard": Case(
        EMBEDDING, Setting("a=2,b=2", None, {"a": "megatron", "b": "megatron"}, training=False)
    ),
    "an output that a user shards by two axes": Case(
        EMBEDDING, Setting("a=2,b=2", None, {"a": None, "b": None}, options={"outputs": {"output": {"a": "S(1)", "b": "S(1)"}}})
    ),
    "a loss whose gradient nothing reads": Case(
        Program(
            {"a0": "torch.randn(8, 6)"},
            {"p0": "nn.Parameter(torch.randn(6, 6))"},
            ("v0 = F.linear(a0, self.p0)", "v1 = v0.floor()"),
            "{'v1': v1}",
        ),
        Setting("dp=2", None, {"dp": "megatron"}),
    ),
    "a no-op on an argument": Case(
        Program(
            {"a0": "torch.randn(8, 6)"},
            {"p0": "nn.Parameter(torch.randn(6, 6))"},
            ("v0 = F.linear(a0 * torch.ones(8, 1), self.p0)",),
            "v0.sum()",
        ),
        Setting("dp=2", "h100", {"dp": "ddp"}),
    ),
    "a complex number in the text of a graph": Case(
        Program({"a0": "torch.randn(8)"}, {}, ("v0 = torch.polar(a0.abs(), a0) * 2j",), "v0.abs()"),
        Setting("dp=2", None, {"dp": "ddp"}),
    ),
    "the strides of an output's gradient": Case(
        Program(
            {"a0": "torch.randn(4, 8, 6)"},
            {"p0": "nn.Parameter(torch.randn(6, 6))"},
            ("v0 = F.linear(a0.transpose(0, 1).reshape(32, 6), self.p0).view(8, 4, 6).transpose(0, 1)",),
        ),
        Setting("dp=2", None, {"dp": None}),
    ),
    "a searched sum that a user wants whole": Case(
        Program(
            {"a0": "torch.randn(2, 16, 4)"},
            {},
            ("v0 = F.cross_entropy(a0, torch.arange(4).expand(2, -1) % 16)",),
            "v0.tanh().sum() + v0.abs().tanh().sum() + v0.mean()",
        ),
        Setting("tp=2", training=False, options={"outputs": {"output": {"tp": "R"}}}),
    ),
    "an inverse, which torch checks": Case(
        Program(
            {"a0": "torch.randn(4, 2)"},
            {"p0": "nn.Parameter(torch.randn(4, 4))"},
            ("v0 = torch.linalg.inv(torch.eye(4) * 4 + self.p0) @ a0",),
            "v0.sum()",
        ),
        Setting("dp=2", None, {"dp": "ddp"}),
    ),
    "a view of an argument without gradients": Case(
        Program({"a0": "torch.randn(8, 16).requires_grad_()"}, {}, ("v0 = a0[..., ::2]",)),
        Setting("dp=2", None, {"dp": "ddp"}, training=False),
    ),
}
