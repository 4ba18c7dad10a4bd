"""AdmissionLedger: who may enter the queue, and when one who may not should come back. No JAX.

It counts what is live against the bounds of SchedulingConfig (engine/admission_bound.py). A refusal
names a time at which there will be room and keeps that room from others (engine/promises.py), so
that a client who comes back then is let in.

Pure: the caller brings the time and keeps threads apart.
"""

import reprlib
from dataclasses import dataclass

from ..configs.engine_config import EngineConfig
from .admission_bound import Bound
from .promises import PromiseBook, digest_of
from .refusals import InvalidRequest, Overloaded
from .request import Request
from .schedule import RequestState
from .tenants import Tenant, Tenants

MIN_RETRY_S = 0.1  # sooner is a busy loop
MAX_RETRY_S = 600.0  # the usual time-out of clients: a later promise would be kept for nobody
MAX_WAIT_S = 3600.0  # where next to nothing drains, more is no forecast
# What a request costs, its output included, to guess the pace of requests from that of tokens.
TYPICAL_REQUEST_TOKENS = 1024

_MESSAGES = {
    "max_num_queued": "{live} requests are live; max_num_seqs, {max_num_seqs}, may run and "
    "max_num_queued, {bound}, may wait",
    "max_predicted_wait_s": "a slot will be free in {wait_s:.1f} s; max_predicted_wait_s is "
    "{bound:g}",
    "max_queued_tokens": "{queued_tokens} prompt tokens wait and this prompt has {prompt}; "
    "max_queued_tokens, {bound}, may wait",
    "max_tenant_queued": "{tenant_queued} requests of tenant {tenant} wait; max_tenant_queued, "
    "{bound}, may",
    "max_tenant_tokens": "requests of tenant {tenant} hold {tenant_tokens} tokens and this one "
    "may need {tokens}; max_tenant_tokens is {bound}",
}


@dataclass(eq=False, kw_only=True)
class _Live:
    """A request that was let in and has not ended.

    Attributes:
      tenant: Whose it is.
      num_tokens: Tokens whose KV it needs before its next output: the prompt's, and after a
        preemption the outputs' too.
      work_tokens: Those of them that are still to be computed, as far as is known.
      most_tokens: Prompt and most output tokens.
      is_queued: It waits for a slot.
    """

    tenant: Tenant
    num_tokens: int
    work_tokens: int
    most_tokens: int
    is_queued: bool = True


