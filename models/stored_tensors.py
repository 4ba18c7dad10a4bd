"""From the tensors of a Llama checkpoint to the decoder's parameters, one parameter at a time.

GGUF and Hugging Face store the same tensors under different names; the decoder fuses some of them
(query, key and value; gate and up). This file checks that the stored tensors are exactly those that
the declared parameters need, and copies each into its place in small blocks of rows, so that
beside the loaded parameters never more than one parameter and one block are in memory.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from .decoder import ParameterSpec
from .metadata import CheckpointError

ShardingOf = Callable[[ParameterSpec], jax.sharding.Sharding]
ReadRows = Callable[[str, slice], np.ndarray]
Index = tuple[int | slice, ...]

# Rows that are decoded and converted at once: enough to be fast, little beside an embedding.
BLOCK_ROWS = 4096


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of one checkpoint.

    Attributes:
      source: Begins every error message.
      names: Which stored tensors make up each parameter, by its path with `{i}` for the layer.
      shapes: Of every tensor that is stored, by name.
      ignored: Stored tensors that hold nothing to load.
      read_rows: Reads a range of rows of a tensor, as any float type. Ranges of query and key
        rows cover whole heads.
    """

    source: object
    names: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    ignored: frozenset[str]
    read_rows: ReadRows


@dataclass(frozen=True)
class _Part:
    """One stored tensor's share of a parameter.

    Attributes:
      name: Of the stored tensor.
      shape: That it must have.
      copies: Which of its rows go where in the parameter.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[tuple[slice, Index], ...]


def load_parameters(
    stored: StoredTensors, declared: Mapping[str, ParameterSpec], sharding_of: ShardingOf
) -> dict[str, jax.Array]:
    """Every declared parameter, in its declared dtype, where `sharding_of` says.

    Raises:
      CheckpointError: A tensor is missing, misshapen, or stored without being used; the message
        names it. Nothing has been read then.
    """
    parts = {path: _parts(stored, path, spec) for path, spec in declared.items()}
    _check_complete(stored, [part for many in parts.values() for part in many])
    parameters = {}
    for path, spec in declared.items():
        host = np.empty(spec.shape, spec.dtype)
        for part in parts[path]:
            for rows, index in part.copies:
                target = host[index]
                target[...] = stored.read_rows(part.name, rows).reshape(target.shape)
        parameters[path] = place(host, sharding_of(spec))
    return parameters


def place(host: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Copies an array to its devices; returns when that is done, so that `host` can be freed."""
    array = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    return array.block_until_ready()


def check_equal(stored: StoredTensors, first: str, second: str) -> None:
    """Raises CheckpointError unless two stored tensors hold the same values."""
    equal = stored.shapes[first] == stored.shapes[second] and all(
        np.array_equal(stored.read_rows(first, rows), stored.read_rows(second, rows))
        for rows in _row_blocks(stored.shapes[first][0])
    )
    if not equal:
        raise CheckpointError(
            f"{stored.source}: the embeddings are tied, yet {first} differs from {second}"
        )


def _check_complete(stored: StoredTensors, parts: list[_Part]) -> None:
    for part in parts:
        if part.name not in stored.shapes:
            raise CheckpointError(f"{stored.source}: tensor {part.name} is missing")
        shape = stored.shapes[part.name]
        if shape != part.shape:
            raise CheckpointError(
                f"{stored.source}: tensor {part.name} has shape {list(shape)}; "
                f"the model needs {list(part.shape)}"
            )
    unused = stored.shapes.keys() - {part.name for part in parts} - stored.ignored
    if unused:
        raise CheckpointError(
            f"{stored.source}: the model has no place for {_named(sorted(unused))}"
        )


def _parts(stored: StoredTensors, path: str, spec: ParameterSpec) -> list[_Part]:
    layer = re.search(r"\.(\d+)\.", path)
    template = re.sub(r"\.\d+\.", ".{i}.", path)
    if template not in stored.names:
        raise CheckpointError(
            f"{stored.source}: this file format has no tensor for parameter {path}"
        )
    names = [
        name.replace("{i}", layer.group(1)) if layer else name for name in stored.names[template]
    ]
    if template == "layers.{i}.qkv":
        layouts = _qkv_layouts(spec.shape)
    elif template == "layers.{i}.gate_up":
        _, rows, columns = spec.shape
        layouts = [
            ((rows, columns), tuple((block, (half, block)) for block in _row_blocks(rows)))
            for half in (0, 1)
        ]
    else:
        layouts = [(spec.shape, tuple((block, (block,)) for block in _row_blocks(spec.shape[0])))]
    return [
        _Part(name, shape, copies) for name, (shape, copies) in zip(names, layouts, strict=True)
    ]


def _qkv_layouts(
    shape: tuple[int, ...],
) -> list[tuple[tuple[int, ...], tuple[tuple[slice, Index], ...]]]:
    """Where query, key and value rows go in qkv [K, G + 2, H, D].

    Example: with 4 query heads, 2 kv heads and head_dim 8, query rows [16, 32) are query heads 2
    and 3, which share kv head 1: they go to qkv[1, 0:2].
    """
    kv_heads, fused, head_dim, hidden = shape
    group = fused - 2

    def layout(first: int, heads: int) -> tuple[tuple[int, ...], tuple[tuple[slice, Index], ...]]:
        rows = heads * head_dim
        copies = tuple(
            (slice(k * rows, (k + 1) * rows), (k, slice(first, first + heads)))
            for k in range(kv_heads)
        )
        return (kv_heads * rows, hidden), copies

    return [layout(0, group), layout(group, 1), layout(group + 1, 1)]


def _row_blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, rows))


def _named(names: list[str]) -> str:
    """Names in a sentence; the first few of them if there are many."""
    shown = ", ".join(names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
