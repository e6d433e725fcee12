"""Operations a second of the TCP store on loopback, plaintext and TLS, beside PyTorch's TCPStore and the bound.

Clients are processes with one connection each, which set and get small values back to back. PyTorch has two servers; a
round takes the faster one. It has no TLS. The bound is that of the plaintext.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import results

CLIENTS = [1, 4, 16]
BOUND = 50_000.0
TORCH = "torch.distributed.TCPStore"


def ours(binaries: Path, clients: int, *, encrypted: bool) -> float:
    env = dict(os.environ, **({"TESSERA_TLS": "psk"} if encrypted else {}))
    command = [binaries / "store", str(clients), "1"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout
    return json.loads(output)["operations"]


class Peer:
    """A process that has imported PyTorch once, and forks the clients of each round."""

    def __init__(self) -> None:
        worker = Path(__file__).parent / "store_torch.py"
        self.process = subprocess.Popen(
            [sys.executable, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def operations(self, clients: int) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        rates = []
        for libuv in (0, 1):
            self.process.stdin.write(f"{clients} {libuv}\n")
            self.process.stdin.flush()
            rates.append(float(self.process.stdout.readline()))
        return max(rates)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def bench(binaries: Path, rounds: int) -> list[results.Case]:
    cases = []
    peer = Peer()
    try:
        for clients in CLIENTS:
            plain, encrypted, torch = [], [], []
            for _ in range(rounds):
                plain.append(ours(binaries, clients, encrypted=False))
                encrypted.append(ours(binaries, clients, encrypted=True))
                torch.append(peer.operations(clients))
            words = f"{clients} client{'s' if clients > 1 else ''}"
            for name, rates, target in ((words, plain, 1.0), (f"{words}, TLS", encrypted, None)):
                pairs = [(rate, BOUND) for rate in rates]
                cases.append(results.case(name, "operations/s", "bound", pairs, target, smaller_is_better=False))
            pairs = list(zip(plain, torch, strict=True))
            cases.append(results.case(words, "operations/s", TORCH, pairs, None, smaller_is_better=False))
    finally:
        peer.close()
    return cases
