"""Work for the disk in a thread: the loop pays only for a snapshot of the tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from errors import NonFinite, SaveFailed


class BackgroundWriter:
    """Runs saves in a thread, one at a time; the loop pays only for the snapshot.

    A failure surfaces as SaveFailed at the next `snapshot`, `submit` or `wait`. The thread is not a daemon: the
    interpreter does not exit before the save has ended.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def wait(self) -> None:
        """Return when no save is running any more; raises SaveFailed if the last one failed, NonFinite if it
        refused to save."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, (SaveFailed, NonFinite)):
            raise error
        if error is not None:
            raise SaveFailed(f"a save failed: {type(error).__name__}: {error}") from error

    def submit(self, save: Callable[[], object]) -> None:
        """Wait for the save before, then start this one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint-writer", daemon=False)
        self._thread.start()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except BaseException as error:  # handed to the main thread by wait()
            self._error = error

    @torch.no_grad()
    def snapshot(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copy tensors to host memory, laid out as `write_checkpoint` takes them.

        The buffers are kept for the next snapshot (page faults cost more than the copy), so the last save must end.
        From CUDA the copies go to pinned memory together, with one synchronisation.
        """
        self.wait()
        devices: set[torch.device] = set()
        copies: dict[str, dict[str, Tensor]] = {}
        for file, entries in tensors.items():
            copies[file] = {}
            for name, tensor in entries.items():
                buffer = self._buffer((file, name), tensor)
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                copies[file][name] = buffer
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer
