"""The promise of a deterministic engine: a needle in a batch has the bits that it has alone.

On this CPU plain matrix products are bit-equal whatever the number of rows, so a flag that does
nothing might pass. Hence the plants: products and attention whose sums depend on the executable's
shape, which the flag must make harmless, or on who else runs, which the start must refuse.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from octavo.configs.engine_config import EngineConfig
from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine import build, packing
from octavo.engine.engine import Engine
from octavo.engine.executor import DeviceExecutor
from octavo.engine.packing import StepResult, UploadLayout
from octavo.engine.request import Request, RequestOutput
from octavo.engine.sampling_checks import MAX_TOP_LOGPROBS
from octavo.engine.schedule import Schedule
from octavo.engine.self_check import check_determinism
from octavo.engine.step_shapes import StepKey
from octavo.models import decoder
from octavo.pallas_kernels import reference_decode, reference_prefill
from octavo.pallas_kernels.backend import Scoring

from .conftest import Model
from .fakes import add_request, request

CONFIG = EngineConfig(
    dtype="float32",
    max_num_seqs=5,
    prefill_chunk_tokens=16,
    page_size=8,
    num_pages=25,
    max_model_len=120,
    host_kv_bytes=1 << 20,
    deterministic=True,
    scheduling=SchedulingConfig(policy="priority"),
)
PROMPT = tuple((3 + at * at * 7) % 300 for at in range(41))  # two chunks and a part of one
NEEDLES: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.3, "logprobs": True},
    {"temperature": 0.7, "top_k": 20, "seed": 8, "logprobs": True, "prompt_logprobs": True},
]
MATES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": True, "top_logprobs": 2},
    {"frequency_penalty": 0.5, "logit_bias": ((5, 1.0), (9, -4.0))},
    {"prompt_logprobs": True, "prompt_top_logprobs": 2},
]
TRIALS = 15


class Haystack:
    """An engine, and the needle in one batch after the other.

    Attributes:
      num_preempted: Trials in which the needle lost its slot.
      num_cached: Trials in which some of its prompt was cached.
      num_shared: Trials in which another prompt's tokens shared a chunk with the needle's.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_requests = 0
        self.num_preempted = self.num_cached = self.num_shared = 0
        self.shared: set[str] = set()  # requests whose chunk was shared
        self.watch_chunks()
        self.alone = [self.answer(kind, f"alone{kind}", random.Random(0), 0) for kind in (0, 1, 2)]

    def differences(self, seeds: Sequence[int]) -> Iterator[int]:
        """The trials whose needle is other bits than alone, as they are found."""
        for seed in seeds:
            rng = random.Random(seed)
            kind = seed % len(NEEDLES)
            if rng.random() < 0.5:  # its prompt was there before, or a part of it
                length = rng.choice([20, 36, len(PROMPT)])
                self.run([self.mate(rng, (*PROMPT[:length], 5, 6), f"s{seed}")], rng)
            if self.answer(kind, f"s{seed}", rng, rng.randint(1, 12)) != self.alone[kind]:
                yield seed

    def differs(self, seeds: Sequence[int]) -> bool:
        """Whether any trial does; those after the first that does are not run."""
        return next(self.differences(seeds), None) is not None

    def answer(self, kind: int, salt: str, rng: random.Random, num_mates: int) -> bytes:
        """Ids and log-probabilities of the needle, among mates that come before and after it."""
        needle = self.request(
            PROMPT, max_tokens=24, cache_salt=salt, priority=rng.randint(0, 2), **NEEDLES[kind]
        )
        mates = [
            self.mate(rng, _any_prompt(rng), rng.choice([salt, "mates"])) for _ in range(num_mates)
        ]
        at = rng.randint(0, num_mates)
        outputs = self.run([*mates[:at], needle, *mates[at:]], rng)
        mine = [output for output in outputs if output.request_id == needle.request_id]
        self.num_preempted += mine[-1].num_preemptions > 0
        self.num_cached += mine[-1].num_cached_tokens > 0
        self.num_shared += needle.request_id in self.shared
        ids = [token_id for output in mine for token_id in output.token_ids + output.top_token_ids]
        logprobs = [
            logprob
            for output in mine
            for logprob in output.prompt_logprobs + output.logprobs + output.top_logprobs
        ]
        assert len(ids) >= 24
        assert len(logprobs) >= 24
        return np.array(ids, np.int32).tobytes() + np.array(logprobs, np.float32).tobytes()

    def watch_chunks(self) -> None:
        scheduler = self.engine._scheduler
        make = scheduler.schedule

        def schedule(now_s: float) -> Schedule | None:
            made = make(now_s)
            if made is not None and len(made.chunks) > 1:
                self.shared |= {chunk.state.request.request_id for chunk in made.chunks}
            return made

        vars(scheduler)["schedule"] = schedule

    def mate(self, rng: random.Random, prompt: tuple[int, ...], salt: str) -> Request:
        options = {"seed": rng.randrange(99)} | rng.choice(MATES)
        priority, max_tokens = rng.randint(0, 3), rng.randint(1, 50)
        return self.request(
            prompt, max_tokens=max_tokens, cache_salt=salt, priority=priority, **options
        )

    def request(self, prompt: tuple[int, ...], **options: Any) -> Request:
        self.num_requests += 1
        return request(f"r{self.num_requests}", prompt, **options)

    def run(self, requests: Sequence[Request], rng: random.Random) -> list[RequestOutput]:
        """Adds them one after the other, at any step, and runs all to their ends."""
        outputs: list[RequestOutput] = []
        left = list(requests)
        while left or self.engine.has_work:
            while left and (rng.random() < 0.4 or not self.engine.has_work):
                add_request(self.engine, left.pop(0))
            outputs += self.engine.step()
            self.engine.check()
            assert self.engine.failure is None
        return outputs


