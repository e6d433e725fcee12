"""Ranks that may share a GPU: NCCL takes each for a separate host, and they communicate over loopback sockets.

NCCL refuses two ranks of one host on one device. `NCCL_HOSTID` tells it that they are on different hosts; what NCCL
would then try to use between hosts, or across the fabric, is turned off. It reads all of this when a rank connects.
"""

from __future__ import annotations

import os

VARIABLES = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
}


def share(devices: int) -> None:
    """Unless each rank of this host has one of its `devices`."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > devices:
        os.environ.update(VARIABLES, NCCL_HOSTID=f"rank-{os.environ['RANK']}")
