"""Stop signals: a run is told to stop, all its ranks come to agree, and nothing finished is lost."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from errors import StopRequested
from training.distributed import World
from training.launcher import environment_rank, is_torchrun_worker

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


class StopSignal:
    """SIGTERM, SIGUSR1 and Ctrl-C as a wish to stop that all ranks come to agree on.

    Inside a window of micro-batches a signal is only noted, and the loop asks `agreed()`. While `at_once` is set - data
    being prepared, a model compiling, anything before the first new step - it raises StopRequested where it lands.
    Python runs handlers between bytecodes only, so a thread sees the signals as well. It ends the process at a second
    Ctrl-C; where nothing can be lost but the main thread sits in a long C++ call; and where the other ranks do not
    answer (one is gone or stuck): then the last finished save is what stays.
    """

    PATIENCE_SECONDS = 10.0
    VOTE_SECONDS = 0.5  # about so often the ranks vote: with many of them, a vote costs as much as a short micro-batch
    LAUNCHER_ECHO_SECONDS = 2.0  # a launcher passes on a Ctrl-C that its workers may have had from the terminal already

    def __init__(self) -> None:
        self.received = 0
        self.at_once = False
        self.has_new_step = False  # a step was finished since the start: leaving means saving first
        self.is_saving = False  # the ranks wait for the disk, not for each other
        self.vote_every = 1  # calls of `agreed`; rank 0 tells all another number, since all must vote together
        self._calls = 0
        self._asked = 0.0  # time of the last vote of several ranks
        self._pace = 0.0  # seconds from one vote to the next
        self._agreed = False
        self.before_leaving: Callable[[], object] = lambda: None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there may Python set handlers
            for signum in STOP_SIGNALS:
                self._old[signum] = signal.signal(signum, self._handle)
            reader, self._bell = socket.socketpair()
            self._bell.setblocking(False)
            self._old_bell = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), name="stop-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._old:
            signal.set_wakeup_fd(self._old_bell)
            self._bell.close()  # ends the thread
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        self._old.clear()

    def _handle(self, signum: int, _frame: object) -> None:
        self.received = self.received or signum
        if self.at_once:
            self.at_once = False
            raise StopRequested

    def _watch(self, bell: socket.socket) -> None:
        """The thread: one byte, the signal's number, comes for each signal whatever the main thread is doing."""
        first_interrupt, deadline = math.inf, None
        while True:
            if not select.select([bell], [], [], deadline and max(0.0, deadline - time.monotonic()))[0]:
                if not self.has_new_step:
                    self.leave("not stopped in time; nothing is lost", self.exit_code)
                if self._asked and not self._agreed and not self.is_saving:
                    self.leave("no agreement between ranks; leaving alone")
                deadline = time.monotonic() + self.PATIENCE_SECONDS
                continue
            signum = int.from_bytes(bell.recv(1), "little")
            if not signum:
                return bell.close()
            if signum not in STOP_SIGNALS:
                continue
            self.received = self.received or signum
            deadline = deadline or time.monotonic() + self.PATIENCE_SECONDS + 2 * self._pace
            if signum == signal.SIGINT:
                if time.monotonic() - first_interrupt > self.LAUNCHER_ECHO_SECONDS * is_torchrun_worker():
                    self.leave("second Ctrl-C: stopping at once; the last save stays")
                first_interrupt = min(first_interrupt, time.monotonic())

    def step_finished(self) -> None:
        """From here on a stop has a finished step to save: it waits for the end of a step and no longer raises."""
        self.at_once, self.has_new_step = False, True

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside this block the ranks wait for the disk: no answer from one does not mean that it is gone."""
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False

    @contextmanager
    def immediately(self) -> Iterator[None]:
        """Signals raise StopRequested inside this block, and on entry if one came earlier."""
        self.at_once = True
        try:
            if self.received:
                raise StopRequested
            yield
        finally:
            self.at_once = False

    def agreed(self, world: World, *also: bool) -> tuple[bool, ...]:
        """(stop, *also), each true if it is on any rank. All ranks must call; they vote every `vote_every` calls, and
        between votes nothing is agreed."""
        if world.size == 1:
            return (bool(self.received), *also)
        self._calls += 1
        if self._calls % self.vote_every:
            return (False,) * (1 + len(also))
        if self._asked:
            self._pace = max(time.monotonic() - self._asked, 0.9 * self._pace)
        most, *others = world.max([self.received, *map(int, also)])
        self.received = self.received or most  # one that came during the vote counts at the next
        self._asked, self._agreed = time.monotonic(), bool(most)
        return (self._agreed, *map(bool, others))

    def wanted_pace(self, seconds: float) -> int:
        """Calls of `agreed` that make up VOTE_SECONDS, when they come so many seconds apart (NaN: not known yet)."""
        return max(1, int(self.VOTE_SECONDS / seconds)) if seconds > 0 else 1

    @property
    def exit_code(self) -> int:
        """128 + signal as plain python; 0 as a torchrun worker, whose launcher would call anything else a failure (and
        must, while ranks have not met: the others would wait for this one)."""
        have_met = environment_rank().world_size == 1 or dist.is_initialized()
        return 0 if is_torchrun_worker() and have_met else 128 + self.received

    def leave(self, reason: str, code: int | None = None) -> None:
        """End this process here and now, from any thread."""
        print(reason, file=sys.stderr, flush=True)
        note = threading.Thread(target=self.before_leaving, daemon=True)
        note.start()
        note.join(1.0)  # a disk that hangs must not hold up the end
        os._exit(128 + (self.received or signal.SIGINT) if code is None else code)


def ignore_stop_signals(_worker: int = 0) -> None:
    """For loader processes: a signal to the whole process group is the trainer's business; they end when it does."""
    signal.set_wakeup_fd(-1)  # inherited: each of them would repeat the signal to the trainer
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
