"""Kind 12.7 in bfloat16: what a batch-mate, a chunk border and a hit may change, and what not.

The bound is on log-probabilities, not on text: a close call may fall to either side, and a bug that
changes much must not hide behind that. In float32 tokens are equal (test_equality).
"""

from octavo.engine.engine import Engine
from octavo.engine.request import Request

from .fakes import Answer, add_request, finish, request

NUM_TOP = 5
NUM_TOKENS = 8
BOUND = 0.1
"""0.046 was seen; in most cases the bits are equal."""
# Around pages, chunks of 16 and blocks of 128.
LENGTHS = (1, 15, 16, 17, 33, 127, 129)


def wanted(salt: str) -> list[Request]:
    return [
        request(
            f"r{length}",
            tuple(100 + (length + at * at * 7) % 9000 for at in range(length)),
            max_tokens=NUM_TOKENS,
            logprobs=True,
            top_logprobs=NUM_TOP,
            cache_salt=salt,
        )
        for length in LENGTHS
    ]


def largest_change(found: Answer, alone: Answer) -> float:
    """Of the log-probabilities of ids that both report, up to the first token that differs.

    That token must have been a close call: its difference counts as a change.
    """
    largest = 0.0
    for at, (token, expected) in enumerate(zip(found.token_ids, alone.token_ids, strict=True)):
        tops = slice(at * NUM_TOP, (at + 1) * NUM_TOP)
        before, after = dict(alone.top[tops]), dict(found.top[tops])
        assert expected in after
        assert token in before
        largest = max(largest, *(abs(before[i] - after[i]) for i in before.keys() & after.keys()))
        if token != expected:
            return max(largest, before[expected] - before[token])
    return largest


def test_log_probabilities_stay_within_a_bound(default_engine_bfloat16: Engine):
    """Alone, beside others with prompts in one chunk, and with pages from the cache."""
    engine = default_engine_bfloat16
    alone: dict[str, Answer] = {}
    for one in wanted("alone"):
        add_request(engine, one)
        alone |= finish(engine)
    for one in wanted("together"):
        add_request(engine, one)
    together = finish(engine)
    again: dict[str, Answer] = {}
    for one in wanted("together"):
        add_request(engine, one)
        again |= finish(engine)
    assert again["r129"].num_cached_tokens > 0
    changes = [
        largest_change(answers[name], alone[name])
        for answers in (together, again)
        for name in alone
    ]
    assert max(changes) < BOUND
