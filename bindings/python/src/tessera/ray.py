"""Jobs on a Ray cluster, whose ranks are actors.

    import tessera.ray

    def train(comm, root):
        ...
        return loss

    losses = tessera.ray.run(train, 4, args=("/shared/runs/model",), resources_per_worker={"CPU": 2})

Needs the package ``ray`` and, on every node of the cluster, this package.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ._base import Timeout, milliseconds
from ._engines import checked_job, failure_of, join, new_token
from .errors import InvalidArgument, TesseraTimeout
from .store import StoreServer

__all__ = ["run"]

_T = TypeVar("_T")
_AFTER_A_FAILURE = 10.0  # seconds for the other ranks to end by themselves and say why


class _Rank:
    """The actor."""

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, uri: str, token: str, rank: int, job: tuple[Any, ...]) -> Any:
        world_size, options, fn, args, kwargs = job
        with join(uri, token, rank, world_size, options) as comm:
            return fn(comm, *args, **kwargs)


def run(
    fn: Callable[..., _T],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    placement: str = "PACK",
    timeout: Timeout = None,
    **options: Any,
) -> list[_T]:
    """Call ``fn(comm, *args, **kwargs)`` in `num_workers` actors, which are the ranks of one job.

    Starts Ray, or joins a running cluster, as `ray.init` does by default, unless the program has done so. All ranks get
    their resources at the same moment or none does. Ranks of one node are neighbours and share memory; which ones those
    are they find out themselves. They meet at a store in this process, under a token of this job, so every node must
    reach this one. When this returns or raises, the actors have been ended.

    Parameters
    ----------
    fn : callable
        Called on every rank, with a `Comm` that is closed in order when it returns.
    num_workers : int
        The number of ranks, 1 to 4096.
    args, kwargs
        Further arguments for `fn`, the same for all ranks.
    resources_per_worker : mapping, default {"CPU": 1}
        Resources of each rank by Ray's names: ``{"CPU": 4, "GPU": 1}``.
    placement : str, default "PACK"
        Ray's strategy: ``"PACK"`` on as few nodes as possible, ``"SPREAD"`` on many, ``"STRICT_PACK"`` on one,
        ``"STRICT_SPREAD"`` each on its own.
    timeout : float or timedelta, default 600
        Seconds for the cluster to give the resources, for all ranks to join, and for each collective.
    **options
        Further options of the communicator, as of `init`: ``backend``, ``heartbeat_timeout``, ``name``, ...

    Returns
    -------
    list
        What `fn` returned, by rank.

    Raises
    ------
    ImportError
        Ray is not installed.
    TesseraTimeout
        The cluster did not give the resources in time.
    PeerLost
        A rank's process or node died; ``peer`` is the rank. The others have been ended.
    UserError
        `fn` raised on a rank: ``peer`` is the rank, ``__cause__`` its exception. The others have been ended.
    """
    world_size = checked_job(fn, num_workers)
    resources = {"CPU": 1.0} if resources_per_worker is None else dict(resources_per_worker)
    if not any(resources.values()):
        raise InvalidArgument(f"resources_per_worker is {resources}; name at least one resource, such as {{'CPU': 1}}")
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        raise ImportError("tessera.ray needs the package ray: pip install ray") from error
    seconds = 600.0 if timeout is None else (milliseconds(timeout) or 0) / 1000
    deadline = time.monotonic() + seconds
    if not ray.is_initialized():
        ray.init()

    with contextlib.ExitStack() as stack:
        token = new_token()
        server = stack.enter_context(StoreServer(ray.util.get_node_ip_address(), token=token))
        group = placement_group([resources] * world_size, strategy=placement)
        stack.callback(remove_placement_group, group)
        if not group.wait(seconds):
            raise TesseraTimeout(
                f"the Ray cluster has not placed {world_size} ranks with {resources} each ({placement}) after "
                f"{seconds:g} s; it has {ray.cluster_resources()}, of which are free {ray.available_resources()}"
            )
        named = dict(resources)
        cpus, gpus, memory = named.pop("CPU", 0), named.pop("GPU", 0), named.pop("memory", None)
        kind, actors = ray.remote(_Rank), []
        for bundle in range(world_size):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actor = kind.options(
                num_cpus=cpus, num_gpus=gpus, memory=memory, resources=named, max_restarts=0, scheduling_strategy=place
            )
            actors.append(actor.remote())
            stack.callback(ray.kill, actors[-1])

        nodes = _results(ray, [actor.node.remote() for actor in actors], deadline)
        order = sorted(range(world_size), key=lambda i: (nodes.index(nodes[i]), i))
        job = ray.put((world_size, {"timeout": timeout, **options}, fn, tuple(args), dict(kwargs or {})))
        calls = [actors[i].run.remote(server.uri, token, rank, job) for rank, i in enumerate(order)]
        return _results(ray, calls, None)


def _results(ray: Any, calls: list[Any], deadline: float | None) -> list[Any]:
    """What the ranks' calls return. After a failure the others have a while to end, so that the cause is known."""
    running = {call: rank for rank, call in enumerate(calls)}
    results: list[Any] = [None] * len(calls)
    failures: dict[int, BaseException] = {}
    died = set()
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended, _ = ray.wait(list(running), num_returns=1, timeout=left)
        if not ended:
            break
        rank = running.pop(ended[0])
        try:
            results[rank] = ray.get(ended[0])
        except ray.exceptions.RayTaskError as error:
            failures[rank] = error.cause if isinstance(error.cause, BaseException) else error
        except ray.exceptions.RayError as error:
            failures[rank] = error
            died.add(rank)
        if failures and deadline is None:
            deadline = time.monotonic() + _AFTER_A_FAILURE
    if failures:
        raise failure_of(failures, died, len(calls))
    if running:
        raise TesseraTimeout(f"the actors of ranks {sorted(running.values())} of {len(calls)} have not started in time")
    return results
