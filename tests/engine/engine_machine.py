"""Engine and FakeExecutor, as a Hypothesis state machine: every answer equals its run alone.

Use of a page that is wrong, not written or written over fails in FakeExecutor or changes a token.
What FakeExecutor cannot see, because equal tokens are equal whoever sent them, is checked here: a
hit needs an earlier request of the same tenant and salt that begins alike.
"""

from typing import override

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from octavo.configs.scheduling_config import PolicyName
from octavo.engine.admission import choice_id, split_choice_id
from octavo.engine.engine import Engine
from octavo.engine.request import FinishReason, Request
from octavo.engine.schedule import TransferKind

from .fake_guides import FakeGuides, guide
from .fake_model import EOS
from .fakes import (
    Answer,
    Clock,
    FakeExecutor,
    add_request,
    collect,
    limits_for,
    planned_costs,
    request,
    run_alone,
    small_config,
    step,
    whole_pages,
)
from .state_machine import HISTORIES, CountedMachine, few_entries

# What requests ask of their outputs besides: rules, several choices, guides, reports.
OPTIONS: list[dict[str, object]] = [
    *[{}] * 6,
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.0, "logit_bias": ((3, 1.5), (9, -2.0), (30, 0.5))},
    {"presence_penalty": 0.5, "min_tokens": 2, "n": 2},
    {"allowed_token_ids": (1, 2, 3, EOS), "min_tokens": 1},
    {"banned_token_ids": (5, EOS)},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 3},
    {"n": 2, "repetition_penalty": 2.0, "logprobs": True, "top_logprobs": 1},
    {"guide": guide(1)},
    {"guide": guide(2), "n": 2, "frequency_penalty": 0.5},
    {"guide": guide(3), "min_tokens": 3, "banned_token_ids": (1, 2)},
]

MAX_STEPS = 5_000  # to end what is live when a run ends; far more than any order needs


