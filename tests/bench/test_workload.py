"""What is asked for.

Breaks when prompts are not of the exact length, when a run cannot be repeated, or when prompts
repeat themselves and a cache of prefixes would make the numbers better.
"""

from itertools import islice
from typing import Any

import pytest

from octavo.bench.workload import (
    Mode,
    Workload,
    random_prompts,
    request,
    sampling_seeds,
    text_prompts,
)


def test_random_prompts() -> None:
    workload = Workload(prompt_tokens=16, seed=3)
    prompts = list(islice(random_prompts(workload, 50), 200))
    assert {len(prompt) for prompt in prompts} == {16}
    assert {token_id for prompt in prompts for token_id in prompt} == set(range(50))
    assert len({tuple(prompt[:8]) for prompt in prompts}) == len(prompts)
    assert prompts == list(islice(random_prompts(workload, 50), 200))
    assert prompts[0] != next(random_prompts(Workload(prompt_tokens=16, seed=4), 50))


def test_text_prompts_are_cut_from_the_text() -> None:
    """At every place where one fits, the last one included."""
    cuts = list(islice(text_prompts(Workload(prompt_tokens=4), range(10)), 200))
    assert {tuple(cut) for cut in cuts} == {tuple(range(i, i + 4)) for i in range(7)}
    assert cuts == list(islice(text_prompts(Workload(prompt_tokens=4), range(10)), 200))


def test_a_text_that_is_too_short_is_refused() -> None:
    assert next(text_prompts(Workload(prompt_tokens=4), [7, 8, 9, 10])) == [7, 8, 9, 10]
    with pytest.raises(ValueError, match="prompt_text has 3 tokens; it must have at least prompt"):
        text_prompts(Workload(prompt_tokens=4), [7, 8, 9])


def test_requests_ask_for_exactly_that_many_tokens() -> None:
    workload = Workload(output_tokens=9, temperature=0.5, top_p=0.9)
    greedy, sampled = (request(workload, mode, [1, 2], 2**64 - 1) for mode in Mode)
    for asked in (greedy, sampled):
        assert list(asked.token_ids.ids) == [1, 2]
        assert asked.sampling.max_tokens == 9
        assert asked.sampling.ignore_eos
    # Absent means 1, so that greedy has to be said.
    assert greedy.sampling.HasField("temperature")
    assert greedy.sampling.temperature == 0
    assert not greedy.sampling.HasField("top_p")
    assert (sampled.sampling.temperature, sampled.sampling.top_p) == (0.5, 0.9)
    assert sampled.sampling.seed == 2**64 - 1


def test_sampling_seeds_differ_and_can_be_had_again() -> None:
    seeds = list(islice(sampling_seeds(Workload(seed=1)), 50))
    assert len(set(seeds)) == 50
    assert seeds == list(islice(sampling_seeds(Workload(seed=1)), 50))
    assert seeds != list(islice(sampling_seeds(Workload(seed=2)), 50))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_tokens", 0),
        ("output_tokens", 1),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: float) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"^{field} is {value}; it must be"):
        Workload(**options)
