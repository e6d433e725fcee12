"""What the ranks of a `torch.distributed` job share: their checks, and how they end. run_torch.py starts them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a rank that is started as a script

from patience import patience
from sampling import sample

# Within which a rank hears of another one's death. It is 1 where the rank that waits gets to run, which a machine that
# runs other tests too may not let it.
NOTICED_S = patience(5)


def leave() -> NoReturn:
    """End a rank of PyTorch alone, which has done its work: threads of PyTorch abort the end of the interpreter now and
    then ("terminate called without an active exception")."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def end() -> NoReturn:
    """End a rank whose groups of PyTorch's gloo are destroyed. What Python registered for the exit runs; the
    interpreter is not torn down, because threads of gloo may still let go of tensors then, for which they need it: such
    a thread aborts the process ("terminate called without an active exception")."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def refused(
    kinds: type[BaseException] | tuple[type[BaseException], ...], text: str, operation: Callable[[], object]
) -> None:
    """In a rank: the operation raises an error of these classes, whose message holds `text`."""
    try:
        operation()
    except kinds as error:
        assert text in str(error), str(error)
        return
    raise AssertionError(f"rank {os.environ['RANK']}: nothing was refused with {text!r}")


def alone_on_each(act: Callable[[], object], rank: int, ranks: int) -> None:
    """Each rank acts while the others wait: for a collective in it nobody would come."""
    import torch.distributed as dist

    for turn in range(ranks):
        if turn == rank:
            act()
        dist.monitored_barrier(timeout=timedelta(seconds=patience(20)))


def run_checks(checks: Sequence[Callable[[], object]], names: Sequence[str], rank: int) -> None:
    """Runs those of these names, or a sample of half, one after the other; rank 0 prints what each took."""
    assert {check.__name__ for check in checks} >= set(names), names
    half = (len(checks) + 1) // 2
    chosen = (
        [check for check in checks if check.__name__ in names]
        if names
        else sample(checks, half, Path(sys.argv[0]).stem)
    )
    for check in chosen:
        since = time.monotonic()
        try:
            check()
        except BaseException as error:
            error.add_note(f"rank {rank}, in {check.__name__}")
            raise
        if rank == 0:
            print(f"{check.__name__} {time.monotonic() - since:.2f} s", flush=True)


def bits(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
