"""Decode steps of a model of 8B parameters, as the engine runs them. Part "decode_step".

The architecture is that of the preset, the weights and the KV are random and made on the device,
the steps are those that the engine compiles. Requests are made up: so many rows that each see a
context. Steps are dispatched one behind the other, and the last one is waited for.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax

from ..configs.engine_config import EngineConfig
from ..configs.model_config import ModelConfig
from ..configs.presets import load_preset
from ..engine import packing
from ..engine.device_state import DeviceState
from ..engine.executables import compile_table
from ..engine.executor import DeviceExecutor
from ..engine.initial_state import StateMaker, attention_shape, load_decoder
from ..engine.made_up_requests import Occupant, blank, enter
from ..engine.packing import UploadLayout
from ..engine.placement import make_mesh, replicated
from ..engine.step_shapes import StepKey, StepShapes
from ..pallas_kernels.backend import KVLayer
from ..pallas_kernels.choice import choose
from .device_parts import Findings, Tasks
from .random_checkpoint import random_checkpoint

WARM_UP_STEPS = 3
REPETITIONS = 3
CHUNK = 16  # of the one mixed step, which puts requests into their slots


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is timed.

    Attributes:
      model: The architecture.
      rows: Rows of the steps.
      context_tokens: What each row sees when its steps begin.
      steps: Dispatched one behind the other.
      page_size: Tokens per page.
    """

    model: ModelConfig
    rows: tuple[int, ...] = (64, 1, 16, 256)
    context_tokens: int = 1024
    steps: int = 30
    page_size: int = 64

    @property
    def columns(self) -> int:
        """Pages of a request: for its context and for all steps."""
        last = self.context_tokens + WARM_UP_STEPS + REPETITIONS * self.steps
        return -(-last // self.page_size)

    @property
    def config(self) -> EngineConfig:
        """An engine that holds all of it."""
        return EngineConfig(
            max_num_seqs=max(self.rows),
            prefill_chunk_tokens=CHUNK,
            page_size=self.page_size,
            num_pages=1 + max(self.rows) * self.columns,
            max_model_len=self.columns * self.page_size + 1,
        )


def _sizes(is_dry_run: bool) -> Sizes:
    model = load_preset("llama-3.1-8b").architecture
    assert model is not None
    if not is_dry_run:
        return Sizes(model=model)
    small = dataclasses.replace(
        model, vocab_size=320, hidden_size=64, intermediate_size=96, num_layers=1, head_dim=16
    )
    small = dataclasses.replace(small, num_q_heads=4, num_kv_heads=2)
    return Sizes(model=small, rows=(2, 1), context_tokens=32, steps=2, page_size=16)


def tasks(is_dry_run: bool) -> Tasks:
    """A task for each number of rows; the first one of a process builds what all of them use."""
    sizes = _sizes(is_dry_run)
    return {
        f"{rows} rows x {sizes.context_tokens}": partial(decode_step, sizes, rows)
        for rows in sizes.rows
    }


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """An engine without its host: what the tasks of one process share.

    Attributes:
      executor: Runs the steps.
      layouts: Of the steps, by key.
      attention: Name of the backend.
      attention_reason: Why it is not the platform's kernels.
      read_bytes: Weights that each step reads.
      token_bytes: KV of one token in all layers.
      compile_s: Seconds that compiling all steps took, side by side.
      made_s: Seconds that weights and KV took.
    """

    executor: DeviceExecutor
    layouts: dict[StepKey, UploadLayout]
    attention: str
    attention_reason: str
    read_bytes: int
    token_bytes: int
    compile_s: float
    made_s: float


@cache
def _bench(sizes: Sizes) -> _Bench:
    config, model = sizes.config, sizes.model
    mesh = make_mesh(jax.devices()[:1])
    everywhere = replicated(mesh)
    choice = choose(config.attention, jax.devices()[0], attention_shape(config, model))
    backend = choice.backend
    shapes = StepShapes.from_config(config)
    keys = {shapes.key_for(rows, 0) for rows in sizes.rows} | {shapes.mixed[0]}
    layouts = [
        layout for layout in packing.upload_layouts(config, model.vocab_size) if layout.key in keys
    ]
    began_s = time.perf_counter()
    decoder = load_decoder(random_checkpoint(model), config, mesh)
    assert config.num_pages is not None
    assert config.max_model_len is not None
    maker = StateMaker(config, model, backend, mesh)
    state = maker.make(config.num_pages, config.max_model_len)
    state = dataclasses.replace(state, kv=_random_kv(state))
    jax.block_until_ready((decoder, state))
    made_s = time.perf_counter() - began_s

    began_s = time.perf_counter()
    table = compile_table(
        layouts, backend, decoder, state, everywhere, _ignore, with_transfers=False
    )
    compile_s = time.perf_counter() - began_s
    # Of an embedding that is not the head too, a step reads a few rows.
    unread = 0 if model.tie_word_embeddings else decoder.embedding[...].nbytes
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(decoder))
    return _Bench(
        executor=DeviceExecutor(table, decoder, state, everywhere, layouts),
        layouts={layout.key: layout for layout in layouts},
        attention=backend.name,
        attention_reason=choice.reason,
        read_bytes=weights - unread,
        token_bytes=maker.bytes_per_page // config.page_size,
        compile_s=compile_s,
        made_s=made_s,
    )


