"""Quantities for people."""

from __future__ import annotations


def mebibytes(count: int) -> str:
    """Bytes for people; small models are a fraction of a MiB."""
    mib = count / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`, `5 d 3 h`: two units say enough of an estimate."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"
