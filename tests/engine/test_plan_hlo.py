"""Collectives and copies of the cache, read from the text of compiled programs.

Breaks when a copy of the cache, or traffic between devices, is overlooked.
"""

import jax
import pytest

from octavo.engine.plan_hlo import Collective, cache_copies, collectives

# Lines as the CPU, TPU and GPU compilers of jaxlib 0.12.0.1 print them, attributes left out.
TEXT = """
HloModule jit_run, is_scheduled=true

%fused (param_0.1: bf16[64064,128]) -> bf16[64064,128] {
  %param_0.1 = bf16[64064,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %scatter.7 = bf16[64064,128]{1,0:T(8,128)(2,1)} scatter(%param_0.1, %a, %b), to_apply=%add
}

ENTRY %main (p: bf16[1001,64,128]) -> bf16[1001,64,128] {
  %p = bf16[1001,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.3 = f32[288,4096]{1,0:T(8,128)S(1)} all-reduce(%x), channel_id=1
  %ar = ((f32[288,4096]{1,0}), f32[288,4096]{1,0}) all-reduce-start(%x), channel_id=2
  %ard = f32[288,4096]{1,0} all-reduce-done(%ar)
  %ag = ((f32[40,16032]{0,1}), f32[40,128256]{0,1}) all-gather-start(%y), dimensions={1}
  %agd = f32[40,128256]{0,1} all-gather-done(%ag)
  %cp = (bf16[8]{0}, bf16[8]{0}, u32[], u32[]) collective-permute-start(%z)
  %both = (f32[2,8]{1,0}, s32[4]{0}) all-reduce(%u, %v), to_apply=%add
  %flags = pred[16]{0} all-gather(%w), dimensions={0}
  %fusion.1 = bf16[64064,128]{1,0} fusion(%bitcast.1), kind=kLoop, calls=%fused
  %write = bf16[1001,64,128]{2,1,0} custom-call(%v, %p), output_to_operand_aliasing={{}: (1, {})}
  %k = (s8[4]{0}, bf16[1001,64,128]{2,1,0}) custom-call(), output_to_operand_aliasing={{1}: (4, {})}
  %name.all-reduce = f32[7]{0} add(%q, %q), metadata={op_name="all-reduce(x)"}
  ROOT %r = bf16[1001,64,128]{2,1,0} bitcast(%fusion.1)
}
"""
SIZE = 1001 * 64 * 128


def test_collectives_by_kind_and_size() -> None:
    assert collectives(TEXT) == (
        Collective(kind="all-gather", bytes=40 * 128256 * 4, count=1),
        Collective(kind="all-reduce", bytes=288 * 4096 * 4, count=2),
        Collective(kind="all-reduce", bytes=2 * 8 * 4 + 4 * 4, count=1),
        Collective(kind="all-gather", bytes=16, count=1),
        Collective(kind="collective-permute", bytes=16, count=1),
    )


A, B = "f32[2,8]{1,0:T(8,128)S(1)}", "s32[4]{0}"  # of 64 and of 16 bytes
BIG = "f32[512]{0}"  # of the other side, which does not count


@pytest.mark.parametrize(
    ("kind", "result", "expected"),
    [
        # Each has a start of its own, and all-reduce's has results alone.
        ("all-reduce", A, 64),
        ("all-reduce", f"({A})", 64),
        ("all-reduce", f"({A}, {B})", 80),
        ("all-reduce", f"({A}, /*index=1*/{B})", 80),
        ("all-gather", f"({BIG}, {A})", 64),
        ("all-gather", f"(({BIG}, {BIG}), ({A}, {B}))", 80),
        ("collective-permute", f"({BIG}, {A}, u32[]{{:S(2)}}, u32[]{{:S(2)}})", 64),
        ("collective-permute", f"(({BIG}, {BIG}), ({A}, {B}), u32[], u32[])", 80),
        # Or a generic start, printed as if it were.
        *[
            (kind, start, expected)
            for kind in (
                "all-gather",
                "all-reduce",
                "all-to-all",
                "collective-broadcast",
                "collective-permute",
                "ragged-all-to-all",
                "reduce-scatter",
            )
            for start, expected in [
                (f"(({BIG}), {A})", 64),
                (f"(({BIG}), {A}, u32[])", 64),
                (f"(({BIG}, {BIG}), ({A}, {B}), s32[])", 80),
            ]
        ],
    ],
)
def test_a_start_counts_its_results_once(kind: str, result: str, expected: int) -> None:
    """Fails where operands are taken for results, or one result of several for all of them."""
    text = f"  %s = {result} {kind}-start(%u, %v), channel_id=1\n  %d = {A} {kind}-done(%s)\n"
    assert collectives(text) == (Collective(kind=kind, bytes=expected, count=1),)


@pytest.mark.parametrize(("result", "expected"), [(A, 64), (f"({A}, {B})", 80)])
@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "all-to-all", "reduce-scatter"])
def test_without_a_start_all_of_it_is_results(kind: str, result: str, expected: int) -> None:
    text = f"  ROOT %s = {result} {kind}(%u, %v), channel_id=1\n"
    assert collectives(text) == (Collective(kind=kind, bytes=expected, count=1),)


def test_writes_in_place_are_no_copies() -> None:
    assert cache_copies(TEXT, {SIZE}) == ()


@pytest.mark.parametrize(
    "line",
    [
        "%c = bf16[1001,64,128]{2,1,0} copy(%p)",
        "%c = bf16[1001,64,128]{1,2,0:T(8,128)(2,1)S(1)} copy(%p)",
        "ROOT %t = bf16[128,64064]{1,0} transpose(%p), dimensions={1,0}",
        "%c = f32[1001,64,128]{2,1,0} convert(%p)",
        "%s = (bf16[1001,64,128]{2,1,0:S(1)}, bf16[1001,64,128]{2,1,0}, u32[]) copy-start(%p)",
        "%z = bf16[64064,128]{1,0} broadcast(%zero), dimensions={}",
        "%s = bf16[1001,64,128]{2,1,0} select(%mask, %p, %q)",
        "%j = bf16[1001,64,128]{2,1,0} concatenate(%a, %b), dimensions={0}",
        "%g = bf16[1001,64,128]{2,1,0} all-gather(%a), dimensions={1}",
        '%b = bf16[1001,64,128]{2,1,0:S(1)} custom-call(%s), custom_call_target="ConcatBitcast"',
        "%k = (s8[4], bf16[1001,64,128]) custom-call(), output_to_operand_aliasing={{0}: (0, {})}",
        "%a = ((bf16[8]{0}), bf16[1001,64,128]{2,1,0}, s32[]) async-start(%b), calls=%wrapped",
    ],
)
def test_a_copy_in_any_shape_is_found(line: str) -> None:
    """To another layout, dtype or memory, at the top or inside a fusion, at once or in slices."""
    assert len(cache_copies(TEXT + f"  {line}\n", {SIZE})) == 1
    assert cache_copies(TEXT + f"  {line}\n", {SIZE + 1}) == ()


def test_the_copy_of_a_real_program_is_found() -> None:
    """Without donation a write has to copy first; with it, it must not."""

    def write(pages: jax.Array, new: jax.Array) -> jax.Array:
        return pages.at[3].set(new)

    pages, new = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32,), "float32")
    kept = jax.jit(write).lower(pages, new).compile().as_text()
    given = jax.jit(write, donate_argnums=0).lower(pages, new).compile().as_text()
    assert kept is not None
    assert given is not None
    assert cache_copies(kept, {64 * 32}) != ()
    assert cache_copies(given, {64 * 32}) == ()
