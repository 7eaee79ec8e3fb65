"""Between an agent and a rank it started: messages over a socket pair, and a notice board."""

import json
import mmap
import os
import socket
from typing import Any


class Channel:
    """One end of a socket pair; every message is one JSON object."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Raises OSError when the other end is gone."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Block for data; the complete messages that came, or None when the other end closed."""
        try:
            data = self.connection.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


class Notice:
    """One line that the rank writes and its agent reads at any time, in memory that both share.

    Writing costs no system call, so a rank can name every action as it starts; and the line stays
    readable when the rank hangs or has been killed, which a message on its way would not.
    """

    _SIZE = 512

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, self._SIZE)

    @classmethod
    def create(cls) -> "Notice":
        """An empty notice; its descriptor goes to the rank."""
        descriptor = os.memfd_create("pptune-notice")
        os.ftruncate(descriptor, cls._SIZE)
        return cls(descriptor)

    def write(self, text: str) -> None:
        """Replace the line; what is too long for it is cut off."""
        self._memory[:] = text.encode()[: self._SIZE].ljust(self._SIZE, b"\0")

    def read(self) -> str:
        """The line, empty where nothing was written yet."""
        return self._memory[:].rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
