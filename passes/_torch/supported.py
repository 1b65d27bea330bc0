"""The supported releases of torch, the errors for older ones, and the warning for newer ones."""

from __future__ import annotations

import re
import warnings

import torch

OLDEST = (2, 13)  # the first release with all the functional collectives, descriptors and Inductor settings used here
NEWEST = (2, 14)  # the newest release that the fast tests pass on: constraints-2.14.txt


def release(version: str = torch.__version__) -> tuple[int, int]:
    """Return major and minor version of torch, such as (2, 13) for "2.13.0+cpu"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    assert match is not None, version
    return int(match[1]), int(match[2])


def check_release(version: str = torch.__version__) -> None:
    """Raise ImportError for a release older than the oldest supported one; warn for one newer than the newest tested one."""
    if release(version) < OLDEST:
        raise ImportError(f"autoshard needs {_range()}, and this is torch {version}; install a newer one")
    if release(version) > NEWEST:
        warnings.warn(
            f"autoshard is tested up to torch {NEWEST[0]}.{NEWEST[1]}, and this is torch {version}; compare its plans with one "
            "device (autoshard.check), or install an older torch",
            stacklevel=2,
        )


def unsupported(missing: object, version: str = torch.__version__) -> ImportError:
    """Return the error for a feature that autoshard needs and this release of torch lacks or has changed."""
    return ImportError(
        f"autoshard cannot work with torch {version}: {missing}. It supports {_range()}; install the release that its "
        "constraints.txt pins, or a newer autoshard"
    )


def _range() -> str:
    return f"torch {OLDEST[0]}.{OLDEST[1]} or newer"
