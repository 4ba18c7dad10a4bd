"""Hits: what the prefix cache has of a request, and what of that is worth having. No JAX."""

from dataclasses import dataclass

from .events import DetailValue
from .prefix_cache import CachedPage, MissReason, PrefixCache
from .step_costs import PromptCosts
from .token_chain import TokenChain


@dataclass(frozen=True, kw_only=True)
class Hit:
    """What of a request's tokens need not be computed.

    Attributes:
      on_device: Cached pages that it can read at once.
      on_host: Those behind them that are worth bringing back from host memory.
      num_matched: Pages that are cached, be they worth bringing back or not.
      max_pages: Most that could have been; None: the request does not read the cache.
      num_unheld: Those on the device that nobody holds yet.
      decision: Whether to bring pages back from host memory, if there are any.
    """

    on_device: list[CachedPage]
    on_host: list[CachedPage]
    num_matched: int = 0
    max_pages: int | None = None
    num_unheld: int = 0
    decision: dict[str, DetailValue] | None = None

    @property
    def num_pages(self) -> int:
        """Pages whose tokens are not computed again."""
        return len(self.on_device) + len(self.on_host)


def find_hit(
    cache: PrefixCache,
    chain: TokenChain,
    max_pages: int,
    *,
    grid_pages: int | None,
    costs: PromptCosts,
) -> Hit:
    """What is cached of a chain's first max_pages pages, as far as it is of use.

    Args:
      cache: Where to look; nothing in it changes.
      chain: Of the request; it reaches that far.
      max_pages: Most that the hit may have.
      grid_pages: Of a deterministic engine: hits end at multiples of it. Else None.
      costs: Says whether bringing pages back is faster than computing them again.
    """
    nodes = cache.match(chain, max_pages)
    on_device = [node for node in nodes if node.page is not None]
    on_host = nodes[len(on_device) :]
    if grid_pages is not None:
        del on_device[len(on_device) // grid_pages * grid_pages :]
    decision = None
    if on_host:
        decision = _decide(len(on_device), len(on_host), chain.page_size, costs)
        if not decision["imports"]:
            on_host.clear()
    return Hit(
        on_device=on_device,
        on_host=on_host,
        num_matched=len(nodes),
        max_pages=max_pages,
        num_unheld=sum(node.holders == 0 for node in on_device),
        decision=decision,
    )


def _decide(
    num_on_device: int, num_on_host: int, page_size: int, costs: PromptCosts
) -> dict[str, DetailValue]:
    """Whether to bring pages back, and why."""
    start, end = num_on_device * page_size, (num_on_device + num_on_host) * page_size
    import_s = costs.import_pages_s(num_on_host)
    recompute_s = costs.prefill_s(start, end)
    return {
        "pages": num_on_host,
        "import_s": import_s,
        "recompute_s": recompute_s,
        "imports": import_s < recompute_s,
    }


def explain_miss(
    cache: PrefixCache, chain: TokenChain | None, hit: Hit, *, has_grid: bool
) -> tuple[MissReason, int]:
    """Why a hit ends where it does, and the first token that is computed, or that differs.

    As of the lookup: the caller asks before it does anything with the hit. With `has_grid` hits end
    on a grid.
    """
    if hit.max_pages is None or chain is None:
        return MissReason.NOT_READ, 0
    if hit.num_pages < hit.num_matched:
        reason = MissReason.CHUNK_BORDER if has_grid else MissReason.RECOMPUTED
        return reason, hit.num_pages * chain.page_size
    return cache.explain(chain, hit.num_matched, hit.max_pages)
