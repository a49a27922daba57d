"""A command queue and a result queue for each worker: frames of bytes over one duplex socket.

The parent's end never blocks: what the socket does not take waits in a buffer, so a worker that
does not read can't stop the others. The worker's end blocks, as it has nothing else to do.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque

_HEADER = struct.Struct("<Q")
_READ_SIZE = 1 << 18


class ParentEnd:
    """Sends commands and receives results without ever waiting for the worker."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        self._broken = False

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    @property
    def waiting(self) -> bool:
        """Whether there are bytes that the socket has not taken yet; :meth:`flush` when it can."""
        return bool(self._outgoing) and not self._broken

    def send(self, data: bytes) -> None:
        """Queue one frame and write what the socket takes. A dead worker is noticed elsewhere."""
        self._outgoing.append(memoryview(_HEADER.pack(len(data)) + data))
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes now."""
        while self.waiting:
            head = self._outgoing[0]
            try:
                written = self._socket.send(head)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # the worker is gone; its exit is reported by its process
                self._broken = True
                return
            if written == len(head):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = head[written:]

    def receive(self) -> tuple[list[bytes], bool]:
        """The frames that have arrived, and whether the worker's end is closed.

        Half a frame of a worker that died is dropped.
        """
        open_still = True
        while True:
            try:
                data = self._socket.recv(_READ_SIZE)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                open_still = False
                break
            self._incoming += data
            if len(data) < _READ_SIZE:
                break
        return self._take_frames(), not open_still

    def _take_frames(self) -> list[bytes]:
        frames, start, buffer = [], 0, self._incoming
        while len(buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + size
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + _HEADER.size : end]))
            start = end
        if start:
            del buffer[:start]
        return frames

    def close(self) -> None:
        """Close the socket; the worker sees an end of file."""
        self._socket.close()


class WorkerEnd:
    """Receives commands in one thread and sends results from any."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # whatever the program made the default of its sockets
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send one frame whole. OSError when the parent is gone."""
        frame = _HEADER.pack(len(data)) + data
        with self._lock:
            self._socket.sendall(frame)

    def receive(self) -> bytes:
        """Wait for one frame. EOFError when the parent is gone."""
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        return bytes(self._exactly(size))

    def close(self) -> None:
        """Close the socket in this process: others that share it keep it open."""
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._socket.recv_into(view[got:])
            if not count:
                raise EOFError("the parent closed its end")
            got += count
        return data