def _any_prompt(rng: random.Random) -> tuple[int, ...]:
    longest = rng.choice([6, 60])  # short ones share a chunk with the end of another
    return tuple(rng.randrange(300) for _ in range(rng.randint(1, longest)))


@pytest.fixture(scope="module")
def haystack(tiny_model: Model) -> Haystack:
    return Haystack(tiny_model.build(CONFIG))


def _check(haystack: Haystack, seeds: Sequence[int]) -> None:
    haystack.num_preempted = haystack.num_cached = haystack.num_shared = 0
    assert list(haystack.differences(seeds)) == []
    assert haystack.num_shared >= len(seeds) // 10, "too few shared chunks to prove anything"
    assert haystack.num_preempted >= len(seeds) // 10, "too few preemptions to prove anything"
    assert haystack.num_cached >= len(seeds) // 10, "too few hits to prove anything"


def test_the_needle_has_the_bits_that_it_has_alone(haystack: Haystack) -> None:
    """Must show 3, a share of its trials: mates, arrivals, chunks, cache, slots, preemptions."""
    _check(haystack, range(TRIALS))


@pytest.mark.full
def test_the_needle_in_a_thousand_batches(haystack: Haystack) -> None:
    """Must show 3."""
    _check(haystack, range(1000, 2000))


def test_the_table_holds_one_executable(haystack: Haystack) -> None:
    executables = haystack.engine._executor._table._executables
    assert [key for key in executables if isinstance(key, StepKey)] == [StepKey(5, 16)]


def test_start_leaves_nothing_behind(tiny_model: Model, haystack: Haystack) -> None:
    """The check at start ran on the slots that requests use."""
    load = haystack.engine.load()
    assert load.num_free_pages == load.num_usable_pages
    state = tiny_model.build(CONFIG)._executor._state
    (rows,) = [leaf for leaf in state if leaf.shape[1:] == (packing.STOP_IDS + 16,)]
    assert rows.shape[0] == CONFIG.max_num_seqs
    assert not np.asarray(rows)[:, packing.ACTIVE].any()


