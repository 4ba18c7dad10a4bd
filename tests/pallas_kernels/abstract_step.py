"""One step's attention over pages, compiled for devices that only compile."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.engine import plan_hlo
from octavo.pallas_kernels.backend import KV_HEAD_AXIS, AttentionBackend

from .attention_cases import NUM_SEGMENTS, Shape
from .attention_steps import one_step

HEADS = "heads"


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What compiling a step told.

    Attributes:
      lowered: What was compiled.
      program: The compiled program.
      text: Of it.
      copies: Instructions that make an array as large as a layer's pages.
      seconds: It took.
    """

    lowered: jax.stages.Lowered
    program: jax.stages.Compiled
    text: str
    copies: tuple[str, ...]
    seconds: float


def compile_step(
    backend: AttentionBackend,
    shape: Shape,
    devices: Sequence[jax.Device],
    *,
    num_pages: int,
    layers: int,
) -> CompiledStep:
    """Compiles a step of some layers, whose pages are donated.

    Raises:
      ValueError: The backend refuses the shape.
      Exception: It does not compile.
    """
    attention = shape.attention_shape(len(devices))
    if refusal := backend.refusal(attention):
        raise ValueError(refusal)
    started_s = time.perf_counter()
    step, arguments = abstract_step(backend, shape, num_pages, layers, Mesh(devices, HEADS))
    # Kernels are traced for the default device's architecture.
    with jax.default_device(devices[0]):
        lowered = jax.jit(step, donate_argnums=0).trace(*arguments).lower()
        program = lowered.compile()
    seconds = time.perf_counter() - started_s
    text = program.as_text()
    assert text
    pages = jax.eval_shape(lambda: backend.allocate(attention.kv, num_pages))
    copies = plan_hlo.cache_copies(text, {leaf.size for leaf in jax.tree.leaves(pages)})
    return CompiledStep(lowered=lowered, program=program, text=text, copies=copies, seconds=seconds)


def abstract_step(
    backend: AttentionBackend, shape: Shape, num_pages: int, layers: int, mesh: Mesh
) -> tuple[Callable[..., Any], list[Any]]:
    """A step with its heads dealt to the devices, and descriptions of its arguments."""
    by_head = PartitionSpec(None, HEADS)
    by_page_head = PartitionSpec(*[None] * KV_HEAD_AXIS, HEADS)
    everywhere = PartitionSpec()
    dealt = jax.shard_map(
        one_step(backend, shape, num_pages),
        mesh=mesh,
        in_specs=(by_page_head, *[by_head] * 3, PartitionSpec(HEADS), everywhere, everywhere),
        out_specs=(by_page_head, by_head),
        check_vma=False,
    )

    def array(dims: Sequence[int], dtype: Any, spec: PartitionSpec = everywhere) -> Any:
        return jax.ShapeDtypeStruct(tuple(dims), dtype, sharding=NamedSharding(mesh, spec))

    def pages(of_one: Any) -> Any:
        dims = list(of_one.shape)
        dims[KV_HEAD_AXIS] *= mesh.size
        return array(dims, of_one.dtype, by_page_head)

    kv = shape.attention_shape(mesh.size).kv
    layer = jax.tree.map(pages, jax.eval_shape(lambda: backend.allocate(kv, num_pages)))
    tokens, heads = shape.rows + shape.chunk, shape.kv_heads * shape.group
    new = array((tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16, by_head)
    return dealt, [
        [layer] * layers,
        array((tokens, heads, shape.head_dim), jnp.float32, by_head),
        new,
        new,
        array((heads,), jnp.float32, PartitionSpec(HEADS)),
        (
            array((shape.rows, shape.columns), jnp.int32),
            array((NUM_SEGMENTS, shape.columns), jnp.int32),
        ),
        (array((shape.rows,), jnp.int32), *[array((NUM_SEGMENTS,), jnp.int32)] * 2),
    ]
