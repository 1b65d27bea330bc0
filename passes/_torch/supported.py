"""Which releases of torch the border stands on: what it borrows is there, or the import says what is missing."""

from __future__ import annotations

import re

import torch

OLDEST = (2, 13)  # the functional collectives, descriptors and Inductor settings that are borrowed are those of this release


def release(version: str = torch.__version__) -> tuple[int, int]:
    """Return major and minor number of a version of torch, such as (2, 13) for "2.13.0+cpu"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    assert match is not None, version
    return int(match[1]), int(match[2])


def check_release(version: str = torch.__version__) -> None:
    """Raise ImportError for a release that is older than the oldest supported."""
    if release(version) < OLDEST:
        raise ImportError(f"autoshard needs {_range()}, and this is torch {version}; install a newer one")


def unsupported(missing: object, version: str = torch.__version__) -> ImportError:
    """Return the error for what autoshard borrows from torch and this release does not have, or has otherwise."""
    return ImportError(
        f"autoshard cannot work with torch {version}: {missing}. It supports {_range()}; install the release that its "
        "constraints.txt pins, or a newer autoshard"
    )


def _range() -> str:
    return f"torch {OLDEST[0]}.{OLDEST[1]} or newer"
