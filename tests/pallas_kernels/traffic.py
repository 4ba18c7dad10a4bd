"""Bytes of device memory that attention moves, beside the least that would do."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one layer on one device.

    Attributes:
      kv_bytes: Keys and values that are read, by every tile anew.
      other_bytes: Queries read, results written, and what is read again to combine them; padding
        included.
      least_bytes: Each key and value that is seen, each query and each result once, no padding.
    """

    kv_bytes: int
    other_bytes: int
    least_bytes: int

    @property
    def ratio(self) -> float:
        """How many times the least is moved."""
        return (self.kv_bytes + self.other_bytes) / self.least_bytes
