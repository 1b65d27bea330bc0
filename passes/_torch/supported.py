"""The supported releases of torch, and the errors for all others."""

from __future__ import annotations

import re

import torch

OLDEST = (2, 13)  # the first release with all the functional collectives, descriptors and Inductor settings used here


def release(version: str = torch.__version__) -> tuple[int, int]:
    """Return major and minor version of torch, such as (2, 13) for "2.13.0+cpu"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    assert match is not None, version
    return int(match[1]), int(match[2])


def check_release(version: str = torch.__version__) -> None:
    """Raise ImportError for a release older than the oldest supported one."""
    if release(version) < OLDEST:
        raise ImportError(f"autoshard needs {_range()}, and this is torch {version}; install a newer one")


def unsupported(missing: object, version: str = torch.__version__) -> ImportError:
    """Return the error for a feature that autoshard needs and this release of torch lacks or has changed."""
    return ImportError(
        f"autoshard cannot work with torch {version}: {missing}. It supports {_range()}; install the release that its "
        "constraints.txt pins, or a newer autoshard"
    )


def _range() -> str:
    return f"torch {OLDEST[0]}.{OLDEST[1]} or newer"
