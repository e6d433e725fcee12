"""Carries frames between two network interfaces, each of them late: python delay_link.py ONE OTHER LEAST_MS MOST_MS.

Prints `ready` and goes on until its standard input ends. Frames keep their order. With each goes the kernel's header of
what a network card would still do to it (checksum, cutting into segments), so that the other side takes it as if it had
not been here.
"""

from __future__ import annotations

import collections
import contextlib
import random
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, ETH_P_ALL = 263, 15, 3
LARGEST = 10 + 14 + 65535  # both headers and the largest packet


class Side:
    """An interface, and the frames that are on their way to it."""

    def __init__(self, interface: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self.socket.bind((interface, ETH_P_ALL))
        self.socket.setblocking(False)
        self.frames: collections.deque[tuple[float, bytes]] = collections.deque()

    def take(self, least: float, most: float, other: Side) -> None:
        """Everything that has arrived here is on its way to the other side."""
        while True:
            try:
                frame, address = self.socket.recvfrom(LARGEST)
            except BlockingIOError:
                return
            if address[2] == socket.PACKET_OUTGOING:
                continue  # which this program has sent
            due = time.monotonic() + random.uniform(least, most)
            if other.frames:
                due = max(due, other.frames[-1][0])
            other.frames.append((due, frame))

    def give(self) -> None:
        while self.frames and self.frames[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # lost, as on any network
                self.socket.send(self.frames.popleft()[1])


def main() -> None:
    sides = [Side(interface) for interface in sys.argv[1:3]]
    least, most = (float(text) / 1000 for text in sys.argv[3:5])
    print("ready", flush=True)
    while True:
        due = [side.frames[0][0] for side in sides if side.frames]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([sys.stdin, *(side.socket for side in sides)], [], [], wait)
        if sys.stdin in readable:
            return
        for side, other in (sides, reversed(sides)):
            side.take(least, most, other)
        for side in sides:
            side.give()


if __name__ == "__main__":
    main()
