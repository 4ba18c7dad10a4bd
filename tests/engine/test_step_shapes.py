import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.step_shapes import (
    MAX_SEGMENTS,
    SMALLEST_ROWS,
    StepKey,
    StepShapes,
    smallest_at_least,
)

SIZES = [1, 2, 3, 7, 8, 9, 17, 31, 32, 33, 64, 100, 255, 1024, 4096]


def shapes(max_num_seqs: int, chunk: int) -> StepShapes:
    return StepShapes.from_config(
        EngineConfig(max_num_seqs=max_num_seqs, prefill_chunk_tokens=chunk)
    )


def test_the_default_table_is_the_one_in_the_docstring():
    default = StepShapes.from_config(EngineConfig())
    assert default.decode_rows == (2, 8, 16, 32)
    wanted = {2: (16, 64, 256), 16: (8, 16, 64), 32: (16, 64, 256)}
    assert set(default.mixed) == {StepKey(n, chunk) for n in wanted for chunk in wanted[n]}
    assert len(default.all_keys()) == 13


@pytest.mark.parametrize("max_num_seqs", SIZES)
@pytest.mark.parametrize("chunk", SIZES)
def test_every_batch_finds_the_smallest_key_that_holds_it(max_num_seqs: int, chunk: int):
    """Whatever the scheduler may ask for is in the table: no compile after READY, no KeyError."""
    table = shapes(max_num_seqs, chunk)
    keys = set(table.all_keys())
    assert len(keys) == len(table.all_keys()) <= 40
    for num_rows in {0, 1, 2, 3, max_num_seqs // 2, max_num_seqs - 1, max_num_seqs}:
        for num_tokens in {0, 1, 15, 16, 17, chunk // 2, chunk - 1, chunk}:
            if num_rows > max_num_seqs or num_tokens > chunk:
                continue
            key = table.key_for(num_rows, num_tokens)
            assert key in keys
            assert (key.chunk == 0) == (num_tokens == 0)
            same_kind = [other for other in keys if (other.chunk == 0) == (num_tokens == 0)]
            holding = [k for k in same_kind if k.rows >= num_rows and k.chunk >= num_tokens]
            assert key.rows + key.chunk == min(k.rows + k.chunk for k in holding)


def test_a_deterministic_engine_has_one_executable():
    table = StepShapes.from_config(EngineConfig(deterministic=True, prefill_chunk_tokens=32))
    assert table.all_keys() == [StepKey(32, 32)]
    for num_rows, num_tokens in ((0, 1), (1, 0), (32, 0), (32, 32), (0, 32)):
        assert table.key_for(num_rows, num_tokens) == StepKey(32, 32)
    with pytest.raises(ValueError, match="33 rows and 0 prompt tokens exceed"):
        table.key_for(33, 0)


@pytest.mark.parametrize("max_num_seqs", SIZES)
def test_no_step_has_a_single_row(max_num_seqs: int):
    """A one-row product takes ten times as long as one of two rows on the CPU."""
    assert all(key.rows >= SMALLEST_ROWS for key in shapes(max_num_seqs, 1).all_keys())
    assert all(key.samples >= SMALLEST_ROWS for key in shapes(max_num_seqs, 1).all_keys())


def test_the_largest_is_compiled_first():
    sizes = [key.rows + key.chunk for key in shapes(32, 256).all_keys()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("chunk", "segments"), [(0, 0), (1, 1), (7, 7), (8, MAX_SEGMENTS), (256, MAX_SEGMENTS)]
)
def test_a_chunk_holds_at_most_as_many_segments_as_tokens(chunk: int, segments: int):
    key = StepKey(4, chunk)
    assert key.segments == segments
    assert key.samples == 4 + segments


def test_what_no_bucket_holds_is_an_error():
    assert smallest_at_least((2, 8), 2) == 2
    assert smallest_at_least((2, 8), 3) == 8
    with pytest.raises(ValueError, match=r"9 exceeds the largest bucket of \[2, 8\]"):
        smallest_at_least((2, 8), 9)
    with pytest.raises(ValueError, match="33 exceeds"):
        shapes(32, 256).key_for(33, 0)
    with pytest.raises(ValueError, match="1 rows and 257 prompt tokens exceed the largest step"):
        shapes(32, 256).key_for(1, 257)
    with pytest.raises(ValueError, match="33 rows and 1 prompt tokens exceed"):
        shapes(32, 256).key_for(33, 1)
