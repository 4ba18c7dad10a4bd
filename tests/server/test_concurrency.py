"""The gate: never more calls inside than its limit; a refusal says when a place will be free."""

import asyncio
from contextlib import AbstractContextManager

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from octavo.server.concurrency import MAX_RETRY_S, MIN_RETRY_S, ConcurrencyGate
from octavo.server.reply import Reply
from octavo.server.status import Refusal

from .harness import detail, eventually, reason_of, refused, request, running


class _Crowd:
    """Calls at a gate, under a clock that only moves when told."""

    def __init__(self, limit: int) -> None:
        self.now_s = 100.0
        self.gate = ConcurrencyGate(limit, lambda: self.now_s)
        self._inside: list[AbstractContextManager[None]] = []

    def enter(self, count: int = 1) -> None:
        for _ in range(count):
            call = self.gate.enter()
            call.__enter__()
            self._inside.append(call)

    def leave(self, count: int = 1) -> None:
        for _ in range(count):
            self._inside.pop(0).__exit__(None, None, None)

    def turn_over(self, *, every_s: float, count: int = 1, times: int = 200) -> None:
        """So many leave, and as many come, again and again."""
        for _ in range(times):
            self.now_s += every_s
            self.leave(count)
            self.enter(count)

    def refusal_s(self) -> float:
        """When one who is refused now is told to come back."""
        with pytest.raises(Refusal) as refusal:
            self.enter()
        assert refusal.value.retry_after_s is not None
        return refusal.value.retry_after_s


@pytest.mark.parametrize("every_s", [0.25, 2.0, 20.0])
@pytest.mark.parametrize("count", [1, 2])
def test_the_time_to_retry_is_when_the_next_place_is_free(every_s: float, count: int) -> None:
    """Breaks if of several calls that leave at once only the first counts."""
    crowd = _Crowd(8)
    crowd.enter(8)
    crowd.turn_over(every_s=every_s, count=count)
    assert crowd.refusal_s() == pytest.approx(every_s / count, rel=0.4)


def test_who_is_refused_later_comes_behind_those_who_were_told_before() -> None:
    """Breaks if all are told the same time, at which one place is free."""
    crowd = _Crowd(2)
    crowd.enter(2)
    crowd.turn_over(every_s=0.5)
    first_s, *later_s = (crowd.refusal_s() for _ in range(5))
    assert later_s == pytest.approx([first_s * n for n in (2, 3, 4, 5)])
    crowd.now_s += 2 * first_s  # two of them have their place by now
    assert crowd.refusal_s() == pytest.approx(4 * first_s, rel=0.1)
    crowd.now_s += 3600.0
    crowd.turn_over(every_s=0.5)
    assert crowd.refusal_s() == pytest.approx(first_s, rel=0.1)


def test_nobody_comes_behind_those_for_whom_there_was_room() -> None:
    """Breaks if what they were told outlives the crowd: the next one refused waits long."""
    crowd = _Crowd(8)
    crowd.enter(8)
    crowd.turn_over(every_s=0.5)
    for _ in range(100):
        crowd.refusal_s()
    crowd.leave(8)
    crowd.enter(8)
    assert crowd.refusal_s() == pytest.approx(0.5, rel=0.4)


def test_times_to_retry_are_no_busy_loop_and_no_guess_about_the_far_future() -> None:
    crowd = _Crowd(2)
    crowd.enter(2)
    assert MIN_RETRY_S < crowd.refusal_s() < MAX_RETRY_S, "a guess: nothing was seen"
    assert [crowd.refusal_s() for _ in range(1000)][-1] == MAX_RETRY_S
    crowd.turn_over(every_s=0.01, times=10_000)
    assert crowd.refusal_s() == MIN_RETRY_S
    crowd.now_s += 600.0  # all hang
    assert crowd.refusal_s() == MAX_RETRY_S


def test_only_a_crowd_tells_how_fast_it_leaves() -> None:
    """Breaks if an hour with one call an hour counts: the next refusal would say an hour."""
    crowd = _Crowd(8)
    crowd.enter(8)
    crowd.turn_over(every_s=0.5)
    before_s = crowd.refusal_s()
    crowd.leave(7)
    crowd.now_s += 3600.0
    crowd.leave()
    crowd.enter(8)
    assert crowd.refusal_s() == pytest.approx(before_s, rel=0.2)


def test_concurrency_limit_holds_in_every_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 10.5: counts handlers inside, through refusals and cancels, four waves of five."""
    inside, most = 0, 0
    send = Reply.send

    async def counted(self: Reply) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            await send(self)
        finally:
            inside -= 1

    monkeypatch.setattr(Reply, "send", counted)

    async def scenario() -> None:
        async with running(max_concurrent_calls=2) as at:
            for wave in range(4):
                calls = [at.inference.Generate(request(max_tokens=100)) for _ in range(5)]
                firsts = await asyncio.gather(
                    *(call.read() for call in calls), return_exceptions=True
                )
                errors = [first for first in firsts if isinstance(first, grpc.aio.AioRpcError)]
                assert len(errors) == 3, f"wave {wave}"
                assert {reason_of(error) for error in errors} == {"TOO_MANY_CALLS"}
                assert inside == 2
                for call in calls:
                    call.cancel()
                await eventually(lambda: inside == 0)
                at.engine.step()
                await eventually(lambda: len(at.server.router) == 0)
            assert most == 2

    asyncio.run(scenario())


def test_a_refusal_carries_the_time_to_retry_over_the_wire() -> None:
    async def scenario() -> None:
        async with running(max_concurrent_calls=1, clock=lambda: 5.0) as at:
            inside = at.inference.Generate(request(max_tokens=100))
            await inside.read()
            for nth in (1, 2):
                error = await refused(at.inference.Generate(request()).read())
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert reason_of(error) == "TOO_MANY_CALLS"
                assert detail(error, RetryInfo).retry_delay.ToSeconds() == nth
                metadata = detail(error, ErrorInfo).metadata
                assert dict(metadata) == {"retry_after_s": f"{nth}.000"}
            inside.cancel()

    asyncio.run(scenario())
