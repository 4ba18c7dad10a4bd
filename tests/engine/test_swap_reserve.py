"""The host memory that is kept for whoever gives way."""

import random

import pytest

from octavo.engine.schedule import RequestState
from octavo.engine.swap_reserve import SwapReserve

from .test_scheduler import state


@pytest.mark.parametrize("seed", range(50))
def test_a_victim_always_finds_room(seed: int) -> None:
    """The proof of SwapReserve, tried: whoever is admitted, and however they grow."""
    rng = random.Random(seed)
    num_device, num_host = rng.randint(1, 12), rng.randint(0, 20)
    reserve = SwapReserve(num_device, num_host)
    most: dict[RequestState, int] = {}
    held: dict[RequestState, int] = {}
    swapped: dict[RequestState, int] = {}
    for number in range(200):
        pages = rng.randint(1, num_device)
        if reserve.admits(pages):
            one = state(f"r{number}", 1, 1)
            reserve.enter(one, pages)
            most[one], held[one] = pages, 0
        else:
            with pytest.raises(ValueError, match="reserve"):
                reserve.enter(state("late", 1, 1), pages)
        growing = [one for one in held if held[one] < most[one]]
        if growing:
            one = rng.choice(growing)
            while sum(held.values()) == num_device:
                victim = rng.choice([other for other in held if held[other]])
                swapped[victim] = held.pop(victim)
                assert sum(swapped.values()) <= num_host, "no room for a victim"
            if one in held:
                held[one] += 1
        for back in rng.sample(list(swapped), len(swapped)):
            if swapped[back] + sum(held.values()) < num_device:
                held[back] = swapped.pop(back)
        done = [one for one in held if held[one] == most[one] and rng.random() < 0.3]
        for one in done:
            reserve.leave(one)
            del held[one], most[one]
        reserve.check()