class EngineMachine(CountedMachine):
    """Adds, aborts, steps, pauses and waits, in any order, on engines of all kinds."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair", "deadline"]),
        page_size=st.integers(1, 4),
        num_pages=st.integers(3, 16),
        max_num_seqs=st.integers(1, 5),
        chunk=st.integers(1, 10),
        max_host_pages=st.sampled_from([0, 1, 6, 30]),
        is_import_dear=st.booleans(),
        hit_entries=st.sampled_from([128, 128, 1, 3]),
        rule_entries=st.sampled_from([256, 1, 3]),
        max_tenant_running=st.sampled_from([None, 1, 2]),
        inter_token_target_ms=st.sampled_from([None, 1.05]),
        prefix_cache=st.sampled_from([True, True, True, True, False]),
        deterministic=st.booleans(),
    )
    def start(
        self,
        policy: PolicyName,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        chunk: int,
        max_host_pages: int,
        is_import_dear: bool,
        hit_entries: int,
        rule_entries: int,
        max_tenant_running: int | None,
        inter_token_target_ms: float | None,
        prefix_cache: bool,
        deterministic: bool,
    ) -> None:
        self.patch = few_entries(hits=hit_entries, rules=rule_entries)
        self.patch.start()
        config = small_config(
            policy=policy,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            prefill_chunk_tokens=whole_pages(chunk, page_size) if deterministic else chunk,
            max_tenant_running=max_tenant_running,
            inter_token_target_ms=None if deterministic else inter_token_target_ms,
            prefix_cache=prefix_cache,
            deterministic=deterministic,
            priority_ageing_s=2.0,
            default_ttft_target_s=3.0,
        )
        self.limits = limits_for(config, num_pages)
        self.executor = FakeExecutor(config, self.limits)
        self.clock = Clock()
        self.engine = Engine(
            config,
            self.limits,
            self.executor,
            self.clock,
            planned_costs(config, import_s=1e9 if is_import_dear else 0.0),
            max_host_pages=max_host_pages,
            guides=FakeGuides(),
        )
        self.config = config
        self.answers: dict[str, Answer] = {}
        self.wanted: dict[str, Request] = {}
        self.expected: dict[str, Answer] = {}
        self.live: list[str] = []
        self.order: list[str] = []

    @rule(
        history=st.sampled_from(HISTORIES),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 9),
        tenant=st.sampled_from(["", "", "b", "c"]),
        salt=st.sampled_from(["", "", "", "s"]),
        priority=st.integers(0, 2),
        flags=st.integers(0, 31),
        options=st.sampled_from(OPTIONS),
        patience=st.sampled_from([None, None, None, 2, 6]),
    )
    def add(
        self,
        history: tuple[int, ...],
        length: int,
        max_tokens: int,
        tenant: str,
        salt: str,
        priority: int,
        flags: int,
        options: dict[str, object],
        patience: int | None,
    ) -> None:
        self._add(
            history[:length],
            max_tokens,
            tenant,
            salt,
            priority=priority,
            flags=flags,
            options=options,
            wait=patience,
        )

    @precondition(lambda self: self.wanted)
    @rule(which=st.integers(0, 99), tail=st.integers(0, 3), max_tokens=st.integers(1, 6))
    def go_on(self, which: int, tail: int, max_tokens: int) -> None:
        """A chat's next turn: an earlier prompt, what was answered, and a little more."""
        name = list(self.wanted)[which % len(self.wanted)]
        one = self.wanted[name]
        answered = self.expected[name].token_ids if name not in self.live else []
        prompt = (*one.prompt_token_ids, *answered, *HISTORIES[2][:tail])
        self._add(
            prompt,
            max_tokens,
            one.tenant,
            one.cache_salt,
            priority=1,
            flags=0,
            options={},
            wait=None,
        )

    def _add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        tenant: str,
        salt: str,
        *,
        priority: int,
        flags: int,
        options: dict[str, object],
        wait: int | None,
    ) -> None:
        self.count("add")
        prompt = prompt[: self.limits.max_model_len - 1]
        now_s = self.clock.now_s
        max_tokens = min(max_tokens, self.limits.max_model_len - len(prompt))
        sampling = {
            "temperature": float(flags & 1),
            "seed": flags % 3,
            "ignore_eos": bool(flags & 2) and "guide" not in options,
            "logprobs": bool(flags & 4),
            "prompt_logprobs": flags & 24 == 24,
            "prompt_top_logprobs": 1 if flags & 28 == 28 else 0,
        } | options
        if "min_tokens" in options:
            sampling["min_tokens"] = min(max_tokens, 3)
        one = request(
            f"r{len(self.order)}",
            prompt,
            max_tokens=max_tokens,
            arrival_s=now_s,
            tenant=tenant,
            cache_salt=salt,
            priority=priority,
            **sampling,
            reads_prefix_cache=flags != 8,
            deadline_s=None if wait is None or flags & 1 else now_s + wait,
            queue_ttl_s=None if wait is None or not flags & 1 else float(wait),
            ttft_target_s=None if wait is None else float(wait),
        )
        self.order.append(one.request_id)
        for choice in range(one.sampling.n):
            name = choice_id(one.request_id, choice)
            self.wanted[name] = one
            self.expected[name] = run_alone(one, self.config, self.limits, choice)
            self.live.append(name)
        add_request(self.engine, one)
        self.engine.check()

    @rule(later=st.sampled_from([0.0, 0.0, 0.0, 1.0]))
    def step(self, later: float) -> None:
        self._step(later)

    @rule(count=st.integers(2, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step(0.25)

    @rule()
    def pause(self) -> None:
        """A step is read and none is dispatched."""
        self.count("collect")
        collect(self.engine.collect(), self.answers)
        self._check()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        self.count("abort")
        request_id, choice = split_choice_id(self.live[which % len(self.live)])
        self.engine.abort(request_id, choice=choice if which % 2 else None)
        self.engine.check()

    @override
    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self._end()
            finally:
                self.patch.stop()

    def _end(self) -> None:
        if self.engine.failure is not None:
            return
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self._step(0.0)
        assert not self.engine.has_work, "somebody waits for ever"
        assert not self.live
        load = self.engine.load()
        assert load.num_free_pages == load.num_usable_pages, "a page leaked"
        assert load.num_running == load.num_queued == 0
        transfers = self.engine._scheduler.memory.transfers  # of what the next step will drop
        drops = sum(transfer.kind is TransferKind.DROP for transfer in transfers)
        assert len(transfers) == drops
        assert self.executor.num_host_pages - drops == load.num_host_pages, "a copy leaked"

    def _step(self, later: float) -> None:
        self.count("step")
        self.clock.now_s += later
        step(self.engine, self.answers)
        self._check()

    def _check(self) -> None:
        if self.engine.failure is not None:
            raise self.engine.failure
        self.engine.check()
        for name in [name for name in self.live if self._has_ended(name)]:
            self.live.remove(name)
            self._compare(name)

    def _has_ended(self, name: str) -> bool:
        return name in self.answers and self.answers[name].finish_reason is not None

    def _compare(self, name: str) -> None:
        answer, expected, one = self.answers[name], self.expected[name], self.wanted[name]
        if answer.finish_reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
            length, scored = len(answer.token_ids), len(answer.prompt_logprobs)
            assert answer.token_ids == expected.token_ids[:length]
            assert answer.logprobs == expected.logprobs[:length]
            assert answer.prompt_logprobs == expected.prompt_logprobs[:scored]
            assert answer.top == expected.top[: len(answer.top)]
        else:
            assert (answer.error is None) == (expected.finish_reason is not FinishReason.ERROR)
            assert answer == expected
        cached = answer.num_cached_tokens
        if not cached:
            return
        assert cached < len(one.prompt_token_ids)
        assert cached % self.config.page_size == 0
        if self.config.deterministic:
            assert cached % self.config.prefill_chunk_tokens == 0
        is_fork = split_choice_id(name)[1] > 0
        assert is_fork or (one.reads_prefix_cache and not one.sampling.prompt_logprobs)
        sources = (
            (*other.prompt_token_ids, *self.expected[its_name].token_ids)
            for its_name, other in self.wanted.items()
            if its_name != name and (other.tenant, other.cache_salt) == (one.tenant, one.cache_salt)
        )
        prefix = one.prompt_token_ids[:cached]
        assert any(source[:cached] == prefix for source in sources), "a hit that nobody wrote"