@pytest.fixture
def no_traces() -> Iterator[None]:
    """A layer is traced once for each shape: what was traced with a plant must not stay."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def _split_by_shape(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product summed in so many parts as the number of its rows says."""
    *outputs, inputs = weight.shape
    parts = np.array_split(np.arange(inputs), 1 + x.shape[0] % 7)
    flat = weight.reshape(-1, inputs)
    total = sum(x[:, part] @ flat[:, part].T for part in parts)
    return jnp.asarray(total).reshape(x.shape[0], *outputs)


def test_sums_that_depend_on_the_shape_show_without_the_flag_and_not_with_it(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, no_traces: None
) -> None:
    """A flag that does nothing fails here. With two slots there are few executables to compile."""
    monkeypatch.setattr(decoder, "linear", _split_by_shape)
    config = replace(CONFIG, max_num_seqs=2)
    assert Haystack(tiny_model.build(replace(config, deterministic=False))).differs(range(12))
    assert not Haystack(tiny_model.build(config)).differs(range(6))


def _decode_beside(
    attend: Any, q: Any, kv_layer: Any, work: Any, scoring: Scoring, sinks: Any
) -> jax.Array:
    """Rounds otherwise while several rows are live."""
    is_other = (work.kv_lens > 0).sum() > 1
    return _round_otherwise(is_other, attend, q, kv_layer, work, scoring, sinks)


def _decode_in_row(
    attend: Any, q: Any, kv_layer: Any, work: Any, scoring: Scoring, sinks: Any
) -> jax.Array:
    """Rounds otherwise in odd rows."""
    plain = attend(q, kv_layer, work, scoring, sinks)
    other = attend(q * 3, kv_layer, work, _by_three(scoring), sinks)
    return jnp.where((jnp.arange(q.shape[0]) % 2 == 1)[:, None, None], other, plain)


def _prefill_beside(
    attend: Any, q: Any, kv_layer: Any, work: Any, scoring: Scoring, sinks: Any
) -> jax.Array:
    """Rounds otherwise while several prompts share the chunk."""
    num_segments = work.page_table.shape[0]
    is_other = jnp.where(work.tokens.segment_of < num_segments, work.tokens.segment_of, 0).max() > 0
    return _round_otherwise(is_other, attend, q, kv_layer, work, scoring, sinks)


def _round_otherwise(
    condition: jax.Array,
    attend: Any,
    q: Any,
    kv_layer: Any,
    work: Any,
    scoring: Scoring,
    sinks: Any,
) -> jax.Array:
    return lax.cond(
        condition,
        lambda: attend(q * 3, kv_layer, work, _by_three(scoring), sinks),
        lambda: attend(q, kv_layer, work, scoring, sinks),
    )


def _by_three(scoring: Scoring) -> Scoring:
    return replace(scoring, scale=scoring.scale / 3)


@pytest.mark.parametrize(
    ("owner", "name", "plant"),
    [
        (reference_decode, "decode_attention", _decode_beside),
        pytest.param(reference_decode, "decode_attention", _decode_in_row, marks=pytest.mark.full),
        pytest.param(
            reference_prefill, "prefill_attention", _prefill_beside, marks=pytest.mark.full
        ),
    ],
)
def test_sums_that_depend_on_who_runs_show_with_the_flag_and_are_refused(
    tiny_model: Model,
    monkeypatch: pytest.MonkeyPatch,
    no_traces: None,
    owner: ModuleType,
    name: str,
    plant: Callable[..., jax.Array],
) -> None:
    """One executable does not help against it, so the check at start must find it."""
    monkeypatch.setattr(owner, name, partial(plant, getattr(owner, name)))
    refusals: list[str] = []

    def check(*args: Any, **options: Any) -> None:
        try:
            check_determinism(*args, **options)
        except ValueError as error:
            refusals.append(str(error))

    monkeypatch.setattr(build, "check_determinism", check)  # or there would be no engine to try
    haystack = Haystack(tiny_model.build(CONFIG))
    (refusal,) = refusals
    assert refusal.startswith("deterministic is True; it must be False on this device")
    assert haystack.differs(range(12))


