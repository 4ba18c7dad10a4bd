"""Writes and attention of some layers with the heads dealt to devices, as a step of the engine.

    python -m tests.pallas_kernels.gpu_sharded_step

compares two devices with one, in the interpreter, and fails where a bit differs. Without races:
over several devices the interpreter finds some that are none.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.pallas_kernels import gpu_budget
from octavo.pallas_kernels.backend import KV_HEAD_AXIS, KVLayer
from octavo.pallas_kernels.chunk_tokens import Segments
from octavo.pallas_kernels.gpu_backend import GpuBackend
from octavo.pallas_kernels.paged_attention import attend, paged_batch

from .attention_cases import NUM_SEGMENTS, Options, Shape, bits, make_case
from .gpu_subject import GPU, H100


def sharded_step(
    backend: GpuBackend, shape: Shape, num_pages: int, layers: int, mesh: Mesh
) -> tuple[Callable[..., Any], list[Any]]:
    """The step, whose first argument may be donated, and descriptions of its arguments."""
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
        segments = Segments(tables[1], lens[1], lens[2]) if shape.chunk else None
        batch = paged_batch(
            backend,
            tables[0],
            lens[0],
            segments,
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

    by_head = PartitionSpec(None, "heads")
    by_page_head = PartitionSpec(*[None] * KV_HEAD_AXIS, "heads")
    everywhere = PartitionSpec()
    dealt = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(by_page_head, *[by_head] * 3, PartitionSpec("heads"), everywhere, everywhere),
        out_specs=(by_page_head, by_head),
        check_vma=False,
    )

    def array(dims: Sequence[int], dtype: Any, spec: PartitionSpec = everywhere) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    tokens = shape.rows + shape.chunk
    width = gpu_budget.padded_head_dim(shape.head_dim)
    new = array((tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16, by_head)
    pages = (num_pages, shape.page_size, 2 * shape.kv_heads, width)
    return dealt, [
        [array(pages, jnp.bfloat16, by_page_head)] * layers,
        array((tokens, heads, shape.head_dim), jnp.float32, by_head),
        new,
        new,
        array((heads,), jnp.float32, PartitionSpec("heads")),
        (
            array((shape.rows, shape.columns), jnp.int32),
            array((NUM_SEGMENTS, shape.columns), jnp.int32),
        ),
        (array((shape.rows,), jnp.int32), *[array((NUM_SEGMENTS,), jnp.int32)] * 2),
    ]


def main() -> int:
    """Whether two devices give what one gives; the exit status."""
    options = Options(window=45, sinks=True)
    shape = Shape(2, 16, 16, kv_heads=2, group=2, head_dim=64, dtype="bfloat16", options=options)
    case = make_case(shape, [100, 5], [(20, 7), (0, 3)])
    pages = GPU.pack(case.k_pages, case.v_pages)
    values = [
        [pages, pages],
        case.q,
        jnp.asarray(case.k, jnp.bfloat16),
        jnp.asarray(case.v, jnp.bfloat16),
        case.sinks,
        (case.page_table, case.segment_page_table),
        (case.kv_lens, case.segment_kv_lens, case.segment_q_lens),
    ]
    results: list[np.ndarray] = []
    backend = GpuBackend(H100, interpret="yes")
    for count in (1, 2):
        mesh = Mesh(jax.devices()[:count], "heads")
        step, arguments = sharded_step(backend, shape, shape.num_pages, 2, mesh)
        placed = jax.tree.map(_place, values, arguments)
        kv, attended = jax.jit(step)(*placed)
        results.append(bits(np.concatenate([np.asarray(x).ravel() for x in (attended, *kv)])))
    one, two = results
    np.testing.assert_array_equal(two, one)
    return 0


def _place(value: jax.Array | np.ndarray, described: Any) -> jax.Array:
    return jax.device_put(value, described.sharding)


if __name__ == "__main__":
    sys.exit(main())
