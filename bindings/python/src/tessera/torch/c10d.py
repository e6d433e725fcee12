"""The backend "tessera" of `torch.distributed`.

    dist.init_process_group("tessera")            # or "cpu:tessera", "cpu:tessera,cuda:nccl"

PyTorch finds it through the entry point ``torch.distributed.backends``; if the package is used without being installed,
`import tessera.torch` registers it. Each process group has two communicators, made through the group's own store: one
for collectives, which run in the order of their calls, and one for sends and receives, which may overtake them.

Tensors are used in place. Tensors that are not contiguous are copied, and results are copied back. A synchronous
collective runs on the caller's thread.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend

from .. import _core
from ..comm import Comm
from ..errors import InvalidArgument, InvalidState, Unsupported
from .meeting import meet, meet_again
from .ranks import deadline
from .sparse import sum_of_ranks
from .views import Views, at, joined, pieces_of
from .work import Pending, teach_is_completed

__all__ = ["NAME", "TesseraBackend", "register"]

NAME = "tessera"

_SUM, _AVG, _MIN, _MAX, _PROD = range(1, 6)  # the core's reductions; it has no bitwise ones

# How a reduction is done: by one of the core's reductions, or by gathering the ranks' values and folding them here.
How = int | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_WHOLE: dict[Any, How] = {
    dist.ReduceOp.SUM: _SUM,
    dist.ReduceOp.AVG: _AVG,
    dist.ReduceOp.MIN: _MIN,
    dist.ReduceOp.MAX: _MAX,
    dist.ReduceOp.PRODUCT: _PROD,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_REAL: dict[Any, How] = {op: how for op, how in _WHOLE.items() if isinstance(how, int)}
_COMPLEX: dict[Any, How] = {dist.ReduceOp.SUM: _SUM, dist.ReduceOp.AVG: _AVG}
_BOOL: dict[Any, How] = {  # bytes of 0 and 1
    dist.ReduceOp.SUM: _MAX,
    dist.ReduceOp.MAX: _MAX,
    dist.ReduceOp.BOR: _MAX,
    dist.ReduceOp.MIN: _MIN,
    dist.ReduceOp.PRODUCT: _MIN,
    dist.ReduceOp.BAND: _MIN,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_UNSET = timedelta(0)  # timeouts below this are unset (PyTorch's kUnsetTimeout)

# One collective of the communicator; the argument is whether to return immediately.
Call = Callable[[bool], Any]


def register() -> None:
    """Register the backend with `torch.distributed`, for tensors in CPU memory. May be called repeatedly."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: Any) -> TesseraBackend:
    teach_is_completed()
    group = str(options.group_id)
    members = options.global_ranks_in_group or range(options.group_size)
    backend = TesseraBackend(options.store, options.group_rank, members, deadline(options.timeout), group)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        _wrapped.add(backend)
    return backend


# With TORCH_DISTRIBUTED_DEBUG=DETAIL PyTorch wraps the backend, and the wrapper keeps only the C++ part of the Python
# object alive.
_wrapped: set[TesseraBackend] = set()


