"""A request's ids are those of its run alone, wherever its pages come from; hits are exact.

Computed, cached, cached in part, brought back from host memory, recomputed after a preemption. The
device is `FakeExecutor`: to read a page that is wrong, not yet written or written over by another
is an assertion there, or another token here.
"""

from collections.abc import Iterable

import numpy as np
import pytest

from octavo.engine.engine import Engine
from octavo.engine.packing import SEGMENT_LENGTH, SEGMENT_SLOT, SEGMENT_START, UploadLayout
from octavo.engine.request import FinishReason, Request

from .fake_model import VOCAB_SIZE, next_token
from .fakes import (
    Answer,
    FakeExecutor,
    add_request,
    fake_engine,
    finish,
    request,
    run_alone,
    small_config,
    step,
)

PAGE_SIZES = (1, 3, 4, 16, 128)


def prompt(length: int, first: int = 0) -> list[int]:
    """Differs from those of another `first` in its first token, so that they share no page."""
    return [first, *(at * 7 % VOCAB_SIZE for at in range(1, length))]


def chunks(executor: FakeExecutor, number: int) -> list[tuple[int, int]]:
    """Start and length of each chunk of a step."""
    config, key = executor.config, executor.keys[number]
    layout = UploadLayout(key, config.max_num_seqs, config.page_size, config.max_stop_ids, 2)
    segments = layout.split(np.frombuffer(executor.uploads[number], np.int32))["segments"]
    return [
        (int(row[SEGMENT_START]), int(row[SEGMENT_LENGTH]))
        for row in segments
        if row[SEGMENT_SLOT] < config.max_num_seqs
    ]


def num_computed(executor: FakeExecutor, since: int) -> int:
    """Prompt tokens that steps have computed."""
    steps = range(since, len(executor.keys))
    return sum(length for number in steps for _, length in chunks(executor, number))


def ask(engine: Engine, executor: FakeExecutor, wanted: Request) -> tuple[Answer, int]:
    """A request alone on an idle engine: its answer, compared, and the tokens it computed."""
    since = len(executor.keys)
    add_request(engine, wanted)
    answer = finish(engine)[wanted.request_id]
    assert answer == run_alone(wanted, engine.config, engine.limits)
    computed = num_computed(executor, since)
    assert computed == len(wanted.prompt_token_ids) - answer.num_cached_tokens, "hits are not exact"
    return answer, computed


def other_than(token: int) -> int:
    return (token + 1) % VOCAB_SIZE


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prompts_around_page_borders_twice_and_extended(page_size: int, max_tokens: int):
    """Case 4.2. Breaks if a full hit leaves nothing to run, if the recomputed token goes into a
    page that others read, or if the chain of the last page is lost to later prompts.
    """
    config = small_config(page_size=page_size, prefill_chunk_tokens=64)
    engine, executor = fake_engine(config, num_pages=4000 // page_size + 20)
    lengths = sorted(
        {n * page_size + extra for n in (1, 2) for extra in (-1, 0, 1)} - {0} | {15, 17, 33}
    )
    for number, length in enumerate(lengths):
        one = prompt(length, first=number)
        cold, _ = ask(engine, executor, request("cold", one, max_tokens=max_tokens))
        assert cold.num_cached_tokens == 0
        again, _ = ask(engine, executor, request("again", one, max_tokens=max_tokens))
        assert again == cold
        assert again.num_cached_tokens == (length - 1) // page_size * page_size
        full = length // page_size * page_size
        # Not what was sampled next, or pages of the output would hit as well.
        more = other_than(next_token(one, None))
        for tail in ([more], [other_than(more)] * 16):
            extended, _ = ask(engine, executor, request("more", [*one, *tail], max_tokens=1))
            assert extended.num_cached_tokens == full


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_next_turn_of_a_chat_hits_what_was_answered(page_size: int):
    """Outputs are published as prompts are; the last one is never fed, so it is in no page."""
    config = small_config(page_size=page_size, prefill_chunk_tokens=64)
    engine, executor = fake_engine(config, num_pages=4000 // page_size + 20)
    history = prompt(20)
    for _ in range(4):
        answer, _ = ask(engine, executor, request("turn", history, max_tokens=37))
        num_written = len(history) + 36
        history = [*history, *answer.token_ids, 5, 6, 7]
        turn, _ = ask(engine, executor, request("next", history, max_tokens=1))
        assert turn.num_cached_tokens == num_written // page_size * page_size


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_prompt_that_was_aborted_while_its_chunk_is_in_flight(num_steps: int):
    """Case 4.1: pages count as written once their step was read, not when it was scheduled."""
    engine, executor = fake_engine(num_pages=30)
    one = prompt(30)
    add_request(engine, request("a", one, max_tokens=9))
    for _ in range(num_steps):
        step(engine, {})
    assert engine.abort("a")
    since = len(executor.keys)
    again = request("b", one, max_tokens=9)
    add_request(engine, again)
    answers = finish(engine)
    assert answers["b"] == run_alone(again, engine.config, engine.limits)
    # A chunk of 8 a step, the last of them unread.
    assert answers["b"].num_cached_tokens == (num_steps - 1) * 8
    assert num_computed(executor, since) == 30 - (num_steps - 1) * 8


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "X"}, {"cache_salt": "X"}),
        ({"cache_salt": "a", "tenant": "b"}, {"cache_salt": "ab"}),
        ({"cache_salt": "a", "tenant": "b"}, {"cache_salt": "b", "tenant": "a"}),
        ({"cache_salt": "a"}, {}),
        ({"tenant": "a"}, {}),
    ],
    ids=["tenant X, salt X", "b and a, ab", "b and a, a and b", "salt, none", "tenant, none"],
)
def test_no_hits_across_tenants_and_salts(one: dict[str, str], other: dict[str, str]):
    """Case 4.3: and each hits its own."""
    engine, executor = fake_engine()
    hits: list[int] = []
    for parts in (one, other, one, other):
        wanted = request(
            "r",
            prompt(30),
            max_tokens=2,
            tenant=parts.get("tenant", ""),
            cache_salt=parts.get("cache_salt", ""),
        )
        hits.append(ask(engine, executor, wanted)[0].num_cached_tokens)
    assert hits == [0, 0, 28, 28]


