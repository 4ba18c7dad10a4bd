"""A whole process: READY, SIGTERM once and twice, Control.Drain, a drain that cannot end."""

import asyncio
import re
import signal
import threading
import time
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.server import octavo_pb2 as pb
from octavo.server import octavo_pb2_grpc, serving
from octavo.server.client import open_channel
from octavo.server.control_service import ControlService
from octavo.server.progress import OnProgress
from octavo.server.served_model import ServedModel
from octavo.server.server import Server, ServerConfig

from .fakes import OnOutputs
from .harness import kinds, request, token_ids
from .processes import fake_server_command, server_process

TOO_MANY = 4000  # output tokens that no test waits for


def wait_until_not_ready(channel: grpc.Channel) -> None:
    """A signal takes a moment to arrive."""
    health: Any = health_pb2_grpc.HealthStub(channel)
    while (
        health.Check(health_pb2.HealthCheckRequest()).status
        == health_pb2.HealthCheckResponse.SERVING
    ):
        time.sleep(0.01)


def test_ready_is_one_line_on_stdout() -> None:
    with server_process(fake_server_command()) as server:
        assert re.fullmatch(
            r"READY grpc=127\.0\.0\.1:\d+ model=fake device=cpu attention=reference "
            r"pages=1024 slots=8 compile_s=\d+\.\d\n",
            server.ready_line,
        )
        server.process.send_signal(signal.SIGINT)
        rest, errors = server.process.communicate(timeout=10)
        assert (rest, errors) == ("", "compiling 12 of 20\n")
        assert server.process.returncode == 0


def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones() -> None:
    with (
        server_process(fake_server_command()) as server,
        open_channel(server.address) as channel,
    ):
        inference = octavo_pb2_grpc.InferenceStub(channel)
        call = inference.Generate(request(max_tokens=40))
        events = [next(call), next(call)]
        server.process.send_signal(signal.SIGTERM)
        wait_until_not_ready(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            next(inference.Generate(request()))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in str(refusal.value.details())
        events += list(call)
        assert kinds(events)[-1] == "completed"
        assert len(token_ids(events)) == 40
        assert server.process.wait(timeout=10) == 0
        assert server.process.stderr is not None
        assert server.process.stderr.readlines()[-1] == (
            "draining 1 streams; a second signal stops at once\n"
        )


def test_what_outlasts_the_drain_gets_a_failed_event() -> None:
    with (
        server_process(fake_server_command(drain_timeout_s=0.1)) as server,
        open_channel(server.address) as channel,
    ):
        call = octavo_pb2_grpc.InferenceStub(channel).Generate(request(max_tokens=TOO_MANY))
        next(call)
        server.process.send_signal(signal.SIGTERM)
        events = list(call)
        assert set(kinds(events)[:-1]) <= {"token_delta"}
        assert events[-1].failed.code == pb.FAILURE_CODE_SHUTTING_DOWN
        assert events[-1].failed.retryable
        assert call.code() is grpc.StatusCode.OK
        assert server.process.wait(timeout=10) == 0


def test_a_second_signal_stops_at_once() -> None:
    """Every stream still gets its terminal event, and nothing is left to complain on stderr."""
    with (
        server_process(fake_server_command()) as server,
        open_channel(server.address) as channel,
    ):
        generate = octavo_pb2_grpc.InferenceStub(channel).Generate
        calls = [generate(request(max_tokens=TOO_MANY)) for _ in range(14)]
        for call in calls:
            next(call)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None  # it drains
        server.process.send_signal(signal.SIGINT)
        for call in calls:
            assert list(call)[-1].failed.code == pb.FAILURE_CODE_SHUTTING_DOWN
        assert server.process.wait(timeout=10) == 1
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


def test_sigterm_leaves_load_balancers_time_and_sigint_does_not() -> None:
    with (
        server_process(fake_server_command(grace_s=0.5)) as server,
        open_channel(server.address) as channel,
    ):
        inference = octavo_pb2_grpc.InferenceStub(channel)
        started_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_until_not_ready(channel)
        # Refused by health, and taken all the same.
        assert kinds(list(inference.Generate(request(max_tokens=2))))[-1] == "completed"
        assert server.process.wait(timeout=10) == 0
        assert time.monotonic() - started_s > 0.5
        assert server.process.stderr is not None
        assert server.process.stderr.readlines()[-1] == (
            "taking requests for 0.5 s more, so that load balancers can withdraw; a second signal "
            "stops at once\n"
        )
    with server_process(fake_server_command(grace_s=3600)) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=10) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_the_grace_short(second: signal.Signals) -> None:
    with (
        server_process(fake_server_command(grace_s=3600)) as server,
        open_channel(server.address) as channel,
    ):
        call = octavo_pb2_grpc.InferenceStub(channel).Generate(request(max_tokens=TOO_MANY))
        next(call)
        server.process.send_signal(signal.SIGTERM)
        wait_until_not_ready(channel)
        server.process.send_signal(second)
        assert list(call)[-1].failed.code == pb.FAILURE_CODE_SHUTTING_DOWN
        assert server.process.wait(timeout=10) == 1


