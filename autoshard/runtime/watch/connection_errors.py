"""Recognise a collective that failed because of another rank."""

from __future__ import annotations

import torch.distributed as dist

from passes.errors import DistributedError

_TIMEOUT_WORDS = ("Timed out waiting", "Operation timed out", "Wait timeout", "Watchdog caught collective operation timeout")
_CONNECTION_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "/gloo/", "caused pair closure")


def peer_error(error: RuntimeError) -> DistributedError:
    """Return the DistributedError for a failed collective when it is not known which rank stopped."""
    return DistributedError(
        f"another rank has stopped or does not answer; look for the first error in the other ranks' output. ({error})"
    )


def is_connection_error(error: RuntimeError) -> bool:
    """Return whether a collective failed because of another rank."""
    if isinstance(error, DistributedError):
        return False  # it says itself what went wrong
    if isinstance(error, dist.DistError):
        return True
    return has_timed_out(error) or any(word in str(error) for word in _CONNECTION_WORDS)


def has_timed_out(error: RuntimeError) -> bool:
    """Return whether a collective waited in vain, while all connections held."""
    return any(word in str(error) for word in _TIMEOUT_WORDS)
