"""Parsers of the sizes, times and prices that users write."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import datetime
from math import isfinite

from megatron.fill.types import Prices

DURATION = "expected seconds, or such as 90s, 30m, 2h or 1d"

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MOST_BYTES = 1 << 60  # an exbibyte
_FAR_S = 1e12  # seconds since the epoch, after the year 9999
_DEAR = 1e9  # largest price of an hour


def no_switch(value: object) -> object:
    """Return the value; ValueError if it is true or false, which pydantic reads as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def parse_bytes(value: object) -> int:
    """Parse a size: ``2GiB``, ``512 MB`` or a plain number of bytes; ValueError unless from 1 to 1 EiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is not None and unit is not None and not isinstance(value, bool):
        size = float(match[1]) * unit
        if 1 <= size <= _MOST_BYTES:
            return int(size)
    raise ValueError("expected a size above 0 such as 512MB or 2GiB")


def parse_duration(text: str) -> float:
    """Parse a duration in seconds: ``90s``, ``30m``, ``2h``, ``1d`` or a plain number; ValueError if it is none."""
    with suppress(ValueError):
        span_s = _span_s(text)
        seconds = float(text) if span_s is None else span_s
        if seconds >= 0 and isfinite(seconds):
            return seconds
    raise ValueError(DURATION)


def parse_timeout(value: object) -> float:
    """Parse a duration in seconds; ValueError if it is none, is 0, or is beyond all reason."""
    seconds = 0.0 if isinstance(value, bool) else parse_duration(str(value))
    if not 0 < seconds < _FAR_S:
        raise ValueError(f"{DURATION}, and more than 0")
    return seconds


def parse_deadline(value: object) -> float:
    """Parse a deadline: ``90s``, ``30m``, ``2h`` or ``1d`` from now, or a time in ISO 8601 (local without a zone).

    Return seconds since the epoch; ValueError if it is neither, or is beyond all reason.
    """
    text = str(value)
    try:
        span_s = _span_s(text)
        moment_s = datetime.fromisoformat(text.strip()).timestamp() if span_s is None else time.time() + span_s
    except (ValueError, OverflowError, OSError):  # the latter two for times outside a clock's range
        moment_s = _FAR_S
    if moment_s >= _FAR_S:
        raise ValueError("expected such as 90s, 30m, 2h, 1d, or 2030-01-31T18:00")
    return moment_s


def parse_prices(text: str) -> Prices:
    """Parse prices of an hour, ``main=3.96,side=0.18``, in any order; ValueError as ``checked_prices``."""
    given = [part.partition("=") for part in text.split(",")]
    prices = Prices(0, 0)  # which is refused
    with suppress(ValueError):
        found = {name.strip(): float(price) for name, _, price in given}
        if len(given) == 2 and set(found) == {"main", "side"}:
            prices = Prices(**found)
    return checked_prices(prices, "main=3.96,side=0.18")


def checked_prices(prices: Prices, example: str) -> Prices:
    """Return the prices; ValueError, with the example, if one is not above 0 or is beyond all reason."""
    if not all(0 < price <= _DEAR for price in (prices.main, prices.side)):
        raise ValueError(f"expected what an hour costs, each above 0, such as {example}")
    return prices


def _span_s(text: str) -> float | None:
    """Return the seconds of a number with a unit of time; None for any other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)
    return float(match[1]) * _SECONDS[match[2]] if match else None