def test_another_tenants_identical_prompt_takes_as_many_steps_as_the_first():
    """Nothing that a tenant can count tells what others have sent."""
    engine, executor = fake_engine()
    num_steps: list[int] = []
    for tenant in ("a", "b", "b"):
        since = len(executor.keys)
        ask(engine, executor, request("r", prompt(60), max_tokens=3, tenant=tenant))
        num_steps.append(len(executor.keys) - since)
    assert num_steps[0] == num_steps[1] > num_steps[2]


def test_prompt_log_probabilities_never_come_from_the_cache():
    """Case 4.5: 31 then 33 tokens with pages of 32, each twice, in chunks; they may write."""
    config = small_config(page_size=32, prefill_chunk_tokens=8)
    engine, executor = fake_engine(config, num_pages=12)
    for length in (31, 33):
        for _ in range(2):
            scored = request("s", prompt(length, length), max_tokens=2, prompt_logprobs=True)
            answer, computed = ask(engine, executor, scored)
            assert (answer.num_cached_tokens, computed) == (0, length)
            assert len(answer.prompt_logprobs) == length - 1
    plain, _ = ask(engine, executor, request("p", prompt(33, 33), max_tokens=2))
    assert plain.num_cached_tokens == 32


def test_a_request_that_reads_no_cache_writes_it():
    engine, executor = fake_engine()
    for _ in range(2):
        wanted = request("r", prompt(30), max_tokens=2, reads_prefix_cache=False)
        assert ask(engine, executor, wanted)[0].num_cached_tokens == 0
    assert ask(engine, executor, request("r", prompt(30)))[0].num_cached_tokens == 28


def test_no_cache_no_hits():
    engine, executor = fake_engine(small_config(prefix_cache=False))
    for _ in range(2):
        answer, _ = ask(engine, executor, request("r", prompt(30), max_tokens=3))
        assert answer.num_cached_tokens == 0
    assert engine.load().num_cached_pages == 0