class TesseraBackend(_Backend):
    """The backend of one process group. Created by `torch.distributed`, which calls its methods for the group's.

    Errors are Tessera's: `tessera.Mismatch`, `tessera.PeerLost`, `tessera.TesseraTimeout` and so on. All are
    `RuntimeError`; communication errors are also `torch.distributed.DistBackendError`.
    """

    # Every property that PyTorch queries, even the false ones: one that a Python class lacks recurses without end.
    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False

    def __init__(self, store: Any, rank: int, members: Sequence[int], timeout: timedelta, group: str) -> None:
        super().__init__(rank, len(members))
        self._store = store
        self._rank = rank
        self._members = members  # their numbers in the job
        self._world_size = len(members)
        self._options = _Backend.Options(NAME, timeout)
        self._options.group_name = group
        self._limit = self._timeout = timeout
        names = [f"process group {group}", f"process group {group}, transfers"]
        self._comm, self._transfers = meet(store, rank, members, timeout, names)
        self._transferring = threading.Lock()  # one thread at a time issues transfers
        self._issuing = threading.Lock()  # and one collectives; guards the two below
        self._issued = 0
        self._latest: Sequence[_core.Work] = ()
        self._barriers = 0
        # Also at process exit, so that peers see an orderly end even if the group was not destroyed.
        self._close = weakref.finalize(self, _close, self._comm, self._transfers)

    # ------------------------------------------------------------ what PyTorch asks

    def getBackendName(self) -> str:
        return NAME

    @property
    def options(self) -> Any:
        return self._options

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> TesseraBackend:
        """A group of `ranks` (numbers in this group), in that order. They meet through `store`."""
        chosen = list(ranks)
        if self._rank not in chosen:  # None would be the answer, which PyBackend.hpp of 2.15 dereferences
            raise Unsupported(
                f"rank {self._rank} is in none of the groups; with a Python backend, split_group must include every "
                "rank. Give it its own group, or use new_group"
            )
        timeout = self._limit if options is None else options._timeout
        name = self._options.group_name if options is None else options.group_name
        members = [self._members[each] for each in chosen]
        return TesseraBackend(store, chosen.index(self._rank), members, timeout, name)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Called by PyTorch when other ranks make a group. Does nothing: they meet without this rank."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later operations, at most the one that the group was created with."""
        if timeout > self._limit:
            raise Unsupported(
                f"the timeout {timeout} is longer than {self._limit}, the timeout of the process group; pass the "
                "longer one to init_process_group or new_group"
            )
        self._timeout = timeout
        self._options._timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def abort(self) -> None:
        """Fail all pending operations, on this rank and its peers. Callable from any thread."""
        for comm in (self._comm, self._transfers):
            if not comm.closed:
                comm.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Leave the group once its collectives in flight are done. Does not wait for ranks without any."""
        if not self._close.alive:
            return
        for work in self._latest:
            try:
                _core.work_wait(work, None)
            except Exception:  # reported to whoever waits for the work or its future
                break
        self._latest = ()
        self._close()
        _wrapped.discard(self)

    # ------------------------------------------------------------ collectives

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Pending | None:
        views = Views()
        over = [views.updates(_alone(tensors, "broadcast", options.rootTensor))]
        return self._run(
            options, [lambda later: _core.comm_broadcast(self._handle, over, options.rootRank, later)], tensors, views
        )

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Pending | None:
        if _alone(tensors, "allreduce").is_sparse:
            return self.allreduce_sparse(tensors, options)
        return self.allreduce_coalesced(tensors, options)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any) -> Pending | None:
        dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
        if len(dtypes) != 1:
            raise InvalidArgument(f"allreduce_coalesced got tensors of {dtypes}; all tensors must have one dtype")
        views = Views()
        how = _how(options.reduceOp, tensors[0])
        if isinstance(how, int):
            over = [views.updates(tensor, reduced=True) for tensor in tensors]
            calls: list[Call] = [lambda later: _core.comm_all_reduce(self._handle, over, how, later)]
        else:
            calls = [self._gathered(views, tensor, tensor, how) for tensor in tensors]
        return self._run(options, calls, tensors, views)

    def allreduce_sparse(self, tensors: list[torch.Tensor], options: Any) -> Pending | None:
        """The sum of sparse tensors, such as embedding gradients: gathers the entries of all ranks and adds them here.

        Returns when the sum is complete, even if called asynchronously.
        """
        tensor = _alone(tensors, "allreduce")
        if options.reduceOp.op != dist.ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
            raise Unsupported(
                f"{_name_of(options.reduceOp)} of {tensor.layout} tensors is not supported; SUM of torch.sparse_coo is"
            )
        with self._issuing:
            self._issued += 1
            added = sum_of_ranks(self._handle, tensor)
        with torch.no_grad():
            tensor.copy_(added)
        return Pending([], tensors) if options.asyncOp else None

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> Pending | None:
        views, root = Views(), options.rootRank
        tensor = _alone(tensors, "reduce", options.rootTensor)
        how, is_root = _how(options.reduceOp, tensor), self._rank == root
        if isinstance(how, int):
            over = views.updates(tensor, reduced=True) if is_root else views.reads(tensor, reduced=True)
            call: Call = functools.partial(_core.comm_reduce, self._handle, over, over if is_root else None, how, root)
        else:
            call = self._gathered(views, tensor, tensor if is_root else None, how)
        return self._run(options, [call], tensors, views)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Pending | None:
        _alone(inputs, "allgather")
        results = _alone(outputs, "allgather")
        return self.allgather_coalesced([[output] for output in results], inputs, options, results)

    def allgather_coalesced(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        options: Any,
        results: list[torch.Tensor] | None = None,
    ) -> Pending | None:
        """Rank r's i-th input becomes ``outputs[r][i]``, on every rank."""
        views = Views()
        calls: list[Call] = []
        for i, tensor in enumerate(inputs):
            into_tensors = [of_rank[i] for of_rank in outputs]
            into = [views.writes(output) for output in into_tensors]
            over = views.reads(tensor, own=_address(into_tensors, self._rank))
            calls.append(functools.partial(_core.comm_all_gather_v, self._handle, over, into))
        results = [tensor for of_rank in outputs for tensor in of_rank] if results is None else results
        return self._run(options, calls, results, views)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> Pending | None:
        return self.all_gather_single_coalesced([output], [input], options)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> Pending | None:
        views = Views()
        calls: list[Call] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            into = views.writes(output)
            over = views.reads(tensor, own=output.data_ptr() + self._rank * tensor.nbytes)
            calls.append(functools.partial(_core.comm_all_gather, self._handle, over, into))
        return self._run(options, calls, outputs, views)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Pending | None:
        views, root = Views(), options.rootRank
        tensor = _alone(inputs, "gather")
        results = _alone(outputs, "gather") if self._rank == root else []
        into = views.writes_joined(results) if self._rank == root else None
        over = views.reads(tensor, own=_address(results, root))
        return self._run(
            options, [lambda later: _core.comm_gather(self._handle, over, into, root, later)], results, views
        )

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> Pending | None:
        views, root = Views(), options.rootRank
        parts, output = _alone(inputs, "scatter") if self._rank == root else [], _alone(outputs, "scatter")
        over = views.reads(joined(parts)) if self._rank == root else None
        into = views.writes(output, own=_address(parts, root))
        return self._run(
            options, [lambda later: _core.comm_scatter(self._handle, over, into, root, later)], outputs, views
        )

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any
    ) -> Pending | None:
        parts, output = _alone(inputs, "reduce_scatter"), _alone(outputs, "reduce_scatter")
        if len({part.numel() for part in parts}) == 1:
            return self.reduce_scatter_single(output, joined(parts), options)
        views = Views()
        calls: list[Call] = []
        how = _how(options.reduceOp, output)
        if not isinstance(how, int):
            raise Unsupported(
                f"{_name_of(options.reduceOp)} of parts of different lengths is not supported; use equal lengths"
            )
        for root, part in enumerate(parts):
            over = views.reads(part, reduced=True)
            into = views.writes(output, reduced=True) if root == self._rank else None
            calls.append(functools.partial(_core.comm_reduce, self._handle, over, into, how, root))
        return self._run(options, calls, outputs, views)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> Pending | None:
        return self.reduce_scatter_single_coalesced([output], [input], options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> Pending | None:
        views = Views()
        calls: list[Call] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            how = _how(options.reduceOp, tensor)
            if isinstance(how, int):
                over = views.reads(tensor, reduced=True)
                into = views.writes(output, reduced=True, own=tensor.data_ptr() + self._rank * output.nbytes)
                calls.append(functools.partial(_core.comm_reduce_scatter, self._handle, over, into, how))
            else:
                calls.append(self._gathered(views, tensor, output, how))
        return self._run(options, calls, outputs, views)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> Pending | None:
        """Send rows of `input` to all ranks according to `input_splits`; equal numbers if both lists are empty."""
        views = Views()
        if not output_splits and not input_splits:
            over, into = views.reads(input), views.writes(output)
            return self._run(
                options, [lambda later: _core.comm_all_to_all(self._handle, over, into, later)], [output], views
            )
        inputs = pieces_of(views.whole(input), input_splits, self._world_size, "input")
        outputs = pieces_of(views.whole(output, write=True), output_splits, self._world_size, "output")
        return self._exchange(outputs, inputs, options, [output], views)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any) -> Pending | None:
        for what, tensors in (("outputs", outputs), ("inputs", inputs)):
            if len(tensors) != self._world_size:
                raise InvalidArgument(f"all_to_all: got {len(tensors)} {what} for {self._world_size} ranks")
        views = Views()
        read = [views.whole(tensor) for tensor in inputs]
        written = [views.whole(tensor, write=True) for tensor in outputs]
        return self._exchange(written, read, options, outputs, views)

    def barrier(self, options: Any) -> Pending | None:
        return self._run(options, [lambda later: _core.comm_barrier(self._handle, later)], [], Views())

    def monitored_barrier(self, options: Any, wait_all_ranks: bool = False) -> None:
        """Return once every rank has called it, or name the ranks that have not. The group stays usable either way."""
        self._barriers += 1
        timeout = self._timeout if options.timeout < _UNSET else options.timeout
        meet_again(self._store, self._rank, self._members, timeout, self._barriers, wait_all_ranks)

    # ------------------------------------------------------------ sends and receives

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        views = Views()
        over = views.reads(_alone(tensors, "send"))
        with self._transferring:
            work = _core.comm_send(self._transfers._handle, over, to, tag, True)
        assert work is not None
        return self._pending([work], tensors, views, self._timeout)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        views = Views()
        into = views.writes(_alone(tensors, "recv"))
        with self._transferring:
            work = _core.comm_recv(self._transfers._handle, into, source, tag, True)
        assert work is not None
        return self._pending([work], tensors, views, self._timeout)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Pending:
        raise Unsupported("a receive has to name its source: irecv(tensor, src=rank)")

    # ------------------------------------------------------------ how they run

    @property
    def _handle(self) -> _core.Comm:
        return self._comm._handle

    def _run(
        self, options: Any, calls: Sequence[Call], results: list[torch.Tensor], views: Views, *, at_once: bool = False
    ) -> Pending | None:
        """Issue one operation. Returns None for a synchronous one, which is then done."""
        given = options.timeout
        patience = self._timeout if given < _UNSET else min(given, self._timeout)
        later = bool(options.asyncOp) or at_once or patience < self._limit
        with self._issuing:
            self._issued += 1
            self._latest = works = [work for call in calls if (work := call(later)) is not None]
        if not later:
            views.finish()
            return None
        pending = self._pending(works, results, views, patience)
        if options.asyncOp:
            return pending
        pending.wait()
        return None

    def _pending(
        self, works: Sequence[_core.Work], results: list[torch.Tensor], views: Views, patience: timedelta
    ) -> Pending:
        finish = views.finish if views.copied else None
        if patience < self._limit:
            return Pending(works, results, finish, patience, lambda message: self._give_up(message))
        return Pending(works, results, finish)

    def _give_up(self, message: str) -> None:
        for comm in (self._comm, self._transfers):
            if not comm.closed:
                comm.abort(message)

    def _exchange(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        options: Any,
        results: list[torch.Tensor],
        views: Views,
    ) -> Pending | None:
        """An all-to-all of parts of any lengths. Empty parts are sent too, so that differences are detected."""
        calls: list[Call] = []
        for step in range(1, self._world_size):
            to, source = (self._rank + step) % self._world_size, (self._rank - step) % self._world_size
            calls.append(functools.partial(_core.comm_send, self._handle, at(inputs[to]), to, 0))
            calls.append(functools.partial(_core.comm_recv, self._handle, at(outputs[source]), source, 0))
        own = inputs[self._rank]
        if own.numel() != outputs[self._rank].numel():
            raise InvalidArgument(
                f"all_to_all: rank {self._rank} sends {own.numel()} elements to itself but has room for "
                f"{outputs[self._rank].numel()}"
            )
        with torch.no_grad():
            outputs[self._rank].copy_(own.reshape(outputs[self._rank].shape))
        return self._run(options, calls, results, views, at_once=True)

    def _gathered(
        self, views: Views, tensor: torch.Tensor, output: torch.Tensor | None, fold: Callable[..., torch.Tensor]
    ) -> Call:
        """The call that gathers `tensor` from all ranks and then folds them, or this rank's part, into `output`."""
        over = views.reads(tensor)
        of_all = torch.empty((self._world_size, tensor.numel()), dtype=tensor.dtype)
        into = views.writes(of_all)
        if output is not None:
            first = self._rank * output.numel() if output.numel() < tensor.numel() else 0

            def folded() -> None:
                whole = functools.reduce(fold, of_all[:, first : first + output.numel()])
                output.copy_(whole.view(output.shape))

            views.afterwards(folded)
        return functools.partial(_core.comm_all_gather, self._handle, over, into)


