"""PagePool: which pages of the KV cache are free. Page numbers only; knows no requests. No JAX."""

from collections.abc import Iterable


class PagePool:
    """Pages [1, num_pages), handed out and taken back in an order that depends on the calls alone.

    Page 0 is never handed out: it stays zero on the device, and unused page-table entries point
    at it. A page that is given back may be handed out at once, since device steps run in order.
    """

    def __init__(self, num_pages: int) -> None:
        """Starts with every page free.

        Args:
          num_pages: Size of the pool, page 0 included.

        Raises:
          ValueError: num_pages leaves nothing beside page 0.
        """
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 2, page 0 is reserved")
        self.num_pages = num_pages
        # A stack, so that the page given back last, warm in the caches, goes out first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = [False, *[True] * (num_pages - 1)]

    @property
    def num_usable(self) -> int:
        """Pages that can be held at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that are neither held nor cached."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` pages.

        Raises:
          ValueError: fewer are free. Nothing was handed out.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(
                f"count is {count}; it must be in [0, {self.num_free}], the free pages"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Takes pages back, the last of them first to go out again.

        Raises:
          ValueError: one of them is not handed out; pages before it were taken back.
        """
        for page in pages:
            if not 0 < page < self.num_pages or self._is_free[page]:
                raise ValueError(f"page is {page}; it must be one that is handed out")
            self._is_free[page] = True
            self._free.append(page)

    def taken(self) -> set[int]:
        """The pages that are handed out. For checks."""
        return {page for page in range(1, self.num_pages) if not self._is_free[page]}

    def check(self) -> None:
        """Asserts that the stack and the marks agree, and that page 0 is in neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert 0 not in free, "page 0 is free to be used"
        assert free == {page for page, is_free in enumerate(self._is_free) if is_free}