class AdmissionLedger:
    """Counts live requests, refuses what exceeds a bound, and keeps its promises.

    `enter` is for whoever submits; the engine tells the rest. Each choice of a request that entered
    is one here, by an id of its own (engine.admission.choice_id). What is said of a request that is
    not live, or is said twice, changes nothing. Time that runs backwards stands still, and so does
    time in a pause: nothing drains then, which says nothing about the pace, and no promise falls
    due.
    """

    def __init__(self, config: EngineConfig, *, prefill_tokens_per_s: float, now_s: float) -> None:
        """Starts empty.

        Args:
          config: max_num_seqs, and the bounds in `scheduling`.
          prefill_tokens_per_s: Prompt tokens that a second is expected to compute: the pace to go
            by before any was measured.
          now_s: The time, on the clock of all later calls.
        """
        self._num_seqs = config.max_num_seqs
        self._config = config.scheduling
        self._now_s = now_s
        self._paused_at_s: float | None = None
        self._paused_s = 0.0  # in all pauses that have ended
        self._live: dict[str, _Live] = {}
        self._num_queued = 0
        self._tenants = Tenants(config.scheduling)
        self._promises = PromiseBook()
        requests_per_s = prefill_tokens_per_s / TYPICAL_REQUEST_TOKENS
        wait_s = self._config.max_predicted_wait_s
        self._requests = Bound(
            floor=self._num_seqs,
            slots=self._num_seqs,
            room=self._config.max_num_queued,
            start_per_s=requests_per_s,
            now_s=now_s,
        )
        self._queued_tokens = Bound(
            room=self._config.max_queued_tokens,
            takes_any=True,
            start_per_s=prefill_tokens_per_s,
            now_s=now_s,
        )
        # The predicted wait, twice: until enough requests have ended, and until what is ahead was
        # computed (the prompts under way too; a newcomer's own is not ahead of it).
        self._wait_for_slot = Bound(
            floor=self._num_seqs,
            slots=self._num_seqs,
            wait_s=wait_s,
            start_per_s=requests_per_s,
            now_s=now_s,
        )
        self._work = Bound(
            wait_s=wait_s, counts_own=False, start_per_s=prefill_tokens_per_s, now_s=now_s
        )

    @property
    def num_live(self) -> int:
        """Requests that entered and have not left."""
        return len(self._live)

    @property
    def num_queued(self) -> int:
        """Those of them that wait for a slot."""
        return self._num_queued

    @property
    def num_promises(self) -> int:
        """Clients that are expected back."""
        return len(self._promises)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of waiting requests that are not known to be cached."""
        return self._queued_tokens.used

    def predicted_wait_s(self, now_s: float) -> float:
        """Seconds that a request would wait for a slot if it came now.

        0 if a slot is free and no prompt is to be computed before its own.
        """
        self._advance(now_s)
        wait_s = max(
            self._work.used / self._work.pace(self._now_s),
            max(0, len(self._live) + 1 - self._num_seqs) / self._requests.pace(self._now_s),
        )
        return min(wait_s, MAX_WAIT_S)

    def is_live(self, request_id: str) -> bool:
        """Whether it entered and has not left."""
        return request_id in self._live

    def live_ids(self) -> list[str]:
        """Of all that entered and have not left, in order."""
        return list(self._live)

    def enter(self, state: RequestState, now_s: float) -> None:
        """Counts a request as live and queued, each of its choices as one.

        Raises:
          InvalidRequest: its id is live, or it exceeds a bound all by itself.
          Overloaded: a bound would be exceeded, or a promise to another client broken.
        """
        now_s = self._advance(now_s)
        self._check_possible(state)
        request = state.request
        num_prompt_tokens = len(request.prompt_token_ids)
        most_tokens = num_prompt_tokens + state.max_tokens
        tenant = self._tenants.get(
            request.tenant,
            requests_per_s=self._requests.pace(now_s),
            tokens_per_request=most_tokens,
            now_s=now_s,
        )
        lives = {
            each.request.request_id: _Live(
                tenant=tenant,
                num_tokens=num_prompt_tokens,
                # The other choices find the prompt computed.
                work_tokens=0 if each.choice else num_prompt_tokens,
                most_tokens=most_tokens,
            )
            for each in (state, *state.forks)
        }
        self._require_room(request, list(lives.values()), now_s)
        self._live |= lives
        self._num_queued += len(lives)
        tenant.num_live += len(lives)
        for live in lives.values():
            for _, bound, size in self._counts([live]):
                bound.enter(size, now_s)

    def expect(self, request_id: str, num_uncached_tokens: int) -> None:
        """The prefix cache was asked: so many tokens of a waiting prompt are to be computed."""
        live = self._live.get(request_id)
        if live is not None and live.is_queued:
            self._set_work(live, num_uncached_tokens)

    def started(self, request_id: str, now_s: float, num_cached_tokens: int) -> None:
        """It got a slot, and so many of its tokens need not be computed."""
        now_s = self._advance(now_s)
        live = self._live.get(request_id)
        if live is None or not live.is_queued:
            return
        self._set_work(live, live.num_tokens - num_cached_tokens)
        self._queued_tokens.drain(live.work_tokens, now_s)
        live.tenant.queued.drain(1, now_s)
        live.is_queued = False
        self._num_queued -= 1

    def computed(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """A step computes so many tokens of its prompt."""
        now_s = self._advance(now_s)
        live = self._live.get(request_id)
        if live is None or live.is_queued:
            return
        num_tokens = min(num_tokens, live.work_tokens)
        self._work.drain(num_tokens, now_s)
        live.work_tokens -= num_tokens

    def requeued(self, request_id: str, now_s: float, num_tokens: int) -> None:
        """It lost its slot and waits again, with so many tokens to compute, outputs included."""
        now_s = self._advance(now_s)
        live = self._live.get(request_id)
        if live is None or live.is_queued:
            return
        live.num_tokens = num_tokens
        self._set_work(live, num_tokens)
        live.is_queued = True
        self._num_queued += 1
        self._queued_tokens.enter(live.work_tokens, now_s)
        live.tenant.queued.enter(1, now_s)

    def left(self, request_id: str, now_s: float) -> None:
        """It ended; its id may be used again."""
        now_s = self._advance(now_s)
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._set_work(live, 0)
        if live.is_queued:
            self._num_queued -= 1
            live.tenant.queued.correct(1, now_s)
        self._requests.drain(1, now_s)
        self._wait_for_slot.drain(1, now_s)
        live.tenant.tokens.drain(live.most_tokens, now_s)
        live.tenant.num_live -= 1
        self._tenants.forget_if_idle(live.tenant.name)

    def pause(self, now_s: float) -> None:
        """Nothing will drain until `resume`; a second pause changes nothing."""
        if self._paused_at_s is None:
            self._advance(now_s)
            self._paused_at_s = now_s

    def resume(self, now_s: float) -> None:
        """Time goes on; without a pause nothing changes."""
        if self._paused_at_s is not None:
            self._paused_s += max(now_s - self._paused_at_s, 0.0)
            self._paused_at_s = None

    def check(self) -> None:
        """Asserts that all counts are those of the live requests, and nothing else is kept."""
        queued = [live for live in self._live.values() if live.is_queued]
        assert self._num_queued == len(queued)
        assert self._requests.used == self._wait_for_slot.used == len(self._live)
        assert self._queued_tokens.used == sum(live.work_tokens for live in queued)
        assert self._work.used == sum(live.work_tokens for live in self._live.values())
        bounds = [self._requests, self._wait_for_slot, self._queued_tokens, self._work]
        for tenant in self._tenants.all():
            its_own = [live for live in self._live.values() if live.tenant is tenant]
            assert tenant.num_live == len(its_own)
            assert not tenant.is_idle, f"tenant {tenant.name!r} is kept for nothing"
            assert tenant.queued.used == sum(live.is_queued for live in its_own)
            assert tenant.tokens.used == sum(live.most_tokens for live in its_own)
            bounds += [tenant.queued, tenant.tokens]
        assert sum(tenant.num_live for tenant in self._tenants.all()) == len(self._live)
        assert all(0 <= live.work_tokens <= live.num_tokens for live in self._live.values())
        for bound in bounds:
            bound.check()
        for tenant in self._tenants.all():
            assert tenant.num_promises == tenant.tokens.num_promises
            assert 0 < tenant.kept_share <= 1
        num_promises = sum(tenant.num_promises for tenant in self._tenants.all())
        assert self._requests.num_promises == num_promises == len(self._promises)
        self._promises.check()

    def _advance(self, now_s: float) -> float:
        """Moves on to this time, less all pauses; what it is then, if the clock went backwards."""
        if self._paused_at_s is not None:
            now_s = min(now_s, self._paused_at_s)
        self._now_s = max(self._now_s, now_s - self._paused_s)
        for promise in self._promises.lapse(self._now_s):
            self._tenants.forget_if_idle(promise.tenant.name)
        return self._now_s

    def _check_possible(self, state: RequestState) -> None:
        """Refuses what no waiting helps."""
        request, num_prompt_tokens = state.request, len(state.request.prompt_token_ids)
        if request.request_id in self._live:
            raise InvalidRequest(
                "request_id", request.request_id, "another one: a request with it is live"
            )
        most, n = self._config.max_tenant_tokens, 1 + len(state.forks)
        if most is not None and n * (num_prompt_tokens + state.max_tokens) > most:
            choices = "" if n == 1 else f", n is {n}"
            raise InvalidRequest(
                "max_tokens",
                state.max_tokens,
                f"at most {most // n - num_prompt_tokens}: the prompt has {num_prompt_tokens} "
                f"tokens{choices} and max_tenant_tokens is {most}",
            )
        bounds = {
            "max_num_seqs + max_num_queued": self._num_seqs + self._config.max_num_queued,
            "max_tenant_queued": self._config.max_tenant_queued,
        }
        for name, bound in bounds.items():
            if n > 1 and bound is not None and n > bound:
                raise InvalidRequest("n", n, f"at most {name}, {bound}")

    def _require_room(self, request: Request, lives: list[_Live], now_s: float) -> None:
        """Returns if all choices may enter now, and has used up their promise if they had one."""
        live, counts = lives[0], self._counts(lives)
        has_slots = self._has_slots(live.tenant, len(lives))
        asked = [one for one in counts if one[0] != "max_tenant_queued" or not has_slots]
        promises = self._promises
        digest = digest_of(request) if len(promises) else b""
        promise = promises.due(digest, request.request_id, now_s)
        if promise is not None:
            promises.redeem(promise)
            if all(bound.fits(size) for _, bound, size in asked):
                return
        early = promises.early(digest, request.request_id)
        times_s = [bound.earliest_s(size, now_s) for _, bound, size in asked]
        due_s = max(times_s)
        if due_s <= now_s:
            if early is not None:
                promises.redeem(early)
            return
        name = asked[times_s.index(due_s)][0]
        message = self._message(name, lives, len(promises))
        if early is not None:
            due_s = early.due_s
        else:
            due_s = max(due_s, now_s + MIN_RETRY_S)
            if due_s <= now_s + MAX_RETRY_S:
                places = [(bound, size) for _, bound, size in counts]
                promises.book(request, live.tenant, digest or digest_of(request), due_s, places)
        self._tenants.forget_if_idle(live.tenant.name)
        raise Overloaded(message, name, min(max(due_s - now_s, MIN_RETRY_S), MAX_RETRY_S))

    def _counts(self, lives: list[_Live]) -> list[tuple[str, Bound, int]]:
        """What the choices of a request add to which bound as they enter, by the bound's name."""
        tenant, work_tokens = lives[0].tenant, sum(live.work_tokens for live in lives)
        return [
            ("max_num_queued", self._requests, len(lives)),
            ("max_predicted_wait_s", self._wait_for_slot, len(lives)),
            ("max_predicted_wait_s", self._work, work_tokens),
            ("max_queued_tokens", self._queued_tokens, work_tokens),
            ("max_tenant_queued", tenant.queued, len(lives)),
            ("max_tenant_tokens", tenant.tokens, sum(live.most_tokens for live in lives)),
        ]

    def _has_slots(self, tenant: Tenant, count: int) -> bool:
        """Whether slots are free that all choices will get, so that they do not really wait."""
        most = self._config.max_tenant_running
        has_room = len(self._live) + count <= self._num_seqs
        return has_room and (most is None or tenant.num_live + count <= most)

    def _message(self, name: str, lives: list[_Live], num_promised: int) -> str:
        """How much there is, what the request brings, how much may be, what others were told."""
        config, live, tenant = self._config, lives[0], lives[0].tenant
        message = _MESSAGES[name].format(
            live=len(self._live),
            max_num_seqs=self._num_seqs,
            wait_s=self.predicted_wait_s(self._now_s),
            queued_tokens=self.queued_tokens,
            prompt=live.num_tokens,
            tenant=reprlib.repr(tenant.name),
            tenant_queued=tenant.queued.used,
            tenant_tokens=tenant.tokens.used,
            tokens=sum(live.most_tokens for live in lives),
            bound=getattr(config, name),
        )
        return f"{message}; promised to others: {num_promised}" if num_promised else message

    def _set_work(self, live: _Live, num_tokens: int) -> None:
        """Corrects what it has to compute."""
        num_tokens = min(max(num_tokens, 0), live.num_tokens)
        for bound in (self._work, self._queued_tokens) if live.is_queued else (self._work,):
            bound.correct(live.work_tokens - num_tokens, self._now_s)
        live.work_tokens = num_tokens
