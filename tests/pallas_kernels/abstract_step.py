"""One step's attention over pages for devices that only compile: what compiling needs of it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.pallas_kernels.backend import KV_HEAD_AXIS, AttentionBackend, KVLayer, KVShape
from octavo.pallas_kernels.chunk_tokens import Segments
from octavo.pallas_kernels.paged_attention import attend, paged_batch

from .attention_cases import NUM_SEGMENTS, Shape

HEADS = "heads"


def kv_of_one(shape: Shape, devices: int) -> KVShape:
    """What one of several devices holds."""
    assert shape.kv_heads % devices == 0
    return KVShape(
        kv_heads=shape.kv_heads // devices,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        dtype=shape.dtype,
    )


def abstract_step(
    backend: AttentionBackend, shape: Shape, num_pages: int, layers: int, mesh: Mesh
) -> tuple[Callable[..., Any], list[Any]]:
    """Writes and attention of some layers, heads dealt to the devices, and its arguments.

    The pages come first, to be donated.
    """
    options, heads = shape.options, shape.kv_heads * shape.group

    def step(
        kv: list[KVLayer],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sinks: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        lens: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[list[KVLayer], jax.Array]:
        batch = paged_batch(
            backend,
            tables[0],
            lens[0],
            Segments(tables[1], lens[1], lens[2]) if shape.chunk else None,
            chunk=shape.chunk,
            page_size=shape.page_size,
            num_pages=num_pages,
        )
        after: list[KVLayer] = []
        for layer in kv:
            q, layer = attend(
                q,
                k,
                v,
                layer,
                batch,
                scale=shape.scale,
                window=options.window,
                softcap=options.softcap,
                sinks=sinks if options.sinks else None,
                k_scale=options.k_scale,
                v_scale=options.v_scale,
            )
            after.append(layer)
        return after, q

    by_head = PartitionSpec(None, HEADS)
    by_page_head = PartitionSpec(*[None] * KV_HEAD_AXIS, HEADS)
    everywhere = PartitionSpec()
    dealt = jax.shard_map(
        step,
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

    layer = jax.tree.map(
        pages, jax.eval_shape(lambda: backend.allocate(kv_of_one(shape, mesh.size), num_pages))
    )
    tokens = shape.rows + shape.chunk
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
