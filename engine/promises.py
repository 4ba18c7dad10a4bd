"""PromiseBook: who was told to come back when, and how a client is known again. No JAX.

No protocol is needed for that: the same tenant asking for the same thing is the same client, as far
as a place in a queue is concerned.
"""

import array
import bisect
import dataclasses
from dataclasses import dataclass

from .admission_bound import Bound
from .request import Request
from .tenants import Tenant
from .typed_hash import typed_hash

# No tenant may have more than are left, so that one that floods leaves half to the others. Source:
# Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches (1998).
MAX_PROMISES = 8192
GRACE_S = 5.0  # covers the way back, and times rounded up to whole seconds


@dataclass(frozen=True, eq=False, kw_only=True)
class Promise:
    """A place that is kept.

    Attributes:
      due_s: From when on; until GRACE_S later.
      number: How many promises were made before it.
      digest: Who asked for what.
      request_id: Under which id.
      tenant: Whose it is.
      places: What it keeps, of which bounds.
    """

    due_s: float
    number: int
    digest: bytes
    request_id: str
    tenant: Tenant
    places: tuple[tuple[Bound, int], ...]


class PromiseBook:
    """The promises outstanding, at most MAX_PROMISES."""

    def __init__(self) -> None:
        """Starts empty."""
        self._promises: list[Promise] = []  # by due time
        self._alike: dict[bytes, list[Promise]] = {}  # of one digest, by due time
        self._by_id: dict[tuple[bytes, str], Promise] = {}
        self._num_made = 0

    def __len__(self) -> int:
        """Promises outstanding."""
        return len(self._promises)

    def due(self, digest: bytes, request_id: str, now_s: float) -> Promise | None:
        """The promise that this request may use now: its own, or else one to somebody alike."""
        own = self._by_id.get((digest, request_id))
        alike = self._alike.get(digest)
        promise = own or (alike[0] if alike else None)
        return promise if promise is not None and promise.due_s <= now_s else None

    def early(self, digest: bytes, request_id: str) -> Promise | None:
        """The promise for which this request comes too early, if it has one already.

        The id tells, where the client keeps it. Where it does not, who asks for the same is taken
        for another client: load generators and popular questions do so, and an impatient client
        only costs its tenant trust.
        """
        return self._by_id.get((digest, request_id))

    def book(
        self,
        request: Request,
        tenant: Tenant,
        digest: bytes,
        due_s: float,
        places: list[tuple[Bound, int]],
    ) -> None:
        """Keeps places for a request, unless its tenant has as many promises as are left."""
        if tenant.num_promises >= MAX_PROMISES - len(self._promises):
            return
        promise = Promise(
            due_s=due_s,
            number=self._num_made,
            digest=digest,
            request_id=request.request_id,
            tenant=tenant,
            places=tuple(places),
        )
        self._num_made += 1
        tenant.num_promises += 1
        bisect.insort(self._promises, promise, key=_order)
        bisect.insort(self._alike.setdefault(digest, []), promise, key=_order)
        self._by_id[digest, request.request_id] = promise
        for bound, size in places:
            tenant.promised[bound] += size
            bound.promise(due_s, promise.number, size, tenant)

    def redeem(self, promise: Promise) -> None:
        """Its client is back; nothing is kept for it any more."""
        promise.tenant.note_promise(is_kept=True)
        self._remove(promise)

    def lapse(self, now_s: float) -> list[Promise]:
        """Removes, and returns, promises whose clients did not come back in time."""
        lapsed = []
        while self._promises and self._promises[0].due_s + GRACE_S < now_s:
            lapsed.append(self._promises[0])
            self._promises[0].tenant.note_promise(is_kept=False)
            self._remove(self._promises[0])
        return lapsed

    def check(self) -> None:
        """Asserts that all views of the promises agree."""
        assert len(self._promises) <= MAX_PROMISES
        assert [_order(one) for one in self._promises] == sorted(map(_order, self._promises))
        alike = [one for ones in self._alike.values() for one in ones]
        assert sorted(map(_order, alike)) == [_order(one) for one in self._promises]
        assert all(ones for ones in self._alike.values()), "an empty list is kept"
        by_id = {(one.digest, one.request_id): one for one in self._promises}
        assert by_id == self._by_id

    def _remove(self, promise: Promise) -> None:
        del self._promises[bisect.bisect_left(self._promises, _order(promise), key=_order)]
        del self._by_id[promise.digest, promise.request_id]
        alike = self._alike[promise.digest]
        del alike[bisect.bisect_left(alike, _order(promise), key=_order)]
        if not alike:
            del self._alike[promise.digest]
        tenant = promise.tenant
        tenant.num_promises -= 1
        for bound, size in promise.places:
            tenant.promised[bound] -= size
            bound.release(promise.due_s, promise.number)


def digest_of(request: Request) -> bytes:
    """Who asks for what, without the request's id: 16 bytes, equal where the request is."""
    sampling = [
        (spec.name, getattr(request.sampling, spec.name))
        for spec in dataclasses.fields(request.sampling)
    ]
    return typed_hash(
        (b"tenant", request.tenant.encode("utf-8", "surrogatepass")),
        (b"prompt", array.array("q", request.prompt_token_ids).tobytes()),
        (b"sampling", repr(sampling).encode()),
    )


def _order(promise: Promise) -> tuple[float, int]:
    return promise.due_s, promise.number
