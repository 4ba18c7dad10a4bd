"""Kind 3.3: a seeded request says the same whatever shares its batch, and wherever its KV is from.

What would break this: a key made of the row, the step, the batch size or the seeds of others, or a
position that counts from where a request came back and not from its first token.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from octavo.engine.engine import Engine
from octavo.engine.request import Request, RequestOutput

from .fakes import add_request, request

PROMPT = tuple((3 + at * at * 7) % 300 for at in range(23))
NUM_TOKENS = 24


def seeded(name: str, *, seed: int = 42, salt: str | None = None) -> Request:
    """The one that is repeated; nothing of its prompt is cached under a salt that is new."""
    return request(
        name,
        PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=1.0,
        top_p=0.95,
        seed=seed,
        cache_salt=salt or name,
    )


def other(number: int, *, num_prompt: int = 9, max_tokens: int = 30, **options: Any) -> Request:
    prompt = [(at * 11 + number) % 300 for at in range(num_prompt)]
    # Drawn in the same way as the one that is repeated, so that its place among them varies.
    drawn = {"temperature": 1.0, "top_p": 0.95} | options
    return request(f"other {number}", prompt, max_tokens=max_tokens, **drawn)


def run(engine: Engine, before: Sequence[Request], one: Request) -> tuple[list[int], RequestOutput]:
    """Its ids beside others that came before it, and its last output."""
    for each in (*before, one):
        add_request(engine, each)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.check()
        assert engine.failure is None
    mine = [output for output in outputs if output.request_id == one.request_id]
    return [token_id for output in mine for token_id in output.token_ids], mine[-1]


@pytest.fixture(scope="module")
def alone(tiny_engine: Engine) -> list[int]:
    token_ids, _ = run(tiny_engine, [], seeded("alone"))
    assert len(set(token_ids)) > NUM_TOKENS // 2, "one token again and again proves nothing"
    return token_ids


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("alone again", []),
        ("unseeded", [other(0)]),
        ("seeded alike", [other(0, seed=42)]),
        ("seeded otherwise", [other(0, seed=7)]),
        ("itself", [seeded("itself too")]),
        ("fourth row", [other(number, seed=number) for number in range(3)]),
        ("last row", [other(number) for number in range(6)]),
    ],
)
def test_beside_others_and_in_any_row(
    tiny_engine: Engine, alone: list[int], name: str, before: list[Request]
):
    assert run(tiny_engine, before, seeded(name))[0] == alone


def test_across_a_preemption(tiny_engine: Engine, alone: list[int]):
    """Three that came earlier grow out of the pages while it decodes."""
    early = [
        other(number, num_prompt=num_prompt, max_tokens=100, ignore_eos=True)
        for number, num_prompt in enumerate((110, 110, 70))
    ]
    token_ids, last = run(tiny_engine, early, seeded("preempted"))
    assert last.num_preemptions > 0
    assert token_ids == alone


def test_with_a_miss_and_with_a_hit(tiny_engine: Engine, alone: list[int]):
    for name in ("miss", "hit"):
        token_ids, last = run(tiny_engine, [], seeded(name, salt="miss and hit"))
        assert (last.num_cached_tokens > 0) is (name == "hit")
        assert token_ids == alone


def test_another_seed_says_something_else(tiny_engine: Engine, alone: list[int]):
    """Else the equality above could be that of a seed which is ignored."""
    assert run(tiny_engine, [], seeded("other seed", seed=43))[0] != alone
