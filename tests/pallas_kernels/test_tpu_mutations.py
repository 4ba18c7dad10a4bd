"""Kernels that are wrong on purpose: what the table of cases checks must find each of them.

A test here fails where a check has become blind, for example because the interpreter moves bytes
before anybody waits for them.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from octavo.pallas_kernels import tpu_attention, tpu_budget, tpu_cache, tpu_stream
from octavo.pallas_kernels.tpu_tiles import Tile, TileWalk

from .attention_cases import Shape, make_case
from .attention_checks import check_equals_the_oracle
from .tpu_subject import ends, tpu_subject  # noqa: F401 (a fixture)

_SHAPE = Shape(rows=4, chunk=0, page_size=16, kv_heads=2, group=2, head_dim=128, dtype="bfloat16")


def _do_nothing(*_: Any) -> None:
    pass


def _never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a block are used before they are there."""
    monkeypatch.setattr(tpu_stream, "wait_for_pages", _do_nothing)


def _never_wait_for_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that writes ends before its copies."""
    body = tpu_cache._write_body
    monkeypatch.setattr(tpu_cache, "wait_for", _do_nothing)
    # Pallas keeps what it traced of a function, so this has to be another one.
    monkeypatch.setattr(tpu_cache, "_write_body", partial(body))


def _reuse_outputs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's outputs are stored over those that are still on their way out."""
    wait = tpu_attention._Kernel._wait_for_outputs

    def wait_at_the_end(kernel: Any, slot: jax.Array, count: jax.Array) -> None:
        if sys._getframe(1).f_code.co_name == "run":
            wait(kernel, slot, count)

    monkeypatch.setattr(tpu_attention._Kernel, "_wait_for_outputs", wait_at_the_end)


def _fetch_into_the_buffer_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages arrive where the block before them is still being read."""
    place = tpu_stream.PageStream._place

    def misplace(stream: Any, buffer: jax.Array, page: Any, count: Any) -> Any:
        is_fetch = sys._getframe(1).f_code.co_name == "start"
        return place(stream, (buffer + is_fetch) % stream.buffers.shape[0], page, count)

    monkeypatch.setattr(tpu_stream.PageStream, "_place", misplace)


def _unmask_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query sees whole blocks."""

    def visible(position: Any, shape: tuple[int, int], tile: int, window: int | None) -> jax.Array:
        return jnp.ones(shape, bool)

    monkeypatch.setattr(tpu_attention, "visible", visible)


def _see_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query sees the token behind it too."""
    visible = tpu_attention.visible

    def see_one_more(position: jax.Array, *args: Any) -> jax.Array:
        return visible(position + 1, *args)

    monkeypatch.setattr(tpu_attention, "visible", see_one_more)


def _keep_what_buffers_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 0 meet NaN."""

    def alive(first_key: jax.Array, end_key: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return jnp.ones(shape, bool)

    monkeypatch.setattr(tpu_attention, "alive", alive)


def _change_pages(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> None:
    pages = TileWalk.pages

    def changed(walk: TileWalk, tile: Tile, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        return change(*pages(walk, tile, block))

    monkeypatch.setattr(TileWalk, "pages", changed)


def _fetch_a_page_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last page of every block of several is missing."""
    _change_pages(monkeypatch, lambda first, end: (first, jnp.maximum(end - 1, first + 1)))


def _fetch_a_page_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of the page table that is none of the row's is dereferenced."""
    _change_pages(monkeypatch, lambda first, end: (first, end + 1))


def _never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding keeps what memory held."""
    monkeypatch.setattr(tpu_attention._Kernel, "_zero_the_rest", _do_nothing)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tpu_budget, "TILE_ROWS", 32)
    monkeypatch.setattr(tpu_budget, "MAX_BLOCK_TOKENS", tpu_budget.MIN_BLOCK_TOKENS)
    yield
    pltpu.reset_tpu_interpret_mode_state()  # after an error the interpreter is of no more use


def _check() -> None:
    # A row more than there are tiles in VMEM, and a block more than buffers.
    case = make_case(_SHAPE, [300, 0, 1, 150])
    check_equals_the_oracle(tpu_subject(), _SHAPE, case)


def test_unchanged_kernels_pass():
    _check()


NAN, RACE, BOUNDS = "what nobody wrote was read", "RACE DETECTED", "Out-of-bounds"
WRONG = "off by .* from the oracle"

MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (_never_wait, NAN),
    (_never_wait_for_writes, NAN),
    (_reuse_outputs_at_once, NAN),
    (_fetch_into_the_buffer_in_use, RACE),
    (_unmask_the_tail, WRONG),
    (_see_one_more, WRONG),
    (_keep_what_buffers_held, NAN),
    (_fetch_a_page_too_few, NAN),
    (_fetch_a_page_too_many, BOUNDS),
    (_never_zero, NAN),
]


@pytest.mark.parametrize(
    ("mutate", "symptom"), [pytest.param(*m, id=m[0].__name__.strip("_")) for m in MUTATIONS]
)
def test_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None],
    symptom: str,
    monkeypatch: pytest.MonkeyPatch,
):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=symptom):
        _check()
