"""What a simulated table says: what was simulated, the numbers, and what they were to show."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..server.table import format_table


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise.

    Attributes:
      name: What is promised.
      value: What came out, the worst of all seeds.
      low, high: Between which it must be; None: no bound on that side.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def holds(self) -> bool:
        """In the positive form, so that NaN does not hold."""
        return (self.low is None or self.value >= self.low) and (
            self.high is None or self.value <= self.high
        )

    def __str__(self) -> str:
        """One line."""
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("at least", self.low), ("at most", self.high))
            if bound is not None
        ]
        verdict = "holds" if self.holds else "FAILS"
        return f"{verdict}: {self.name} is {self.value:.3f}; it must be {' and '.join(bounds)}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """One table.

    Attributes:
      about: Lines above it: costs, sizes, workload.
      header: Names of the columns.
      rows: As texts.
      checks: What the numbers were to show.
    """

    about: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    checks: Sequence[Check] = ()

    @property
    def holds(self) -> bool:
        """Everything that it was to show."""
        return all(check.holds for check in self.checks)

    def as_text(self) -> str:
        """For a terminal."""
        return "\n".join(
            [*self.about, format_table(self.header, self.rows), *map(str, self.checks)]
        )

    def as_json(self) -> dict[str, Any]:
        """The same as one object."""
        return {
            "about": list(self.about),
            "rows": [dict(zip(self.header, row, strict=True)) for row in self.rows],
            "checks": [asdict(check) | {"holds": check.holds} for check in self.checks],
        }


def ms(seconds: float) -> str:
    """Milliseconds; empty if there is no number."""
    return "" if seconds != seconds else f"{seconds * 1e3:.0f}"


def ms_each(seconds: Sequence[float]) -> list[str]:
    """Each of several."""
    return [ms(each) for each in seconds]
