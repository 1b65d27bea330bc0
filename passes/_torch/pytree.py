"""Pytrees: flattened to leaves with their paths, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    _get_node_type,
    register_dataclass,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from torch.utils._pytree import TreeSpec as TreeSpec


def flatten_pytree(tree: Any) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Return the leaves of `tree` with their paths (`"batch.labels"`, `"0"`, `""` for a bare leaf), and its structure.

    Classes of dataclasses that PyTorch does not know yet are registered with it.
    """
    leaves, spec = tree_flatten(tree)
    while unknown := dict.fromkeys(type(leaf) for leaf in leaves if _is_plain_dataclass(leaf)):
        for kind in unknown:
            register_dataclass(kind)
        leaves, spec = tree_flatten(tree)
    return list(zip(_leaf_paths(tree, ""), leaves, strict=True)), spec


def containers_of(tree: Any) -> tuple[tuple[str, type, int], ...]:
    """Return the path of each container of a tree, its class, and how many items it has."""
    return tuple(_containers(tree, ""))


def _is_plain_dataclass(leaf: object) -> bool:
    """Return whether `leaf` is an instance of a dataclass that can be made again from its fields."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type | torch.Tensor):
        return False
    return all(field.init for field in dataclasses.fields(leaf))


def _leaf_paths(tree: Any, path: str) -> Iterator[str]:
    if _get_node_type(tree) not in SUPPORTED_NODES:
        yield path
        return
    for name, child in _children(tree):
        yield from _leaf_paths(child, f"{path}.{name}" if path else name)


def _containers(tree: Any, path: str) -> Iterator[tuple[str, type, int]]:
    if _get_node_type(tree) not in SUPPORTED_NODES:
        return
    children = _children(tree)
    yield path, type(tree), len(children)
    for name, child in children:
        yield from _containers(child, f"{path}.{name}" if path else name)


def _children(tree: Any) -> list[tuple[str, Any]]:
    """Return the items of a container with their names."""
    node = SUPPORTED_NODES[_get_node_type(tree)]
    children, context = node.flatten_fn(tree)
    names = [str(number) for number in range(len(children))]
    if node.flatten_with_keys_fn is not None:
        names = [_key_name(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]
    elif isinstance(context, list | tuple) and len(context) == len(children):
        names = [str(name) for name in context]  # a dict-like class registered without names: Hugging Face's outputs
    return list(zip(names, children, strict=True))


def _key_name(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return str(key.idx)
    if isinstance(key, MappingKey):
        return str(key.key)
    if isinstance(key, GetAttrKey):
        return key.name
    return str(key).strip("[].'")


def unflatten_pytree(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    return tree_unflatten(list(leaves), spec)


def map_pytree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with each leaf replaced by what `function` returns for it."""
    return tree_map(function, tree)
