"""Write messages with the options of a command line: `--memory-limit 6564` for `memory_limit=6564`."""

from __future__ import annotations

import ast
import re

_FLAGS = {name: f"--{name.replace('_', '-')}" for name in ("recipe", "memory_limit", "time_limit", "hardware")}
_SETTING = rf"({'|'.join(_FLAGS)})=('[^']*'|\"[^\"]*\"|-?\d+(?:\.\d+)?|nan|-?inf|\{{[^{{}}]*\}})"
_BF16 = "mixed_precision"


def with_flags(message: str) -> str:
    """Return a message in which settings of `Options` and `Mesh` that commands have are written as their options.

    The lines after the first are the user's, and stay.
    """
    text, newline, rest = message.partition("\n")
    text = re.sub(rf"Options\({_SETTING}\)", _flag, text)
    text = re.sub(rf"\b{_SETTING}", _flag, text)
    return re.sub(rf"\b{_BF16}\b(?!=)", "--bf16", text) + newline + rest


def _flag(found: re.Match[str]) -> str:
    value = found[2] if found[2].lstrip("-") in ("nan", "inf") else ast.literal_eval(found[2])
    if isinstance(value, dict):
        value = ",".join(f"{axis}={name or 'none'}" for axis, name in value.items())
    return f"{_FLAGS[found[1]]} {value}"