def test_a_hit_a_miss_a_continuation_and_a_decode_row_in_one_step():
    """Case 4.7: the miss must get a page table of its own, as the others do."""
    config = small_config(max_num_seqs=6, prefill_chunk_tokens=24)
    engine, executor = fake_engine(config, num_pages=100)
    warm = prompt(17, first=1)
    ask(engine, executor, request("warm", warm, max_tokens=1))
    wanted = {
        "decodes": request("decodes", prompt(3, first=2), max_tokens=12),
        "continues": request("continues", prompt(28, first=3), max_tokens=3),
        "cached": request("cached", [*warm, 9], max_tokens=3),
        "uncached": request("uncached", prompt(11, first=4), max_tokens=3),
    }
    answers: dict[str, Answer] = {}
    add_request(engine, wanted["decodes"])
    step(engine, answers)
    add_request(engine, wanted["continues"])
    step(engine, answers)
    add_request(engine, wanted["cached"])
    add_request(engine, wanted["uncached"])
    step(engine, answers)
    assert sorted(chunks(executor, len(executor.keys) - 1)) == [(0, 11), (16, 2), (24, 4)]
    finish(engine, answers)
    for name, one in wanted.items():
        assert answers[name] == run_alone(one, engine.config, engine.limits)
    assert answers["cached"].num_cached_tokens == 16


