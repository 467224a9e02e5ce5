"""A figure: samples of one thing, beside samples of what it is held against."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, in `unit`; `floor` is what the kernel (or a peer) takes for the same, by `floor_name`."""

    name: str
    unit: str
    samples: Sequence[float]
    floor_name: str = ""
    floor: Sequence[float] = field(default=())

    @property
    def ratio(self) -> float | None:
        """Median over the floor's median."""
        return statistics.median(self.samples) / statistics.median(self.floor) if self.floor else None


def spread(samples: Sequence[float]) -> str:
    """Median, and how far it goes: 5 % to 99 %, or all there is."""
    if not samples:
        return "-"
    ordered = sorted(samples)
    low, high = ordered[int(0.05 * (len(ordered) - 1))], ordered[int(0.99 * (len(ordered) - 1))]
    return f"{statistics.median(ordered):.3g} ({low:.3g} … {high:.3g})"


def table(figures: Iterable[Figure]) -> str:
    """For people."""
    rows = [("figure", "unit", "n", "median (5 % … 99 %)", "held against", "median (5 % … 99 %)", "ratio")]
    for figure in figures:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.1f}"
        count = str(len(figure.samples))
        cells = (
            figure.name,
            figure.unit,
            count,
            spread(figure.samples),
            figure.floor_name,
            spread(figure.floor),
            ratio,
        )
        rows.append(cells)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def machine_readable(figures: Iterable[Figure]) -> str:
    """For programs: JSON, one object a figure with all its samples."""
    return json.dumps([asdict(figure) | {"ratio": figure.ratio} for figure in figures], indent=1)
