"""Guides that cannot be followed to an end, over a real port with a real engine: the request ends
by its own doing, never as a fault of the server, and what came before stays right."""

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from llguidance import LLParserLimits

from octavo.engine import guides
from octavo.server import octavo_pb2 as pb
from octavo.server import octavo_pb2_grpc
from tests.models.tiny_checkpoints import random_tensors, tiny_config, write_huggingface

from .harness import kinds
from .real_server import serving


def ask(guide: pb.Guide, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.Sampling(max_tokens=60, guide=guide, **sampling),
    )


def text_of(events: list[pb.GenerateEvent]) -> bytes:
    return b"".join(event.token_delta.text for event in events)


def test_a_guide_that_meets_its_limit_is_no_fault_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits are low here, so that they are met in the middle; nothing else is made up."""
    monkeypatch.setattr(guides, "_LIMITS", LLParserLimits(step_max_items=40, verbose_errors=False))
    config = tiny_config(max_position=1024)
    write_huggingface(tmp_path / "model", config, random_tensors(config), dtype=np.float32)
    with serving(tmp_path / "model") as address, grpc.insecure_channel(address) as channel:
        inference = octavo_pb2_grpc.InferenceStub(channel)
        control = octavo_pb2_grpc.ControlStub(channel)
        asked = pb.TokenizeRequest(text="b", add_special_tokens=False)
        (b,) = inference.Tokenize(asked).token_ids
        for guide, reason in (
            (pb.Guide(grammar='start: a "b"\na: a a | "a"'), "Too many items"),
            (pb.Guide(regex="a{3}b"), "none in common"),
        ):
            events = list(inference.Generate(ask(guide, banned_token_ids=[b])))
            assert set(text_of(events)) == set(b"a")
            failed = events[-1].failed
            assert failed.code == pb.FAILURE_CODE_GUIDE, failed
            assert reason in failed.message
            assert not failed.retryable
            assert kinds(events).count("finished") == 0
        # Others go on, with the same guide if they end before.
        events = list(inference.Generate(ask(pb.Guide(regex="a{3}b"))))
        assert text_of(events) == b"aaab"
        assert kinds(events)[-1] == "completed"
        load = control.GetLoad(pb.GetLoadRequest())
        assert load.finished_total["guide"] == 2
        assert load.finished_total["error"] == 0
        assert not load.num_running
