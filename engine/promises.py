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
# Identical requests may be many clients, who get a promise each, or an impatient one under new
# ids, who must not fill the book.
MAX_ALIKE = 8
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
      places: What it keeps, of which bounds, times how likely its client is to come.
    """

    due_s: float
    number: int
    digest: bytes
    request_id: str
    tenant: Tenant
    places: tuple[tuple[Bound, float], ...]


class PromiseBook:
    """The promises outstanding, at most MAX_PROMISES."""

    def __init__(self) -> None:
        """Starts empty."""
        self._promises: list[Promise] = []  # by due time
        self._alike: dict[bytes, list[Promise]] = {}  # of one digest, by due time
        self._num_made = 0

    def __len__(self) -> int:
        """Promises outstanding."""
        return len(self._promises)

    def due(self, digest: bytes, now_s: float) -> Promise | None:
        """A promise of this digest that may be used now."""
        alike = self._alike.get(digest)
        return alike[0] if alike and alike[0].due_s <= now_s else None

    def early(self, digest: bytes, request_id: str) -> Promise | None:
        """The promise for which this request comes too early, if it has one already.

        The id tells, where the client keeps it. Where it does not, a request with another id may
        be another client's, up to a limit.
        """
        alike = self._alike.get(digest, [])
        if len(alike) >= MAX_ALIKE:
            return alike[-1]
        return next((one for one in alike if one.request_id == request_id), None)

    def book(
        self,
        request: Request,
        tenant: Tenant,
        digest: bytes,
        due_s: float,
        sizes: list[tuple[Bound, int]],
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
            places=tuple((bound, size * tenant.kept_share) for bound, size in sizes),
        )
        self._num_made += 1
        tenant.num_promises += 1
        bisect.insort(self._promises, promise, key=_order)
        bisect.insort(self._alike.setdefault(digest, []), promise, key=_order)
        for bound, expected in promise.places:
            bound.promise(due_s, promise.number, expected)

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
        assert all(len(ones) <= MAX_ALIKE for ones in self._alike.values())

    def _remove(self, promise: Promise) -> None:
        del self._promises[bisect.bisect_left(self._promises, _order(promise), key=_order)]
        alike = self._alike[promise.digest]
        alike.remove(promise)
        if not alike:
            del self._alike[promise.digest]
        promise.tenant.num_promises -= 1
        for bound, expected in promise.places:
            bound.release(promise.due_s, promise.number, expected)


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
