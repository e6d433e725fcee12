"""PyTorch's part of the store benchmark: reads "CLIENTS LIBUV" lines, prints operations a second for each."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing import shared_memory

from torch.distributed import TCPStore

WARM_UP, MEASURED = 0.1, 0.5


def client(port: int, number: int, counts: memoryview, phase: memoryview) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    key, value = f"ranks/{number}/address", "v" * 32
    counts[number] = 0
    phase[1 + number] = 1
    while phase[0] == 0:
        time.sleep(0.001)
    while phase[0] == 1:
        store.set(key, value)
        store.get(key)
        counts[number] += 2


def server(port: memoryview, phase: memoryview, *, libuv: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    port[0] = store.port
    while True:
        time.sleep(1)


def rate(clients: int, *, libuv: bool) -> float:
    block = shared_memory.SharedMemory(create=True, size=8 * (2 * clients + 2))
    words = block.buf.cast("q")
    counts, phase, port = words[:clients], words[clients : 2 * clients + 1], words[2 * clients + 1 :]
    children = []
    for number in range(-1, clients):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if number < 0:
                    server(port, phase, libuv=libuv)
                else:
                    while port[0] == 0:
                        time.sleep(0.001)
                    client(port[0], number, counts, phase)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    while sum(phase[1:]) < clients:
        time.sleep(0.001)
    phase[0] = 1
    time.sleep(WARM_UP)
    before, begin = sum(counts), time.monotonic()
    time.sleep(MEASURED)
    after, seconds = sum(counts), time.monotonic() - begin
    phase[0] = 2
    for pid in children[1:]:
        os.waitpid(pid, 0)
    os.kill(children[0], signal.SIGKILL)
    os.waitpid(children[0], 0)
    for view in (counts, phase, port, words):
        view.release()
    block.close()
    block.unlink()
    return (after - before) / seconds


for line in sys.stdin:
    asked, with_libuv = map(int, line.split())
    print(rate(asked, libuv=bool(with_libuv)), flush=True)
