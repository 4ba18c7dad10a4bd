"""Tenant, scheduling and cache options on the wire, and refusals for load."""

import asyncio
import dataclasses
import math
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine.refusals import Overloaded
from octavo.server import conversion
from octavo.server import octavo_pb2 as pb
from octavo.server.client import retry_after_s

from .harness import detail, eventually, field_of, kinds, reason_of, refused, request, running


def test_every_field_reaches_the_engine_in_its_unit() -> None:
    async def scenario() -> None:
        async with running() as at:
            asked = request(request_id="all")
            asked.tenant = "acme"
            asked.scheduling.CopyFrom(
                pb.Scheduling(
                    priority=-7,
                    request_class="chat",
                    ttft_target_ms=1500,
                    tpot_target_ms=0.5,
                    queue_ttl_ms=30_000,
                )
            )
            asked.kv.CopyFrom(pb.KvOptions(cache_salt="pepper", bypass_prefix_cache=True))
            calls = [at.inference.Generate(asked), at.inference.Generate(request())]
            await eventually(lambda: len(at.engine.submitted) == 2)
            got, absent = sorted(at.engine.submitted, key=lambda one: one.request_id != "all")
            assert (got.tenant, got.priority, got.request_class) == ("acme", -7, "chat")
            assert (got.ttft_target_s, got.tpot_target_s, got.queue_ttl_s) == (1.5, 0.0005, 30.0)
            assert (got.cache_salt, got.reads_prefix_cache) == ("pepper", False)
            assert (absent.tenant, absent.priority, absent.request_class) == ("", 0, "")
            assert absent.ttft_target_s is absent.tpot_target_s is absent.queue_ttl_s is None
            assert (absent.cache_salt, absent.reads_prefix_cache) == ("", True)
            for call in calls:
                call.cancel()

    asyncio.run(scenario())


LONG = "x" * 257
TOO_LONG_MS = math.nextafter(86_400_000, math.inf)
BAD_TARGETS = (math.nan, math.inf, -math.inf, 0, -1, TOO_LONG_MS, 1e300)
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tenant": LONG}, "tenant"),
    *[({"scheduling": {"priority": bad}}, "scheduling.priority") for bad in (-101, 101, -(2**63))],
    ({"scheduling": {"request_class": LONG}}, "scheduling.request_class"),
    *[
        ({"scheduling": {name: bad}}, f"scheduling.{name}")
        for name in ("ttft_target_ms", "tpot_target_ms", "queue_ttl_ms")
        for bad in BAD_TARGETS
    ],
    ({"kv": {"cache_salt": LONG}}, "kv.cache_salt"),
]


def test_bad_fields_are_named_as_they_were_sent() -> None:
    async def scenario() -> None:
        async with running() as at:
            for fields, path in BAD_FIELDS:
                bad = pb.GenerateRequest(text="a", **fields)
                error = await refused(at.inference.Generate(bad).read())
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
                assert field_of(error) == path
                assert str(error.details()).startswith(path.split(".")[-1])
            bad = pb.GenerateRequest(text="a", scheduling={"ttft_target_ms": -5})
            error = await refused(at.inference.Generate(bad).read())
            assert error.details() == (
                "ttft_target_ms is -5.0; in seconds it must be in (0, 86400]"
            )
            assert at.engine.submitted == []
            assert len(at.server.router) == 0

    asyncio.run(scenario())


def test_what_lies_on_a_bound_is_taken() -> None:
    fine: list[dict[str, Any]] = [
        {"tenant": "x" * 256, "kv": {"cache_salt": "\U0001f600" * 256}},
        {"scheduling": {"priority": -100, "ttft_target_ms": 86_400_000}},
        {"scheduling": {"priority": 100, "tpot_target_ms": 1e-6, "queue_ttl_ms": 1e-6}},
    ]

    async def scenario() -> None:
        async with running() as at:
            for fields in fine:
                call = at.inference.Generate(pb.GenerateRequest(text="a", **fields))
                assert kinds([await call.read()]) == ["accepted"]
                call.cancel()

    asyncio.run(scenario())


REASONS = {
    "max_num_queued": "QUEUE_FULL",
    "max_queued_tokens": "TOKENS_QUEUED",
    "max_predicted_wait_s": "PREDICTED_WAIT",
    "max_tenant_queued": "TENANT_QUEUE_FULL",
    "max_tenant_tokens": "TENANT_TOKENS",
    "a bound of a later engine": "OVERLOADED",
}


def test_a_refusal_for_load_says_which_bound_and_when_to_retry() -> None:
    async def scenario() -> None:
        async with running() as at:
            for bound, reason in REASONS.items():
                at.engine.refusal = Overloaded("much is waiting", bound, 2.3456)
                error = await refused(at.inference.Generate(request()).read())
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert error.details() == "much is waiting"
                assert reason_of(error) == reason
                info = detail(error, ErrorInfo)
                assert dict(info.metadata) == {"bound": bound, "retry_after_s": "2.346"}
                delay = detail(error, RetryInfo).retry_delay
                assert (delay.seconds, delay.nanos) == (2, 345_600_000)
                assert len(at.server.router) == 0
            at.engine.refusal = None
            error = await refused(at.inference.Generate(request(max_tokens=0)).read())
            info = detail(error, ErrorInfo)
            assert dict(info.metadata) == {}

    asyncio.run(scenario())


def test_each_reason_belongs_to_a_flag() -> None:
    names = {field.name for field in dataclasses.fields(SchedulingConfig)}
    assert conversion._OVERLOAD_REASONS.keys() <= names


def test_clients_can_read_the_time_to_retry() -> None:
    async def scenario() -> None:
        async with running() as at:
            at.engine.refusal = Overloaded("much is waiting", "max_num_queued", 2.5)
            assert retry_after_s(await refused(at.inference.Generate(request()).read())) == 2.5
            at.engine.refusal = None
            assert (
                retry_after_s(await refused(at.inference.Generate(request(top_p=2)).read())) is None
            )

    asyncio.run(scenario())