Given = TypeVar("Given")


def _alone(given: Sequence[Given], what: str, root_tensor: int = 0) -> Given:
    """The only member of a list. `torch.distributed` never passes several; Gloo would reduce them all together and
    broadcast one into all."""
    if len(given) != 1 or root_tensor != 0:
        which = f" with root tensor {root_tensor}" if root_tensor else ""
        raise InvalidArgument(
            f"{what} got {len(given)} tensors{which}, expected 1; allreduce_coalesced and similar calls take several"
        )
    return given[0]


def _address(tensors: Sequence[torch.Tensor], index: int) -> int:
    """The address of one of the tensors; 0 if there are too few, which the core refuses."""
    return tensors[index].data_ptr() if index < len(tensors) else 0


def _how(op: Any, tensor: torch.Tensor) -> How:
    dtype = tensor.dtype
    table = (
        _REAL if dtype.is_floating_point else _BOOL if dtype is torch.bool else _COMPLEX if dtype.is_complex else _WHOLE
    )
    how = table.get(op.op)
    if how is None:
        ops = ", ".join(str(known).removeprefix("RedOpType.") for known in table)
        raise Unsupported(f"the backend {NAME!r} does not support {_name_of(op)} of {dtype} tensors; supported: {ops}")
    return how


def _name_of(op: Any) -> str:
    return str(op.op).removeprefix("RedOpType.")


def _close(comm: Comm, transfers: Comm) -> None:
    for one in (transfers, comm):
        try:
            one.close()
        except InvalidState:  # another thread waits in it: abort, so that it can be closed
            one.abort("the process group was destroyed")


register()
