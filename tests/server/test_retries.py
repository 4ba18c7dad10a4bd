"""Refused clients that come back when they were told to, against the real host loop over gRPC.

Time is real, and the pace is measured on the spot, so a slow machine makes the test longer and not
other. Breaks when RetryInfo does not arrive, is too short, or the place it promises is given away.
"""

import asyncio
import time

from octavo.bench.retries import RetryOptions, RetryResults, measure_retries
from octavo.bench.workload import Workload
from tests.engine.fake_model import VOCAB_SIZE

from .host_loop import host_loop

STEP_S = 0.01
OPTIONS = RetryOptions(
    workload=Workload(prompt_tokens=6, output_tokens=12, seed=1),
    overload=1.5,
    requests=80,
    max_num_seqs=4,
    max_num_queued=4,
)


def test_who_waits_as_told_gets_in_and_who_does_not_is_refused_again() -> None:
    async def scenario() -> RetryResults:
        async with host_loop(max_num_queued=OPTIONS.max_num_queued) as at:
            at.steps.run_freely(STEP_S)
            results = await measure_retries(at.inference, OPTIONS, VOCAB_SIZE, time.monotonic)
            refused = dict(at.thread.load().refused_total)
            seen = [
                2 * one.refused - one.let_in_at_retry for one in (results.obeying, results.at_once)
            ]
            assert refused == {"max_num_queued": sum(seen)}
            return results

    results = asyncio.run(scenario())
    print(results)
    obeying, at_once = results.obeying, results.at_once
    assert obeying.sent == at_once.sent == OPTIONS.requests
    assert obeying.refused >= 20
    assert obeying.share is not None
    assert obeying.share >= 0.8
    assert at_once.refused >= 20
    assert at_once.share is not None
    assert at_once.share <= 0.2
