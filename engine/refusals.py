"""Why a request is not taken: what can never run, what cannot run now, an engine that is gone."""

import reprlib
from typing import override


class InvalidRequest(ValueError):
    """A request that this engine can never run.

    Attributes:
      field: The field of Request or SamplingParams at fault.
      value: What it holds, or the element at `index`, or for a prompt that is too long its length.
      bound: What it must be, as in "in [0, 1]".
      index: Which element of the field, where it is one of many.
    """

    def __init__(self, field: str, value: object, bound: str, index: int | None = None) -> None:
        """See the attributes."""
        super().__init__(field, value, bound, index)  # the arguments, so that it can be pickled
        self.field = field
        self.value = value
        self.bound = bound
        self.index = index

    @override
    def __str__(self) -> str:
        """One sentence that names field, value and bound; long values are shortened."""
        at = "" if self.index is None else f"[{self.index}]"
        return f"{self.field}{at} is {reprlib.repr(self.value)}; it must be {self.bound}"


class Overloaded(RuntimeError):
    """A request that could run later: too much is waiting now.

    Attributes:
      bound: The bound it would exceed, by its name in SchedulingConfig.
      retry_after_s: When there will be room for it, as far as the pace of the engine tells.
    """

    def __init__(self, message: str, bound: str, retry_after_s: float) -> None:
        """The message says how much of what there is, and how much may be."""
        super().__init__(message, bound, retry_after_s)  # all arguments, so that it can be pickled
        self.bound = bound
        self.retry_after_s = retry_after_s

    @override
    def __str__(self) -> str:
        return str(self.args[0])


class EngineUnavailable(RuntimeError):
    """The engine takes no requests any more: it failed, or it is shutting down."""