def test_what_the_check_at_start_finds_ends_the_start(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("other bits than alone")

    monkeypatch.setattr(build, "check_determinism", refuse)
    with pytest.raises(ValueError, match="other bits than alone"):
        tiny_model.build(CONFIG)


class Watched(DeviceExecutor):
    """An executor whose traffic is seen, and whose results are changed from some call on.

    Attributes:
      slot_rows, rule_entries, mask_rows: What went up, without padding.
      samples, scores: Columns that came down with something in them.
    """

    def __init__(self, executor: DeviceExecutor, layout: UploadLayout) -> None:
        self.slot_rows: list[np.ndarray] = []
        self.rule_entries: list[np.ndarray] = []
        self.mask_rows: list[np.ndarray] = []
        self.samples, self.scores = set[int](), set[int]()
        self.num_calls = 0
        self.change: Callable[[StepResult], Any] = lambda result: None
        self.change_from = 0
        self._executor, self._layout = executor, layout

    def dispatch(
        self, key: StepKey, packed: np.ndarray, mask_rows: np.ndarray | None = None
    ) -> jax.Array:
        parts = self._layout.split(packed)
        masks = packing.no_masks(self._layout) if mask_rows is None else mask_rows
        for seen, rows in (
            (self.slot_rows, parts["slot_rows"]),
            (self.rule_entries, parts["rule_entries"]),
            (self.mask_rows, masks),
        ):
            seen += [row.copy() for row in rows if row[0] < self._layout.num_slots]
        return self._executor.dispatch(key, packed, mask_rows)

    def fetch(self, result: jax.Array) -> np.ndarray:
        found = self._executor.fetch(result).copy()
        step = packing.unpack(self._layout.key, found)
        self.samples |= set(np.flatnonzero(step.samples.any(0)).tolist())
        self.scores |= set(np.flatnonzero(step.scores.any(0)).tolist())
        if self.num_calls >= self.change_from:
            self.change(step)
        self.num_calls += 1
        return found


def test_the_check_at_start_asks_for_every_report_and_every_rule_and_compares_them(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a report is not asked for, so that zeros are compared, or a rule never runs."""
    given: list[Any] = []

    def keep(*args: Any, **sizes: int) -> None:
        given.extend([*args, sizes])

    monkeypatch.setattr(build, "check_determinism", keep)
    tiny_model.build(CONFIG)
    executor, layout, sizes = given
    plain = Watched(executor, layout)
    check_determinism(plain, layout, **sizes)
    asked = np.flatnonzero(np.any(plain.slot_rows, axis=0))
    assert set(range(packing.LOGPROBS, packing.STOP_IDS)) - {packing.CHOICE} <= set(asked)
    assert {entry[packing.RULE_COLUMN] for entry in plain.rule_entries} >= {packing.COUNTED, 0, 1}
    assert plain.mask_rows
    assert plain.samples == set(range(packing.SAMPLE_COLUMNS))
    assert plain.scores == set(range(packing.SCORE_COLUMNS))

    for name in ("samples", "scores"):
        for column in (0, packing.SAMPLE_LOGPROB, -MAX_TOP_LOGPROBS - 1, -1):
            changed = Watched(executor, layout)
            changed.change_from = plain.num_calls // 2

            def change(step: StepResult, name: str = name, column: int = column) -> None:
                getattr(step, name)[:, column] ^= 1

            changed.change = change
            with pytest.raises(ValueError, match="other bits than alone"):
                check_determinism(changed, layout, **sizes)
