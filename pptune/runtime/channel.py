"""Messages between an agent and the ranks it started: JSON lines over a socket pair."""

import json
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
