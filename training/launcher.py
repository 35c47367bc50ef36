"""What torchrun tells a worker through its environment."""

from __future__ import annotations

import os
from typing import NamedTuple


class RankOfEnvironment(NamedTuple):
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def environment_rank() -> RankOfEnvironment:
    """As torchrun left it in the environment; whether it makes sense is for `check_torchrun` to say."""

    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default

    if "RANK" not in os.environ:
        return RankOfEnvironment()
    return RankOfEnvironment(number("RANK", 0), number("LOCAL_RANK", 0), number("WORLD_SIZE", 1))


def is_torchrun_worker() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
