"""Strategies for files that say something else than what was written: any JSON, in any place of a good one."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

#: The ends of each type.
_TEXTS = st.sampled_from(["a", "\0", "\ud800", "\udc80"])
_NUMBERS = st.sampled_from([-1, 1 << 64, 1 << 200, 1.5, float("inf"), float("nan"), True])
#: What passes for nothing where only its truth is asked.
_NOTHING: st.SearchStrategy[Any] = st.sampled_from([None, False, 0, "", [], {}])
#: What Python's reader takes for JSON: lone surrogates, NaN and numbers of any length too.
json_values: st.SearchStrategy[Any] = st.recursive(
    _NOTHING | _TEXTS | _NUMBERS | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(plain: Any) -> list[tuple[Any, ...]]:
    inner = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    return [place for key, value in inner for place in [(key,), *((key, *deeper) for deeper in _places(value))]]


@st.composite
def damaged(draw: st.DrawFn, good: Any) -> Any:
    """This JSON with another value in one to three places, or nothing there."""
    plain = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(_places(plain) or [("new",)]))
        inner = plain
        for key in way:
            inner = inner[key]
        if last == "new" or draw(st.integers(0, 3)):
            ends = _TEXTS if isinstance(inner.get(last) if isinstance(inner, dict) else inner[last], str) else _NUMBERS
            inner[last] = draw(ends | _NOTHING | json_values)
        else:
            del inner[last]
    return plain
