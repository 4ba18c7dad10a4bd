"""What can never run is refused by name, with value and bound; the rest passes unchanged."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.configs.model_config import ModelConfig
from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine.admission import EngineLimits, admit, pick_seed
from octavo.engine.refusals import InvalidRequest
from octavo.engine.request import Request
from octavo.engine.sampling_params import Guide, GuideKind, SamplingParams

from .fakes import request

V = 100
CONFIG = EngineConfig(max_num_seqs=2, max_stop_ids=4, scheduling=SchedulingConfig(max_num_queued=3))
LIMITS = EngineLimits(vocab_size=V, max_model_len=20, num_pages=9, eos_token_ids=(7, 8))
NAN, INFINITY = float("nan"), float("inf")


def _changed(**changes: Any) -> Request:
    """A valid request with some fields replaced, whichever record they belong to."""
    fields = SamplingParams.__dataclass_fields__
    sampling = {name: value for name, value in changes.items() if name in fields}
    others = {name: value for name, value in changes.items() if name not in fields}
    base = Request(
        request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(), arrival_s=0.0
    )
    return replace(base, sampling=replace(base.sampling, **sampling), **others)


# Kinds 7.3 and 7.4: NaN passes checks of the form `x < low or x > high`; ids at the edge of the
# vocabulary reach the device as an index; bools, floats and strings are not counts.
REFUSED = [
    *[("temperature", v) for v in (NAN, INFINITY, -INFINITY, -1e-9, 1e-9, 100.5, True, "1", None)],
    *[("top_p", v) for v in (NAN, INFINITY, 0.0, -0.1, 1.0000001, True, "nan", None)],
    *[("min_p", v) for v in (NAN, -INFINITY, -0.1, 1.1, False, "0", 10**400)],
    *[("top_k", v) for v in (-2, 2**31, 1.0, True, "3", None, NAN)],
    *[("seed", v) for v in (-1, 2**64, 1.5, True, "1")],
    *[("max_tokens", v) for v in (0, -1, 19, 2**31, 2**63, 1.0, True, "1", NAN)],
    *[("ignore_eos", v) for v in (1, None)],
    *[("logprobs", v) for v in (5, None)],
    *[("prompt_logprobs", v) for v in (0, None)],
    *[
        (field, (1, v))
        for field in ("prompt_token_ids", "stop_token_ids")
        for v in (-1, V, V + 1, 2**31, 2**63, 1.0, True, "1", None)
    ],
    ("prompt_token_ids", ()),
    ("prompt_token_ids", (1,) * 20),
    ("prompt_token_ids", (1,) * 100_000),
    ("stop_token_ids", (1, 2, 3)),
    *[("top_logprobs", v) for v in (-1, 21, 1.0, True, None)],
    ("request_id", ""),
    ("request_id", "x" * 257),
    ("request_id", 7),
    ("arrival_s", NAN),
    ("deadline_s", NAN),
    ("deadline_s", INFINITY),
]


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: repr(value)[:30])
def test_refuses(field: str, value: Any):
    with pytest.raises(InvalidRequest) as refused:
        admit(_changed(**{field: value}), CONFIG, LIMITS)
    assert refused.value.field == field
    message = str(refused.value)
    assert message.startswith(field)
    assert refused.value.bound in message
    assert len(message) < 300, "a message must not echo a prompt"


ACCEPTED = [
    *[("temperature", v) for v in (0, 0.0, -0.0, 1, 1e-6, 0.7, 100)],
    *[("top_p", v) for v in (1, 1.0, 0.5, 1e-9)],
    *[("min_p", v) for v in (0, 1, 0.0, 0.5)],
    *[("top_k", v) for v in (0, 1, V - 1, V, V + 1, 2**31 - 1)],
    *[("seed", v) for v in (None, 0, 2**63, 2**64 - 1)],
    *[("max_tokens", v) for v in (None, 1, 18)],
    *[("prompt_token_ids", v) for v in ((0,), (V - 1,), (1,) * 19)],
    *[("stop_token_ids", v) for v in ((), (0,), (V - 1, 1), (7, 8, 1, 2))],
    *[("request_id", v) for v in ("x", "x" * 256)],
    *[("deadline_s", v) for v in (None, -5.0, 0, 1e9)],
]


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(("field", "value"), ACCEPTED, ids=lambda value: repr(value)[:30])
def test_accepts_unchanged(field: str, value: Any):
    wanted = _changed(**{field: value})
    assert admit(wanted, CONFIG, LIMITS).request == wanted


def test_names_the_element_at_fault():
    with pytest.raises(
        InvalidRequest, match=r"prompt_token_ids\[2\] is 100; it must be .* \[0, 100\)"
    ):
        admit(request("a", (1, 2, V, V)), CONFIG, LIMITS)


def test_names_both_numbers_when_prompt_and_output_exceed_the_context():
    with pytest.raises(InvalidRequest, match=r"max_tokens is 18.*\[1, 17\].* 3 tokens .* 20"):
        admit(request("a", (1, 2, 3), max_tokens=18), CONFIG, LIMITS)


def test_no_more_likely_ids_than_there_are():
    """Else the rest is padding, which is no id."""
    few = EngineLimits(vocab_size=12, max_model_len=20, num_pages=9, eos_token_ids=(7,))
    with pytest.raises(InvalidRequest, match=r"top_logprobs is 13.* \[0, 12\]"):
        admit(request("a", logprobs=True, top_logprobs=13), CONFIG, few)
    admit(request("a", logprobs=True, top_logprobs=12), CONFIG, few)


@pytest.mark.parametrize(
    ("ids", "is_refused"),
    [
        ({}, False),
        ({"banned_token_ids": (7,)}, False),
        ({"banned_token_ids": (7, 8)}, True),
        ({"allowed_token_ids": (50, 8)}, False),
        ({"allowed_token_ids": (50, 51)}, True),
    ],
)
def test_a_guide_needs_an_end_that_may_come(ids: dict[str, Any], is_refused: bool):
    """Else it streams all its text and then fails: no id is left that both let through."""
    wanted = request("a", ignore_eos=False, guide=Guide(kind=GuideKind.REGEX, text="a*"), **ids)
    if not is_refused:
        admit(wanted, CONFIG, LIMITS)
        return
    with pytest.raises(InvalidRequest, match=r"_token_ids is 2; .* end-of-sequence id"):
        admit(wanted, CONFIG, LIMITS)


def test_no_max_tokens_means_up_to_the_context_limit():
    assert admit(request("a", (1, 2, 3)), CONFIG, LIMITS).max_tokens == 17


@pytest.mark.parametrize(
    ("own", "ignore_eos", "stop_ids"),
    [
        ((), False, (7, 8)),
        ((), True, ()),
        ((5,), True, (5,)),
        ((5, 8, 5), False, (5, 8, 7)),
    ],
)
def test_stop_ids_are_its_own_and_the_models(
    own: tuple[int, ...], ignore_eos: bool, stop_ids: tuple[int, ...]
):
    """Kind 2.4: ignore_eos silences the model's ids, never the request's own."""
    state = admit(request("a", stop_token_ids=own, ignore_eos=ignore_eos), CONFIG, LIMITS)
    assert state.stop_ids == stop_ids


def test_top_k_minus_1_is_the_devices_word_for_all():
    """Kind 3.1: -1 on the device would be something else than no truncation."""
    assert admit(request("a", top_k=-1), CONFIG, LIMITS).request.sampling.top_k == 0


def test_an_invalid_request_crosses_a_process_border():
    error = InvalidRequest("stop_token_ids", 9, "less", 3)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.field, copy.value, copy.bound, copy.index) == (
        "stop_token_ids[3] is 9; it must be less",
        "stop_token_ids",
        9,
        "less",
        3,
    )


def test_picked_seeds_depend_on_engine_and_ordinal_only():
    seeds = {
        pick_seed(engine_seed, ordinal)
        for engine_seed in (0, 1, 2**64 - 1)
        for ordinal in range(99)
    }
    assert len(seeds) == 3 * 99
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert pick_seed(0, 0) == 1041621211125469266  # the same in every process and release


def _model(max_position: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=max_position,
    )


@pytest.mark.parametrize(
    ("max_model_len", "max_position", "num_pages", "resolved"),
    [
        (None, 64, 100, 64),
        (None, 64, 3, 33),  # two pages of 16 and the last token, which needs none
        (40, 64, 100, 40),
        (33, 64, 3, 33),
    ],
)
def test_context_limit_is_what_model_and_pages_allow(
    max_model_len: int | None, max_position: int, num_pages: int, resolved: int
):
    limits = EngineLimits.resolve(
        EngineConfig(max_model_len=max_model_len),
        _model(max_position),
        num_pages=num_pages,
        eos_token_ids=[1],
    )
    assert limits.max_model_len == resolved


@pytest.mark.parametrize(
    ("config", "num_pages", "num_eos", "message"),
    [
        (EngineConfig(max_model_len=65), 100, 1, "max_model_len is 65; it must be at most 64"),
        (EngineConfig(max_model_len=34), 3, 1, "max_model_len is 34; it must be at most 33"),
        (EngineConfig(), 1, 1, "num_pages is 1"),
        (EngineConfig(max_stop_ids=2), 9, 3, "max_stop_ids is 2; it must be at least 3"),
    ],
)
def test_limits_that_contradict_the_config_are_refused(
    config: EngineConfig, num_pages: int, num_eos: int, message: str
):
    with pytest.raises(ValueError, match=message):
        EngineLimits.resolve(
            config, _model(64), num_pages=num_pages, eos_token_ids=list(range(num_eos))
        )