def _ignore(done: int, total: int) -> None:
    """Nobody waits for it."""


def _random_kv(state: DeviceState) -> list[KVLayer]:
    """Random pages in place of zeros, on which a device may run faster."""

    def fill(leaf: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype)

    def sharding(leaf: jax.Array) -> jax.sharding.Sharding:
        return leaf.sharding

    filled = jax.jit(
        partial(jax.tree.map, fill),
        donate_argnums=0,
        out_shardings=jax.tree.map(sharding, state.kv[0]),
    )
    return [filled(layer) for layer in state.kv]


def decode_step(sizes: Sizes, rows: int) -> Findings:
    """Times the step that the engine would run for so many rows."""
    bench = _bench(sizes)
    shapes = StepShapes.from_config(sizes.config)
    key = shapes.key_for(rows, 0)
    _enter(sizes, bench, shapes.mixed[0], rows)
    packed, parts = blank(bench.layouts[key])
    parts["decode_slots"][:rows] = range(rows)
    faults: list[str] = []

    def run(count: int) -> float:
        began_s = time.perf_counter()
        results = [bench.executor.dispatch(key, packed) for _ in range(count)]
        bench.executor.fetch(results[-1])
        seconds = time.perf_counter() - began_s
        for result in results:
            statuses = packing.unpack(key, bench.executor.fetch(result)).statuses
            if any(status != packing.VALID for status in statuses[:rows]):
                faults.append(f"rows that did not decode: statuses {sorted(set(statuses))}")
        return seconds

    run(WARM_UP_STEPS)
    times_s = [run(sizes.steps) for _ in range(REPETITIONS)]
    fastest = times_s.index(min(times_s))
    # Rows move on by a token a step; this is what they see in the middle of the fastest run.
    context = sizes.context_tokens + WARM_UP_STEPS + (fastest + 0.5) * sizes.steps
    step_s = min(times_s) / sizes.steps
    memory = jax.devices()[0].memory_stats() or {}
    if bench.attention_reason:
        faults.append(f"the kernels do not run: {bench.attention_reason}")
    return {
        "attention": bench.attention,
        "bucket_rows": key.rows,
        "step_ms": step_s * 1e3,
        "tokens_per_s": rows / step_s,
        "seconds_per_call": step_s,
        "slowest_step_ms": max(times_s) / sizes.steps * 1e3,
        "bytes": bench.read_bytes + int(rows * context * bench.token_bytes),
        "compile_s": bench.compile_s,
        "weights_and_kv_made_s": bench.made_s,
        "bytes_in_use": memory.get("bytes_in_use"),
        "peak_bytes_in_use": memory.get("peak_bytes_in_use"),
        "failures": sorted(set(faults)),
    }


def _enter(sizes: Sizes, bench: _Bench, carrier: StepKey, rows: int) -> None:
    """Puts a request into each of the first slots, with pages of its own."""
    occupants: Sequence[Occupant] = [
        Occupant(slot=slot, kv_len=sizes.context_tokens, remaining=2**20) for slot in range(rows)
    ]
    pages = {
        slot: range(1 + slot * sizes.columns, 1 + (slot + 1) * sizes.columns)
        for slot in range(rows)
    }
    enter(bench.executor, bench.layouts[carrier], occupants, pages)