def test_control_drain_ends_the_process_and_sigterm_does_not_cut_it_short() -> None:
    """As an orchestrator does it: a hook asks for the drain, then comes the signal."""
    with (
        server_process(fake_server_command()) as server,
        open_channel(server.address) as channel,
    ):
        call = octavo_pb2_grpc.InferenceStub(channel).Generate(request(max_tokens=40))
        events = [next(call)]
        octavo_pb2_grpc.ControlStub(channel).Drain(pb.DrainRequest())
        server.process.send_signal(signal.SIGTERM)
        events += list(call)
        assert kinds(events)[-1] == "completed"
        assert len(token_ids(events)) == 40
        assert server.process.wait(timeout=10) == 0


def test_control_drain_while_loading_ends_the_process() -> None:
    with server_process(fake_server_command(load_s=60), wait=False) as server:
        assert server.process.stderr is not None
        assert server.process.stderr.readline() == "compiling 12 of 20\n"
        # The port opened before; nothing says which it is but the process itself.
        (port,) = {
            one.laddr.port
            for one in psutil.Process(server.process.pid).net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        }
        with open_channel(f"127.0.0.1:{port}") as channel:
            octavo_pb2_grpc.ControlStub(channel).Drain(pb.DrainRequest())
        assert server.process.wait(timeout=10) == 1


def test_control_drain_while_loading_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the server goes before an answer that takes its time has reached the client."""
    begin_drain = ControlService.Drain

    async def drain(self: ControlService, *call: Any) -> pb.DrainResponse:
        answer = await begin_drain(self, *call)
        await asyncio.sleep(0.2)
        return answer

    monkeypatch.setattr(ControlService, "Drain", drain)

    def load(on_outputs: OnOutputs, on_progress: OnProgress) -> ServedModel:
        threading.Event().wait()  # to the end of the process, on a daemon thread
        raise AssertionError

    def ignore(*told: object) -> None:
        pass

    async def scenario() -> None:
        ports: asyncio.Queue[int] = asyncio.Queue()

        class TellingServer(Server):
            async def start(self) -> int:
                port = await super().start()
                ports.put_nowait(port)
                return port

        monkeypatch.setattr(serving, "Server", TellingServer)
        serve = asyncio.create_task(
            serving.serve_until_stopped(
                ServerConfig(port=0),
                load,
                stall_timeout_s=120.0,
                on_progress=ignore,
                announce=ignore,
            )
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{await ports.get()}") as channel:
            await octavo_pb2_grpc.ControlStub(channel).Drain(pb.DrainRequest())
            assert not await serve

    asyncio.run(scenario())


def test_an_engine_that_hangs_does_not_keep_the_process() -> None:
    with server_process(fake_server_command(hangs=True)) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 1


def test_a_signal_while_loading_does_not_wait_for_the_model() -> None:
    with server_process(fake_server_command(load_s=60), wait=False) as server:
        assert server.process.stderr is not None
        assert server.process.stderr.readline() == "compiling 12 of 20\n"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 1
