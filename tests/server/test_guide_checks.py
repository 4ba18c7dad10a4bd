"""Guides that take long to compile, over a real port: who waits for them, and for how long."""

import asyncio
import threading
from collections.abc import Callable, Coroutine

import grpc
import pytest

from octavo.engine.sampling_params import Guide, GuideKind
from octavo.server import guide_checks
from octavo.server import octavo_pb2 as pb
from octavo.server.guide_checks import NUM_THREADS
from octavo.server.prompts import INLINE_BYTES

from .harness import eventually, reason_of, refused, request, running

LONG_TEXT = "a" * (INLINE_BYTES + 1)


class SlowCheck:
    """Compiles nothing until it may end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = threading.Event()

    def __call__(self, guide: Guide) -> None:
        self.begun.append(guide.text)
        assert self.may_end.wait(timeout=30)


@pytest.fixture
def check() -> SlowCheck:
    return SlowCheck()


def guided(regex: str) -> pb.GenerateRequest:
    return request(guide=pb.Guide(regex=regex))


def run(scenario: Callable[[], Coroutine[None, None, None]], check: SlowCheck) -> None:
    """Lets the threads go in the end, whatever happened."""
    try:
        asyncio.run(scenario())
    finally:
        check.may_end.set()


def test_slow_guides_hold_up_no_request_without_one(check: SlowCheck) -> None:
    """As many as there may be calls. Fails if guides share the threads that tokenise."""

    async def scenario() -> None:
        async with running(model_facts={"check_guide": check}) as at:
            calls = [at.inference.Generate(guided(f"a{number}")) for number in range(60)]
            await eventually(lambda: len(at.server.router) == len(calls))
            await eventually(lambda: len(check.begun) == NUM_THREADS)
            asked = pb.TokenizeRequest(text=LONG_TEXT, add_special_tokens=False)
            answer = await at.inference.Tokenize(asked, timeout=5)
            assert len(answer.token_ids) == len(LONG_TEXT)
            plain = request(LONG_TEXT, max_tokens=1)
            assert (await at.inference.Generate(plain, timeout=5).read()).HasField("accepted")
            assert len(check.begun) == NUM_THREADS
            for call in calls:
                call.cancel()

    run(scenario, check)


@pytest.mark.parametrize("ends_by", ["cancel", "deadline"])
def test_a_call_that_ends_does_not_wait_for_its_guide(check: SlowCheck, ends_by: str) -> None:
    """Neither for a thread nor for the end of the compilation, and nothing runs afterwards."""

    async def scenario() -> None:
        async with running(model_facts={"check_guide": check}) as at:
            timeout = 0.5 if ends_by == "deadline" else None
            calls = [
                at.inference.Generate(guided(f"a{number}"), timeout=timeout)
                for number in range(NUM_THREADS + 3)
            ]
            await eventually(lambda: len(at.server.router) == len(calls))
            if ends_by == "cancel":
                await eventually(lambda: len(check.begun) == NUM_THREADS)
                for call in calls:
                    call.cancel()
            else:
                for call in calls:
                    error = await refused(call.read())
                    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: len(at.server.router) == 0)
            check.may_end.set()
            # A guide behind all of those is compiled, and of those none that had no thread yet.
            last = at.inference.Generate(guided("b"))
            assert (await last.read()).HasField("accepted")
            assert len(check.begun) == NUM_THREADS + 1
            (submitted,) = at.engine.submitted
            assert submitted.sampling.guide == Guide(kind=GuideKind.REGEX, text="b")
            last.cancel()

    run(scenario, check)


def test_a_guide_is_refused_when_it_takes_too_long(
    check: SlowCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_checks, "TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with running(model_facts={"check_guide": check}) as at:
            calls = [at.inference.Generate(guided(f"a{number}")) for number in range(5)]
            for call in calls:
                error = await refused(call.read())
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert reason_of(error) == "GUIDES_BUSY"
            assert at.engine.submitted == []
            await eventually(lambda: len(at.server.router) == 0)
            check.may_end.set()
            assert (await at.inference.Generate(guided("b")).read()).HasField("accepted")

    run(scenario, check)


def test_the_threads_end_with_the_server(check: SlowCheck) -> None:
    """One that compiles ends when it has; what waited for it is dropped."""
    check.may_end.set()

    def threads() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name.startswith("guide-checks")]

    async def scenario() -> None:
        async with running(model_facts={"check_guide": check}) as at:
            await at.inference.Generate(guided("a")).read()
            assert threads()
        await eventually(lambda: not threads())

    run(scenario, check)