def _lengths(page_size: int) -> Iterable[int]:
    return sorted({1, *(max(1, 2 * page_size + extra) for extra in (-1, 0, 1))})


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_same_ids_cold_cached_in_part_from_host_memory_and_preempted(page_size: int):
    """Around every page border. Each kind is shown to have happened."""
    config = small_config(page_size=page_size, prefill_chunk_tokens=32, max_num_seqs=3)
    for length in _lengths(page_size):
        one = request("r", prompt(length), max_tokens=page_size + 3, seed=5, temperature=1.0)
        num_pages = -(-(length + page_size + 2) // page_size)
        engine, executor = fake_engine(config, num_pages + 3, max_host_pages=3 * num_pages)
        # Cold, then cached.
        cold, _ = ask(engine, executor, one)
        cached, _ = ask(engine, executor, one)
        assert cached == cold
        assert cached.num_cached_tokens == (length - 1) // page_size * page_size
        # In part: all pages but the first go down, are dropped or not; then from host memory.
        _push_out(engine, executor, num_pages + 2)
        assert engine.load().exported_pages_total > 0
        restored, _ = ask(engine, executor, one)
        assert restored == cold
        if length > page_size:
            assert engine.load().imported_pages_total > 0
            assert restored.num_cached_tokens == (length - 1) // page_size * page_size
        # Preempted, with what it published to come back to, or to compute again.
        for is_cached in (True, False):
            _preempt(config_pages=num_pages, page_size=page_size, wanted=one, is_cached=is_cached)


def _push_out(engine: Engine, executor: FakeExecutor, num_pages: int) -> None:
    """A prompt that takes every page."""
    length = num_pages * engine.config.page_size
    ask(engine, executor, request("big", prompt(length, first=11), max_tokens=1))


def _preempt(*, config_pages: int, page_size: int, wanted: Request, is_cached: bool) -> None:
    """Beside an earlier one that grows; in pools of which one at least is too small for both."""
    config = small_config(
        page_size=page_size, prefill_chunk_tokens=32, max_num_seqs=3, prefix_cache=is_cached
    )
    early = request("early", prompt(2 * page_size, first=12), max_tokens=config_pages * page_size)
    preemptions = 0
    for spare in (3, 4, 5):
        engine, _ = fake_engine(config, config_pages + spare)
        answers: dict[str, Answer] = {}
        add_request(engine, early)
        step(engine, answers)
        add_request(engine, wanted)
        finish(engine, answers)
        preemptions += engine.load().preemptions_total
        for one in (early, wanted):
            assert answers[one.request_id] == run_alone(one, engine.config, engine.limits)
        if preemptions:
            return
    raise AssertionError("nobody was preempted")


def test_a_partly_cached_prompt_with_the_rest_evicted():
    """Leaves go first, so a prefix stays; breaks if a page is read behind a gap."""
    engine, executor = fake_engine(num_pages=10)
    one = prompt(30)
    cold, _ = ask(engine, executor, request("a", one, max_tokens=2))
    ask(engine, executor, request("big", prompt(12, first=9), max_tokens=2))
    again, _ = ask(engine, executor, request("a", one, max_tokens=2))
    assert again == cold
    assert 0 < again.num_cached_tokens < 28


def test_a_long_cached_prefix_is_taken_up_over_several_steps():
    """300 pages hit and a step takes up 128; what decodes beside it misses no step."""
    config = small_config(page_size=1, prefill_chunk_tokens=64)
    engine, executor = fake_engine(config, num_pages=800)
    one = request("long", prompt(301), max_tokens=4)
    ask(engine, executor, one)
    answers: dict[str, Answer] = {}
    beside = request("beside", [3], max_tokens=30)
    add_request(engine, beside)
    step(engine, answers)
    step(engine, answers)
    add_request(engine, one)
    since = len(executor.keys)
    for number in range(5):
        before = len(answers["beside"].token_ids)
        step(engine, answers)
        assert len(answers["beside"].token_ids) == before + 1, "a stream misses a step"
        assert bool(chunks(executor, since + number)) is (number == 2)
    finish(engine, answers)
    for wanted in (one, beside):
        assert answers[wanted.request_id] == run_alone(wanted, engine.config, engine.limits)
    assert answers["long"].num_cached_tokens == 300


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_an_abort_while_a_long_prefix_is_taken_up_leaves_nothing_behind(num_steps: int):
    config = small_config(page_size=1, prefill_chunk_tokens=64, max_num_seqs=1)
    engine, executor = fake_engine(config, num_pages=400)
    one = request("long", prompt(301), max_tokens=4)
    ask(engine, executor, one)
    add_request(engine, one)
    for _ in range(num_steps):
        step(engine, {})
    engine.abort("long")
    engine.check()
    step(engine, {})
    load = engine.load()
    assert load.num_free_pages == load.num_usable_pages
    # Its slot goes to another, which must not find entries of the first.
    ask(engine, executor, request("other", prompt(7, first=8), max_tokens=5))
    assert ask(engine, executor, one)[0].num_cached_tokens == 300


def test_a_cache_that_fills_the_pool_keeps_nobody_waiting():
    """Case 5.1: all pages are cached, and a request needs every one of them."""
    engine, executor = fake_engine(num_pages=9)
    for number in range(4):
        ask(engine, executor, request("r", prompt(20, first=number), max_tokens=2))
    assert engine.load().num_cached_pages > 4
    wanted = request("all", prompt(3, first=9), max_tokens=30)
    ask(engine, executor, wanted)


@pytest.mark.parametrize("max_host_pages", [0, 1, 50])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_cancelling_everything_leaves_an_engine_that_answers(policy: str, max_host_pages: int):
    """Case 6.7, with every policy, with pages in the cache and on the host; five times."""
    engine, executor = fake_engine(
        small_config(policy=policy), num_pages=12, max_host_pages=max_host_pages
    )
    for round_number in range(5):
        answers: dict[str, Answer] = {}
        for number in range(20):
            one = prompt(6 + number % 3, first=number % 2)
            add_request(engine, request(f"r{number}", one, max_tokens=30, priority=number % 3))
        for _ in range(5 + round_number):
            step(engine, answers)
        for number in range(20):
            engine.abort(f"r{number}")
            engine.check()
        load = engine.load()
        assert load.num_free_pages == load.num_usable_pages
        probe = request("probe", prompt(6), max_tokens=12)
        add_request(engine, probe)
        finish(engine, answers)
        assert answers["probe"] == run_alone(probe, engine.config, engine.limits)
        assert {a.finish_reason for name, a in answers.items() if name != "probe"} == {
            FinishReason.CANCELLED
        }
    assert executor.num_host_pages <= max_host_pages + 1


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6, 9])
def test_an_abort_frees_everything_at_once_though_pages_are_cached(num_steps: int):
    """Case 6.1: queued, in the first and in a later chunk, decoding; what it read and wrote."""
    engine, executor = fake_engine()
    ask(engine, executor, request("warm", prompt(12), max_tokens=1))
    add_request(engine, request("a", prompt(40), max_tokens=20))
    for _ in range(num_steps):
        engine.step()
    num_dispatched = len(executor.keys)
    engine.abort("a")
    engine.check()
    assert engine.load().num_free_pages == engine.load().num_usable_pages
    (last,) = engine.step()
    assert last.finish_reason is FinishReason.CANCELLED
    assert len(executor.keys) == num_dispatched
    assert not engine.has_work


def test_two_that_compute_the_same_at_once_share_nothing_and_leave_one_copy():
    """Neither may read the other's pages before they are written; later ones hit one of them."""
    engine, executor = fake_engine(num_pages=40)
    twins = [request(f"r{n}", prompt(30), max_tokens=6) for n in range(3)]
    for one in twins:
        add_request(engine, one)
    answers = finish(engine)
    assert list(answers.values()) == [run_alone(twins[0], engine.config, engine.limits)] * 3
    assert engine.load().num_cached_pages == 34 // 4 + 0
    assert ask(engine, executor, twins[0])[0].num_cached_tokens == 28
