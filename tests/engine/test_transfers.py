"""One upload and one download per step, one step ahead, and pages that nobody copies.

The transfer guard does not see reads on the CPU, so every way to read a JAX array is watched here.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl
from jax._src.interpreters import pxla

from octavo.engine.engine import Engine
from octavo.engine.step_shapes import StepKey, StepShapes

from .conftest import Model
from .fakes import add_request, finish, request

# All ways from a JAX array to the host, and to learn whether it is there. int(), float() and
# indexing by an int come down to these; so do np.asarray, np.array and jax.device_get.
READS = (
    "__array__",
    "__buffer__",
    "__dlpack__",
    "_npy_value",
    "addressable_data",
    "block_until_ready",
    "copy_to_host_async",
    "is_ready",
)


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What crossed between host and device, in order; uploads that are not explicit raise."""
    log: list[str] = []

    def watch(owner: Any, name: str, entry: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            log.append(entry)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for name in READS:
        watch(ArrayImpl, name, f"read by {name}")
    watch(pxla, "batched_device_put", "upload")
    with jax.transfer_guard_host_to_device("disallow"):
        yield log


def add_requests(engine: Engine) -> None:
    """Some of every kind, more than there are slots."""
    kinds: list[tuple[int, dict[str, Any]]] = [
        (40, {}),
        (3, {"temperature": 0.8, "seed": 1, "top_p": 0.9}),
        (17, {"logprobs": True, "prompt_logprobs": True}),
        (1, {"temperature": 1.0, "seed": 2, "top_k": 5, "min_p": 0.1}),
        (9, {"stop_token_ids": (5, 6)}),
        (60, {"temperature": 0.8, "seed": 3}),
    ]
    for number, (num_prompt, sampling) in enumerate(kinds * 2):
        add_request(engine, request(str(number), range(num_prompt), max_tokens=12, **sampling))


def crossings_per_step(engine: Engine, log: list[str]) -> list[list[str]]:
    steps = []
    add_requests(engine)
    while engine.has_work:
        log.clear()
        engine.step()
        steps.append(log.copy())
    assert engine.failure is None, engine.failure
    return steps


def assert_one_up_and_one_down(steps: list[list[str]]) -> None:
    """The first step only dispatches, the last only reads."""
    up, down = "upload", "read by __buffer__"
    assert steps == [[up], *[[up, down]] * (len(steps) - 2), [down]]


AtDispatch = Callable[[Any, np.ndarray], object]
AtFetch = Callable[[Any], object]


class _Sabotaged:
    """The real executor with something extra done after each dispatch or before each fetch."""

    def __init__(
        self,
        executor: Any,
        *,
        at_dispatch: AtDispatch = lambda result, packed: None,
        at_fetch: AtFetch = lambda result: None,
    ) -> None:
        self._executor = executor
        self._at_dispatch = at_dispatch
        self._at_fetch = at_fetch

    def dispatch(
        self, key: StepKey, packed: np.ndarray, mask_rows: np.ndarray | None = None
    ) -> Any:
        result = self._executor.dispatch(key, packed, mask_rows)
        self._at_dispatch(result, packed)
        return result

    def fetch(self, result: Any) -> np.ndarray:
        self._at_fetch(result)
        return self._executor.fetch(result)

    def export_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._executor.export_pages(pairs)

    def import_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._executor.import_pages(pairs)

    def drop_pages(self, handles: Sequence[int]) -> None:
        self._executor.drop_pages(handles)


def test_every_step_uploads_one_array_and_downloads_one(
    tiny_engine: Engine, crossings: list[str], monkeypatch: pytest.MonkeyPatch
):
    """And nothing is read but inside fetch."""
    watched = _Sabotaged(
        tiny_engine._executor,
        at_dispatch=lambda result, packed: crossings.append("dispatched"),
        at_fetch=lambda result: crossings.append("fetching"),
    )
    monkeypatch.setattr(tiny_engine, "_executor", watched)
    steps = crossings_per_step(tiny_engine, crossings)
    assert len(steps) > 20
    up, down = ["upload", "dispatched"], ["fetching", "read by __buffer__"]
    assert steps == [up, *[[*up, *down]] * (len(steps) - 2), down]


MORE_AT_DISPATCH: dict[str, AtDispatch] = {
    "device_put": lambda result, packed: jax.device_put(packed),
    "asarray": lambda result, packed: jnp.asarray(packed),
    "mixed arithmetic": lambda result, packed: result + packed[:1],
    "wait": lambda result, packed: result.block_until_ready(),
    "poll": lambda result, packed: result.is_ready(),
}
MORE_AT_FETCH: dict[str, AtFetch] = {
    "np.array": np.array,
    "device_get": jax.device_get,
    "wait": jax.block_until_ready,
    "tolist": lambda result: result.tolist(),
    "shards": lambda result: result.addressable_shards[0].data.tolist(),
    "memoryview": memoryview,
    "dlpack": np.from_dlpack,
    "one by one": lambda result: [int(word) for word in result],
}


def assert_is_seen(engine: Engine, log: list[str]) -> None:
    try:
        with pytest.raises(AssertionError):
            assert_one_up_and_one_down(crossings_per_step(engine, log))
        assert not isinstance(engine.failure, TypeError), "the types checked at run time, not this"
    finally:
        # An upload that the guard refused has failed the engine, though its device state is fine.
        while engine.has_work:
            engine.step()
        engine.failure = None


@pytest.mark.parametrize("more", MORE_AT_DISPATCH)
def test_more_at_dispatch_would_be_seen(
    tiny_engine: Engine, crossings: list[str], monkeypatch: pytest.MonkeyPatch, more: str
):
    """The watch of the test above is not blind to any way there is."""
    sabotaged = _Sabotaged(tiny_engine._executor, at_dispatch=MORE_AT_DISPATCH[more])
    monkeypatch.setattr(tiny_engine, "_executor", sabotaged)
    assert_is_seen(tiny_engine, crossings)


@pytest.mark.parametrize("more", MORE_AT_FETCH)
def test_more_at_fetch_would_be_seen(
    tiny_engine: Engine, crossings: list[str], monkeypatch: pytest.MonkeyPatch, more: str
):
    sabotaged = _Sabotaged(tiny_engine._executor, at_fetch=MORE_AT_FETCH[more])
    monkeypatch.setattr(tiny_engine, "_executor", sabotaged)
    assert_is_seen(tiny_engine, crossings)


def test_a_step_is_read_only_after_the_next_is_dispatched(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """As long as work is waiting; that nothing else reads a result is shown above."""
    log: list[str] = []
    monkeypatch.setattr(
        tiny_engine,
        "_executor",
        _Sabotaged(
            tiny_engine._executor,
            at_dispatch=lambda result, packed: log.append("dispatch"),
            at_fetch=lambda result: log.append("fetch"),
        ),
    )
    add_requests(tiny_engine)
    finish(tiny_engine)
    num_steps = log.count("dispatch")
    assert log == ["dispatch", *["dispatch", "fetch"] * (num_steps - 1), "fetch"]


def test_nothing_that_was_donated_is_left(tiny_engine: Engine):
    """Else the step would hold two copies of the pages, and copy one to the other."""
    add_request(tiny_engine, request("r", range(20), max_tokens=3))
    while tiny_engine.has_work:
        before = list(tiny_engine._executor._state)
        num_steps = tiny_engine.load().steps_total
        tiny_engine.step()
        if tiny_engine.load().steps_total > num_steps:
            assert all(array.is_deleted() for array in before)


def copies_of(text: str, shape: tuple[int, ...], dtype: str = "f32") -> list[str]:
    """Instructions of an optimised program that copy an array of this shape."""
    dimensions = ",".join(map(str, shape))
    return re.findall(rf"= {dtype}\[{dimensions}\]\S* copy(?:-start)?\(.*", text)


def test_no_executable_copies_the_pages(tiny_engine: Engine, tiny_model: Model):
    model, config = tiny_model.checkpoint.config, tiny_engine.config
    kv_width = model.num_kv_heads * model.head_dim
    num_pages = tiny_engine.limits.num_pages
    pages = (num_pages, config.page_size, kv_width)
    tokens = (num_pages * config.page_size, kv_width)
    kv_bytes = 2 * model.num_layers * 4 * np.prod(pages)
    for key in StepShapes.from_config(config).all_keys():
        compiled: Any = tiny_engine._executor._table[key]
        text = compiled.as_text()
        assert "f32[{},{},{}]".format(*pages) in text
        assert not copies_of(text, pages), key
        assert not copies_of(text, tokens), key
        assert compiled.memory_analysis().alias_size_in_bytes >= kv_bytes, key


def test_no_executable_copies_rule_tables_or_logits(tiny_engine: Engine, tiny_model: Model):
    """They are large, and most steps touch none of the tables."""
    slots, vocab = tiny_engine.config.max_num_seqs, tiny_model.checkpoint.config.vocab_size
    for key in StepShapes.from_config(tiny_engine.config).all_keys():
        compiled: Any = tiny_engine._executor._table[key]
        text = compiled.as_text()
        assert f"s16[{slots},{vocab}]" in text
        found = [
            *copies_of(text, (slots, vocab), "s16"),
            *copies_of(text, (slots, vocab // 32), "s32"),
            *copies_of(text, (key.samples, vocab)),
        ]
        assert not found, key


def test_a_copy_would_be_seen():
    def write(pages: jax.Array, at: jax.Array) -> jax.Array:
        return pages.at[at].set(1.0)

    pages = jnp.zeros((5, 3, 2))
    for donated, num_copies in (((), 1), ((0,), 0)):
        text = jax.jit(write, donate_argnums=donated).lower(pages, 2).compile().as_text()
        assert text is not None
        assert len(copies_of(text, pages.shape)) == num_copies
