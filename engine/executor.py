"""The executor: owns the device state, runs steps on it and moves its pages to the host and back.

A step consumes (key, packed array, mask rows) only, so the same stream of these replayed elsewhere
gives the same results, and a log of it reproduces a run. One array goes up and one comes down per
step; a second goes up where a mask changes, and one per transfer of pages: `_upload` and `fetch`
are the only places in the engine where host arrays become device arrays and back.

Everything runs in the order of the calls: a page that is exported before a step is as that step
found it, and the step after an import finds what the import wrote.
"""

from collections.abc import Iterable, Sequence
from itertools import batched

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..models.decoder import Decoder
from . import packing
from .device_state import DeviceState
from .executables import Executable, ExecutableTable
from .packing import UploadLayout
from .page_transfer import PAGES_PER_TRANSFER, TransferKey
from .step_shapes import StepKey


class DeviceExecutor:
    """Runs compiled steps over one donated state.

    Attributes:
      can_keep_pages: Whether pages can move to host memory.
    """

    def __init__(
        self,
        table: ExecutableTable,
        decoder: Decoder,
        state: DeviceState,
        packed_sharding: NamedSharding,
        layouts: Sequence[UploadLayout],
    ) -> None:
        """Takes over `state`: its arrays are donated to the first step."""
        self.can_keep_pages = TransferKey.EXPORT in table and TransferKey.IMPORT in table
        self._table = table
        self._parameters = jax.tree.leaves(decoder)
        self._state = jax.tree.leaves(state)
        self._packed_sharding = packed_sharding
        kv = jax.tree.leaves(state.kv)  # the first leaves of the state
        self._num_kv_leaves = len(kv)
        self._num_pages = kv[0].shape[0]
        self._on_host: dict[int, jax.Array] = {}
        # Most steps change no mask, and nothing goes up for that.
        self._no_masks = {layout.key: self._upload(packing.no_masks(layout)) for layout in layouts}

    def dispatch(
        self, key: StepKey, packed: np.ndarray, mask_rows: np.ndarray | None = None
    ) -> jax.Array:
        """Starts a step and returns its result, which is not there yet: fetch waits for it.

        The caller must not touch the arrays again: on the CPU the device reads them in place.

        Raises:
          KeyError: No such executable was compiled.
        """
        executable = self._table[key]
        masks = self._no_masks[key] if mask_rows is None else self._upload(mask_rows)
        result, *self._state = executable(
            *self._parameters, *self._state, self._upload(packed), masks
        )
        return result

    def fetch(self, result: jax.Array) -> np.ndarray:
        """Waits for a step and brings its result to the host."""
        return np.asarray(result)

    def export_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Starts copying pages to host memory and returns at once.

        Args:
          pairs: (page, handle): what to copy, and a number never used before that names the copy.

        Raises:
          RuntimeError: The engine was built without host memory for pages.
          ValueError: A handle is in use, or there is no such page.
        """
        executable = self._transfer(TransferKey.EXPORT)
        self._check_pages(page for page, _ in pairs)
        for group in batched(pairs, PAGES_PER_TRANSFER):
            pages = np.zeros(PAGES_PER_TRANSFER, np.int32)
            pages[: len(group)] = [page for page, _ in group]
            contents = executable(*self._state[: self._num_kv_leaves], self._upload(pages))
            for (_, handle), content in zip(group, contents, strict=False):
                if handle in self._on_host:
                    raise ValueError(f"handle {handle} already names a page on the host")
                self._on_host[handle] = content

    def import_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Starts writing pages back and returns at once; their copies on the host are forgotten.

        Args:
          pairs: (handle, page): which copy to write, and where to. All pages are different.

        Raises:
          RuntimeError: The engine was built without host memory for pages.
          KeyError: A handle names no copy.
          ValueError: A page is named twice, or there is no such page.
        """
        executable = self._transfer(TransferKey.IMPORT)
        self._check_pages(page for _, page in pairs)
        if len({page for _, page in pairs}) < len(pairs):
            raise ValueError(f"pages differ in one import: {sorted(page for _, page in pairs)}")
        for group in batched(pairs, PAGES_PER_TRANSFER):
            pages = np.full(PAGES_PER_TRANSFER, group[0][1], np.int32)
            pages[: len(group)] = [page for _, page in group]
            contents = [self._on_host.pop(handle) for handle, _ in group]
            contents += [contents[0]] * (PAGES_PER_TRANSFER - len(group))  # the first once more
            num_kv = self._num_kv_leaves
            self._state[:num_kv] = executable(*self._state[:num_kv], self._upload(pages), *contents)

    def drop_pages(self, handles: Iterable[int]) -> None:
        """Forgets copies on the host.

        Raises:
          KeyError: A handle names no copy.
        """
        for handle in handles:
            del self._on_host[handle]

    def wait(self) -> None:
        """Waits until everything that was started has run; for measuring."""
        jax.block_until_ready((self._state, self._on_host))

    def _transfer(self, key: TransferKey) -> Executable:
        if not self.can_keep_pages:
            raise RuntimeError("no page can be kept on the host: host_kv_bytes is 0")
        return self._table[key]

    def _check_pages(self, pages: Iterable[int]) -> None:
        """Another page would stand in for one past the pool, and page 0 stays zero."""
        for page in pages:
            if not 0 < page < self._num_pages:
                raise ValueError(f"page is {page}; it must be in [1, {self._num_pages})")

    def _upload(self, packed: np.ndarray) -> jax.Array:
        return jax.device_put(packed, self._packed_sharding)
