"""What the text of a compiled program tells: its collectives, and cache-sized arrays made anew.

Text is all that a compiler gives without a device. HLO is printed alike for all of them: an
instruction is a line `%name = TYPE opcode(operands), attributes`. No JAX.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

# What may have a cache-sized result: names of what is there, writes in place, and what hands on the
# results of computations whose own lines are looked at. Everything else makes a new array.
_NOT_NEW = frozenset(
    {
        "bitcast",
        "call",
        "conditional",
        "copy-done",  # counted where it starts
        "dynamic-update-slice",
        "fusion",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "scatter",
        "tuple",
        "while",
    }
)

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<type>.+?) (?P<opcode>[a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b(?P<dtype>pred|bf16|[a-z][a-z0-9]*?)\[(?P<shape>[0-9,]*)\]")
# Of a custom call, such as a kernel: output_to_operand_aliasing={{1}: (4, {}), {2}: (5, {})}.
_ALIASING = "output_to_operand_aliasing="
_OUTPUT = re.compile(r"\{([0-9]*)\}: \(")
_BITS = re.compile(r"[a-z]+?([0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind and size.

    Attributes:
      kind: As HLO calls it, such as "all-reduce".
      bytes: Of what one device has when it is done.
      count: How often it stands in the program; inside a loop it runs more often.
    """

    kind: str
    bytes: int
    count: int


def collectives(text: str) -> tuple[Collective, ...]:
    """Every collective of a program, the largest first.

    Args:
      text: As `jax.stages.Compiled.as_text` gives it.
    """
    found: Counter[tuple[str, int]] = Counter()
    for result, opcode, _ in _instructions(text):
        kind = opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            found[kind, _bytes(result if opcode == kind else _result_of_start(kind, result))] += 1
    ordered = sorted(found, key=lambda key: (-key[1], key[0]))
    return tuple(Collective(kind=k, bytes=n, count=found[k, n]) for k, n in ordered)


def cache_copies(text: str, leaf_sizes: Collection[int]) -> tuple[str, ...]:
    """Instructions that make an array as large as one layer's pages: `opcode TYPE` of each.

    An engine whose steps copy their KV cache spends more on that than on the step.

    Args:
      text: As `jax.stages.Compiled.as_text` gives it.
      leaf_sizes: Elements of the arrays that hold the pages, on one device.
    """
    return tuple(
        f"{opcode} {result}"
        for result, opcode, line in _instructions(text)
        if opcode not in _NOT_NEW
        and any(math.prod(shape) in leaf_sizes for shape in _new_shapes(result, line))
    )


def _new_shapes(result: str, line: str) -> Iterator[tuple[int, ...]]:
    """Shapes of an instruction's results, but for those that a custom call writes in place."""
    in_place = set(_OUTPUT.findall(line.partition(_ALIASING)[2]))
    for index, (_, shape) in enumerate(_arrays(result)):
        if not in_place & {"", str(index)}:  # without a number: the only result
            yield shape


def _instructions(text: str) -> Iterator[tuple[str, str, str]]:
    """The result's type, the opcode and the whole line of every instruction."""
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            yield found["type"], found["opcode"], line


def _result_of_start(kind: str, result: str) -> str:
    """Of what an asynchronous start returns, its results without the operands.

    That is (operands, results, ...): a start of any kind with the operands in a tuple, one of
    all-gather and collective-permute without it, if it is one operand. all-reduce-start alone has
    its results and nothing else. Source: `InferAllReduceStartShape` and its likes in XLA's
    shape_inference.cc.
    """
    if not result.startswith("("):
        return result
    if kind == "all-reduce" and not result.startswith("(("):
        return result
    return _parts(result)[1]


def _parts(result: str) -> list[str]:
    """The elements of a tuple's type."""
    depth, begin, parts = 0, 1, list[str]()
    for index, character in enumerate(result):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(result[begin:index])
            begin = index + 1
    return parts


def _bytes(result: str) -> int:
    return sum(math.prod(shape) * _bits(dtype) for dtype, shape in _arrays(result)) // 8


def _arrays(result: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of every array in a type."""
    for found in _ARRAY.finditer(result):
        yield found["dtype"], tuple(int(size) for size in found["shape"].split(",") if size)


def _bits(dtype: str) -> int:
    found = _BITS.match(dtype)
    return int(found[1]) if found else 8  # pred
