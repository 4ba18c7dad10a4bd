"""The pool hands each page to one holder at a time, never page 0, in an order that repeats."""

import random

import pytest

from octavo.engine.page_pool import PagePool


def test_hands_out_every_page_but_page_0():
    pool = PagePool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_allocates_all_or_nothing():
    pool = PagePool(4)
    pool.allocate(1)
    with pytest.raises(ValueError, match=r"count is 3; it must be in \[0, 2\]"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="count is -1"):
        pool.allocate(-1)
    assert pool.num_free == 2
    pool.check()


@pytest.mark.parametrize("page", [0, -1, 3, 4, 2**31])
def test_takes_back_only_what_is_held(page: int):
    pool = PagePool(4)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(ValueError, match=f"page is {page}"):
        pool.free([page])
    pool.check()


def test_refuses_to_free_a_page_twice():
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="must be one that is handed out"):
        pool.free(pages)
    pool.check()


def test_needs_a_page_beside_page_0():
    with pytest.raises(ValueError, match="num_pages is 1"):
        PagePool(1)


def test_random_use_loses_and_doubles_nothing_and_repeats():
    """Fails if a page is lost, is held twice, or the order depends on anything but the calls."""
    orders = []
    for _ in range(2):
        rng, pool = random.Random(0), PagePool(40)
        held: list[list[int]] = []
        order = []
        for _ in range(500):
            if held and rng.random() < 0.5:
                pool.free(held.pop(rng.randrange(len(held))))
            elif (count := rng.randrange(6)) <= pool.num_free:
                held.append(pool.allocate(count))
                order.append(held[-1])
            pages = [page for pages in held for page in pages]
            assert len(set(pages)) == len(pages)
            assert len(pages) + pool.num_free == pool.num_usable == 39
            pool.check()
        orders.append(order)
    assert orders[0] == orders[1]


@pytest.mark.parametrize("damage", ["lost", "twice", "held"])
def test_check_notices_damage(damage: str):
    pool = PagePool(6)
    held = pool.allocate(2)
    if damage == "lost":
        pool._free.pop()
    else:
        pool._free.append(pool._free[0] if damage == "twice" else held[0])
    with pytest.raises(AssertionError):
        pool.check()
