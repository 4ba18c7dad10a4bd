"""The port and what lies around the two services: health, reflection, loading, pings."""

import asyncio
import socket

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from octavo.server import octavo_pb2 as pb
from octavo.server import octavo_pb2_grpc
from octavo.server.server import Server, ServerConfig

from .fakes import served
from .harness import health, reason_of, refused, request, running


def test_from_loading_over_ready_to_draining() -> None:
    async def scenario() -> None:
        async with running(is_ready=False) as at:

            async def state() -> pb.ServerState:
                return (await at.control.GetServerInfo(pb.GetServerInfoRequest())).state

            at.server.lifecycle.stage = "compiling 12 of 20"
            assert await health(at) == (False, False, True)
            assert await state() == pb.SERVER_STATE_LOADING
            for call in (
                at.inference.Generate(request()).read(),
                at.inference.Tokenize(pb.TokenizeRequest(text="a")),
                at.control.GetModelInfo(pb.GetModelInfoRequest()),
                at.control.GetLoad(pb.GetLoadRequest()),
            ):
                error = await refused(call)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert reason_of(error) == "LOADING"
                assert "compiling 12 of 20" in str(error.details())

            await at.server.set_ready(served(at.engine))
            assert await health(at) == (True, True, True)
            assert await state() == pb.SERVER_STATE_READY

            at.server.drain.begin(timeout_s=1.0, grace_s=0.0)
            await at.server.drain.ended.wait()
            assert await health(at) == (False, False, True)
            assert await state() == pb.SERVER_STATE_DRAINING
            error = await refused(at.inference.Generate(request()).read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(error) == "DRAINING"
            assert (await at.control.GetModelInfo(pb.GetModelInfoRequest())).name == "fake"

    asyncio.run(scenario())


def test_a_model_that_comes_during_the_drain_does_not_make_it_ready() -> None:
    async def scenario() -> None:
        async with running(is_ready=False) as at:
            at.server.drain.begin()
            await at.server.drain.ended.wait()  # nothing was taken, so there is no grace
            await at.server.set_ready(served(at.engine))
            assert await health(at) == (False, False, True)

    asyncio.run(scenario())


def test_a_broken_engine_is_neither_ready_nor_alive() -> None:
    async def scenario() -> None:
        async with running() as at:
            await at.server.lifecycle.set_sound(False)
            assert await health(at) == (False, False, False)
            await at.server.lifecycle.set_sound(True)
            assert await health(at) == (True, True, True)

    asyncio.run(scenario())


def test_model_info_and_load() -> None:
    async def scenario() -> None:
        async with running(max_num_seqs=1) as at:
            info = await at.control.GetModelInfo(pb.GetModelInfoRequest())
            assert info == pb.GetModelInfoResponse(
                name="fake",
                vocab_size=258,
                max_model_len=4096,
                eos_token_ids=[256],
                has_chat_template=True,
                dtype="float32",
                device="cpu",
                max_num_seqs=8,
                num_pages=1024,
                page_size=16,
                num_executables=1,
                tensor_parallel_size=1,
                attention="reference",
            )
            calls = [at.inference.Generate(request()) for _ in range(3)]
            for call in calls:
                await call.read()
            at.engine.step(2)
            load = await at.control.GetLoad(pb.GetLoadRequest())
            assert load == pb.GetLoadResponse(
                num_running=1,
                num_queued=2,
                num_usable_pages=1023,
                num_free_pages=1020,
                num_streams=3,
                steps_total=2,
                prompt_tokens_total=15,
                finished_total={"stop": 2},
                num_cached_pages=11,
                num_host_pages=12,
                queued_tokens=13,
                cached_tokens_total=14,
                evicted_pages_total={"capacity": 15},
                evicted_age_s_total={"capacity": 20.5},
                exported_pages_total=16,
                imported_pages_total=17,
                predicted_wait_s=18.5,
                refused_total={"max_num_queued": 19},
            )

    asyncio.run(scenario())


def test_reflection_describes_the_services() -> None:
    async def scenario() -> None:
        async with running() as at:

            def describe() -> tuple[set[str], list[str]]:
                with grpc.insecure_channel(f"127.0.0.1:{at.port}") as channel:
                    database = ProtoReflectionDescriptorDatabase(channel)
                    service = DescriptorPool(database).FindServiceByName("octavo.v1.Inference")
                    return set(database.get_services()), list(service.methods_by_name)

            services, methods = await asyncio.to_thread(describe)
            assert {"octavo.v1.Inference", "octavo.v1.Control", "grpc.health.v1.Health"} < services
            assert methods == ["Generate", "Tokenize", "Detokenize"]

    asyncio.run(scenario())


def test_every_rpc_has_a_handler() -> None:
    """A method that is in the proto and not in the service would fail on its first call only."""
    for name, service in pb.DESCRIPTOR.services_by_name.items():
        module = __import__(f"octavo.server.{name.lower()}_service", fromlist=["x"])
        for method in service.methods_by_name:
            assert callable(getattr(getattr(module, f"{name}Service"), method))


def test_a_taken_port_is_an_error() -> None:
    """Fails if SO_REUSEPORT lets two servers share the port, or localhost's IPv6 address does."""

    async def scenario() -> None:
        async with running() as at:
            for host in ("127.0.0.1", "localhost"):
                second = Server(ServerConfig(host=host, port=at.port))
                with pytest.raises(OSError, match=rf"{host}:{at.port}: .*--port=0"):
                    await second.start()
                await second.stop()

    asyncio.run(scenario())


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as one:
        try:
            one.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", "127.0.0.1"])
def test_every_way_to_write_an_address(host: str) -> None:
    async def scenario() -> None:
        config = ServerConfig(host=host, port=0)
        server = Server(config)
        try:
            address = config.address(await server.start())
            async with grpc.aio.insecure_channel(address) as channel:
                control = octavo_pb2_grpc.ControlStub(channel)
                info = await control.GetServerInfo(pb.GetServerInfoRequest())
                assert info.state == pb.SERVER_STATE_LOADING
        finally:
            await server.stop()

    if "::1" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    asyncio.run(scenario())


def test_an_address_of_another_machine_is_an_error() -> None:
    async def scenario() -> None:
        for host in ("192.0.2.1", "no such host"):
            server = Server(ServerConfig(host=host, port=0))
            with pytest.raises(OSError, match=f"cannot listen on {host}:0"):
                await server.start()
            await server.stop()

    asyncio.run(scenario())


PINGING = (
    ("grpc.keepalive_time_ms", 200),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def test_pings_are_allowed_up_to_the_configured_rate() -> None:
    """Case 10.1: a silent stream under a pinging client. gRPC's default ends it at three pings."""

    async def after_4_s(min_ping_interval_ms: int) -> str:
        options = {"min_ping_interval_ms": min_ping_interval_ms}
        async with running(channel_options=PINGING, server_options=options) as at:
            call = at.inference.Generate(request())
            await call.read()
            try:
                async with asyncio.timeout(4):
                    await call.read()
            except TimeoutError:
                return "open"
            except grpc.aio.AioRpcError as error:
                return str(error.details())
            return "an event"

    async def scenario() -> None:
        assert await asyncio.gather(after_4_s(100), after_4_s(60_000)) == [
            "open",
            "Too many pings",
        ]

    asyncio.run(scenario())


def test_attention_that_is_not_the_platform_s_kernels_shows_in_info_and_load() -> None:
    async def scenario() -> None:
        reason = "head_dim 24: must be 64"
        facts = {"device": "gpu", "attention_reason": reason, "tensor_parallel_size": 4}
        async with running(model_facts=facts) as at:
            info = await at.control.GetModelInfo(pb.GetModelInfoRequest())
            assert info.attention == "reference"
            assert info.attention_fallback_reason == reason
            assert info.tensor_parallel_size == 4
            load = await at.control.GetLoad(pb.GetLoadRequest())
            assert load.is_attention_fallback

    asyncio.run(scenario())
