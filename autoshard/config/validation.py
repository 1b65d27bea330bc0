"""Check the types and ranges of arguments, with messages that say what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from passes.errors import UserError

SHOWN_CHARACTERS = 60  # longest text of a value in a message; of a longer one it shows the type


def shown(value: object) -> str:
    """Return `value` as a message shows it: its text, or its type if the text is long."""
    text = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS and "\n" not in text else type(value).__name__


def check_choice(where: str, name: str, value: object, known: Iterable[object]) -> None:
    """Raise UserError for a value that is not in `known`; 1 does not count as True."""
    known = tuple(known)
    if not any(type(value) is type(one) and value == one for one in known):
        raise UserError(f"{where}({name}={shown(value)}): choose {' or '.join(map(repr, known))}")


def check_count(where: str, name: str, value: object, unit: str, *, least: int = 0) -> None:
    """Raise UserError for a value that is not a whole number, `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{where}({name}={shown(value)}): give {unit}, a whole number of {least} or more")


def check_kind(where: str, name: str, value: object, kinds: type | tuple[type, ...], advice: str) -> None:
    """Raise UserError for a value of another type than `kinds`; `advice` says what to give."""
    if not isinstance(value, kinds):
        raise UserError(f"{where}({name}={shown(value)}): give {advice}")


def is_seconds(value: object) -> bool:
    """Return whether `value` is a finite number of seconds, 0 or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def is_mapping_by_name(value: object) -> bool:
    """Return whether `value` is a mapping whose keys are strings."""
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def check_call(args: object, kwargs: object) -> None:
    """Raise UserError if `args` is not a tuple or `kwargs` not a dict by name; either may be None."""
    if args is not None and not isinstance(args, tuple | list):
        raise UserError(f"args={shown(args)}: give the arguments of one call as a tuple, such as args=(tokens, labels)")
    if kwargs is not None and not is_mapping_by_name(kwargs):
        options = "; give options by name: options=Options(...)" if type(kwargs).__name__ == "Options" else ""
        raise UserError(f"kwargs={shown(kwargs)}: give arguments by name, such as kwargs={{'labels': labels}}{options}")
