"""Sharding rules, one family of ops per file; importing this package registers them all."""

from __future__ import annotations

from passes.ir.call import Call, Tensor
from passes.rules import attention as attention
from passes.rules import batched as batched
from passes.rules import conv as conv
from passes.rules import experts as experts
from passes.rules import factory as factory
from passes.rules import index as index
from passes.rules import matmul as matmul
from passes.rules import norm as norm
from passes.rules import padded as padded
from passes.rules import pieces as pieces
from passes.rules import pointwise as pointwise
from passes.rules import pool as pool
from passes.rules import random as random
from passes.rules import reduction as reduction
from passes.rules import scatter as scatter
from passes.rules import view as view
from passes.rules.rule import Linear, Rule, Space, register, rule, rule_of

__all__ = ["Call", "Linear", "Rule", "Space", "Tensor", "register", "rule", "rule_of"]
