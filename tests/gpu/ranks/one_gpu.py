"""Ranks that may share a GPU: NCCL takes each for a host of its own, and they meet over loopback sockets.

NCCL refuses two ranks of one host on one device. `NCCL_HOSTID` tells it that they are on different hosts; what NCCL
would then try to use between hosts, or across the fabric, is turned off. Import it before anything that loads NCCL.
"""

from __future__ import annotations

import os

SHARED = {
    "NCCL_HOSTID": f"rank-{os.environ.get('RANK', '0')}",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
}


def share() -> None:
    """Unless each rank of this host has a device of its own."""
    import torch

    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        os.environ.update(SHARED)


share()
