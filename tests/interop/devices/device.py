"""A rank on a simulated CUDA device, for test_devices.py: collectives over its memory, a checkpoint of it,
what is refused, and steps of DDP, of FSDP, of tensor-parallel models, of a pipeline and of optimizers."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tessera as ts
from tessera import _core

CUDA = ctypes.CDLL("libcuda.so.1")
CUDA.simulated_cuda_allocate.restype = ctypes.c_void_p
CUDA.simulated_cuda_allocate.argtypes = [ctypes.c_int, ctypes.c_size_t]
CUDA.simulated_cuda_store.argtypes = [ctypes.c_void_p, ctypes.c_float]
CUDA.simulated_cuda_load.restype = ctypes.c_float
CUDA.simulated_cuda_load.argtypes = [ctypes.c_void_p]


class _Tensor(ctypes.Structure):
    """DLPack's managed tensor, version 0."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Floats:
    """float32, or int32 with code 0, on a device, as PyTorch's and CuPy's arrays show themselves."""

    def __init__(self, device: int, address: int, *shape: int, code: int = 2) -> None:
        self.device, self.address = device, address
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.tensor = _Tensor(address, 2, device, len(shape), code, 32, 1, self.shape, None, 0, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        assert stream == -1, "the collective says on which stream it runs"
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.name = b"dltensor"
        return new(ctypes.addressof(self.tensor), self.name, None)

    def __getitem__(self, i: int) -> float:
        return CUDA.simulated_cuda_load(self.address + 4 * i)

    def __setitem__(self, i: int, value: float) -> None:
        CUDA.simulated_cuda_store(self.address + 4 * i, value)


class Stream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0


def refused(error: type[Exception], words: str, call: Any) -> None:
    try:
        call()
    except error as refusal:
        assert words in str(refusal), refusal
    else:
        raise AssertionError(words)


def values(array: Any) -> list[float]:
    return [CUDA.simulated_cuda_load(array.address + 4 * i) for i in range(math.prod(array.shape))]


def write(array: Any, given: list[float]) -> None:
    for i, value in enumerate(given):
        CUDA.simulated_cuda_store(array.address + 4 * i, value)


def on(device: int, given: list[float]) -> Floats:
    array = Floats(device, CUDA.simulated_cuda_allocate(device, 4 * len(given)), len(given))
    for i, value in enumerate(given):
        array[i] = value
    return array


def fsdp_trains(comm: ts.Comm) -> None:
    """Three steps of SGD, in which rank r's gradient is (r + 1) times the parameter; all ranks make these calls."""
    rank, ranks = comm.rank, comm.world_size
    expected = {"w": [8.0 * (i + 1) for i in range(8)], "v": [-4.0 * (i + 1) for i in range(4)]}
    given = {name: on(rank, full if rank == 0 else [rank] * len(full)) for name, full in expected.items()}
    late = ts.Deferred((3,), device=rank)
    fsdp = ts.FSDP(comm, {"first": {"w": given["w"]}, "second": {"v": given["v"], "late": late}}, frozen=["late"])
    fsdp.set_stream(Stream())
    optimizer = ts.SGD(fsdp, lr=0.25)
    optimizer.set_stream(Stream())
    rows = {
        name: slice(-(-len(full) // ranks) * rank, -(-len(full) // ranks) * (rank + 1))
        for name, full in expected.items()
    }

    def check(params: Mapping[str, Any], *names: str) -> None:
        for name in names:
            assert values(params[name]) == expected[name], (name, values(params[name]))

    for step in range(3):
        with fsdp.forward("first") as params:
            check(params, "w")
            refused(ts.InvalidState, "is unsharded", fsdp.set_stream)
        with fsdp.forward("second") as params:
            check(params, "v")
            assert values(params["late"]) == [0, 0, 0]
            if step == 0:
                refused(TypeError, f"is on CUDA device {rank}", lambda: np.asarray(params["v"]) + 1)
                refused(ts.InvalidArgument, "is read-only", lambda: comm.on_stream(0).all_reduce(params["v"]))
        for unit, name in (("second", "v"), ("first", "w")):
            with fsdp.backward(unit) as (params, grads):
                check(params, name)
                refused(ts.InvalidArgument, "is on CUDA device", partial(grads.__setitem__, name, np.ones(8)))
                write(grads[name], [(rank + 1) * value for value in expected[name]])
        fsdp.wait()
        average = (ranks + 1) / 2
        for name, part in rows.items():
            assert values(fsdp.shard_grads[name]) == [average * value for value in expected[name][part]]
        norm = average * float(np.linalg.norm(expected["w"] + expected["v"]))
        assert abs(optimizer.clip_grad_norm(1e6) / norm - 1) < 1e-5
        optimizer.step()
        expected = {name: [value - 0.25 * average * value for value in full] for name, full in expected.items()}
    state = ts.State(model=fsdp, optim=optimizer).set_stream(rank, Stream())
    with ts.Saver(comm, os.path.join(os.environ["CHECKPOINTS"], "fsdp")) as saver:
        saver.save(3, state)
        for shard in fsdp.shards.values():
            write(shard, [7.0] * shard.shape[0])
        assert saver.resume(state) == 3
    for name, part in rows.items():
        assert values(fsdp.shards[name]) == expected[name][part]
    with fsdp.summon_full_params() as params:
        check(params, "w", "v")
    held: list[Any] = []

    def hold() -> None:
        with fsdp.forward("first") as params:
            held.append(params["w"].__dlpack__(max_version=(1, 0)))

    refused(ts.InvalidState, "1 views of its unsharded parameters", hold)
    held.clear()
    _core.fsdp_forward_done(fsdp._handle, 0)
    fsdp.abandon()
    fsdp.close()


def at(device: int, shape: tuple[int, ...], given: list[float], code: int = 2) -> Floats:
    array = Floats(device, CUDA.simulated_cuda_allocate(device, 4 * max(len(given), 1)), *shape, code=code)
    write(array, given)
    return array


def tensor_parallel_trains(comm: ts.Comm) -> None:
    """An embedding of 5 words over the ranks, and a norm's weight; all ranks make these calls."""
    rank, ranks = comm.rank, comm.world_size
    each = -(-5 // ranks)
    own = range(min(5, each * rank), min(5, each * (rank + 1)))
    given = {"tok": at(rank, (5, 2), [k if rank == 0 else -1 for k in range(10)]), "norm": on(rank, [1, 1])}
    with ts.Mesh(comm, {"tp": ranks}) as mesh:
        tp = ts.TensorParallel(mesh, given, {"tok": "vocabulary", "norm": "sequence"})
        tp.set_stream(Stream())
        optimizer = ts.SGD(tp, lr=0.5)
        optimizer.set_stream(Stream())
        assert values(tp["tok"]) == [2 * i + j for i in own for j in range(2)]
        x, part, whole = (at(rank, (rows, 2), [rank + 1] * 2 * rows) for rows in (1, 1, ranks))
        refused(ts.InvalidArgument, "pass out", lambda: tp.enter(x, 0))
        tp.enter(x, 0, out=whole)
        assert values(whole) == [r + 1 for r in range(ranks) for _ in range(2)]
        tp.leave(whole, 0, out=part, bias=tp["norm"])
        assert values(part) == [ranks * (rank + 1) + 1] * 2
        work = tp.enter_backward(part, out=part, async_op=True)
        work.order(Stream())
        total = ranks * (ranks + 1) / 2
        assert values(part) == [ranks * total + ranks] * 2
        work.wait()
        seen: list[float] = []
        tp.enter_parts(x, 0, lambda where, one: seen.append(where.start + values(one)[0]), out=whole)
        assert seen == [2 * r + 1 for r in range(ranks)]
        tp.leave_parts((ranks, 2), 0, lambda where, one: write(one, [where.start] * 2), out=part)
        assert values(part) == [ranks * rank] * 2
        ids = at(rank, (2,), [struct.unpack("f", struct.pack("i", i))[0] for i in (4, 0)], code=0)
        rows = at(rank, (2, 2), [7] * 4)
        tp.embed("tok", ids, out=rows)
        assert values(rows) == [8, 9, 0, 1]
        tp.embed_backward("tok", ids, rows)
        assert values(tp.grads["tok"]) == [2 * i + j if i in (0, 4) else 0 for i in own for j in range(2)]
        logits = at(rank, (2, len(own)), [0] * 2 * len(own))
        loss = at(rank, (), [0])
        tp.cross_entropy(logits, ids, 5, loss=loss, grad=logits)
        assert abs(values(loss)[0] / math.log(5) - 1) < 1e-6
        expected = [(0.2 - (c == y)) / 2 for y in (4, 0) for c in own]
        assert np.allclose(values(logits), expected, atol=1e-6)
        write(tp.grads["norm"], [rank + 1] * 2)
        refused(ts.InvalidState, "call sum_grads", optimizer.step)
        tp.sum_grads()
        assert values(tp.grads["norm"]) == [total] * 2
        optimizer.step()
        assert values(tp["norm"]) == [1 - 0.5 * total] * 2
        tp.zero_grad()
        assert values(tp.grads["norm"]) == [0, 0]


def pipeline_trains(comm: ts.Comm) -> None:
    """Two steps of stages y = (stage + 2) * x, after which each stage's gradient is added to the others'. The loss is
    the sum of the last y. All ranks make these calls."""
    rank, ranks = comm.rank, comm.world_size
    grad = on(rank, [0])
    held: list[Any] = []

    def forward(call: ts.StageCall) -> float | None:
        made = call.output(call.inputs[0].shape, "f32")
        assert made.__dlpack_device__() == (2, rank)
        write(made, [(call.stage + 2) * x for x in values(call.inputs[0])])
        return sum(values(made)) if call.stage == ranks - 1 else None

    def backward(call: ts.StageCall) -> None:
        x = values(call.inputs[0])
        refused(ts.InvalidArgument, "is read-only", lambda: comm.on_stream(0).all_reduce(call.outputs[0]))
        delta = [call.weight] * len(x) if call.stage == ranks - 1 else values(call.output_grads[0])
        grad[0] += sum(a * b for a, b in zip(x, delta, strict=True))
        if call.stage > 0:
            write(call.input_grads[0], [(call.stage + 2) * d for d in delta])

    batch = on(rank, [1, 2, 3, 4, 5, 6])  # in micro-batches of 2, 2, 1 and 1
    product = math.factorial(ranks + 1)
    with ts.Pipeline(comm, [rank], forward, backward, microbatches=4, on_device=True) as pipe:
        pipe.set_stream(Stream())
        for step in (1, 2):
            losses = pipe.step(batch)
            assert losses.tolist() == [product * rows for rows in (3, 7, 5, 6)], losses
            assert grad[0] == 21 * product / (rank + 2) / 4 * step
        pipe.sum_tied(grad, range(ranks))
        assert grad[0] == sum(21 * product / (stage + 2) / 2 for stage in range(ranks))
    if "hook" not in sys.argv:
        return

    def returns(_: ts.StageCall) -> Any:
        return np.ones(1, np.float32)

    def holds(call: ts.StageCall) -> None:
        call.output(1, "f32")
        held.append(call.inputs[0].__dlpack__(max_version=(1, 0)))

    for wrong, where, error, words in (  # all ranks are Python; the batch may be held
        (returns, 0, ts.Unsupported, "write into StageCall.output()"),
        (holds, 1, ts.InvalidState, "1 of its arrays are still held"),
    ):
        with ts.Pipeline(comm, [rank], wrong, backward, microbatches=4, on_device=True) as pipe:
            comm.barrier()  # no rank fails while another still creates it
            refused(error if rank == where else ts.Aborted, words, partial(pipe.eval, batch))
        held.clear()


def main() -> None:
    with ts.init(backend="cpu:auto,cuda:nccl") as comm:
        rank, ranks = comm.rank, comm.world_size
        x = Floats(rank, CUDA.simulated_cuda_allocate(rank, 8), 2)
        x[0], x[1] = rank + 1, 10
        comm.all_reduce(x)
        assert (x[0], x[1]) == (ranks * (ranks + 1) / 2, 10 * ranks)
        work = comm.on_stream(Stream()).all_reduce(x, "max", async_op=True)
        work.order()
        assert x[1] == 10 * ranks
        work.wait()

        host = np.ones(2, np.float32)
        invalid = ts.InvalidArgument
        refused(invalid, "memory of the host", lambda: comm.all_reduce(Floats(rank, host.ctypes.data, 2)))
        elsewhere = Floats(rank + 1, x.address, 2)
        refused(invalid, "communicates from CUDA device", lambda: comm.all_reduce(elsewhere))
        refused(invalid, "the tensors are on the CPU", lambda: comm.on_stream(1).all_reduce(host))
        refused(TypeError, "must be a CUDA stream", lambda: comm.on_stream("first"))

        state = ts.State(x=x).set_stream(rank, Stream())
        refused(
            invalid, "memory of the host", lambda: ts.State(y=Floats(rank, host.ctypes.data, 2)).set_stream(rank, 0)
        )
        with ts.Saver(comm, os.environ["CHECKPOINTS"]) as saver:
            saver.save(1, state)
            x[1] = 0
            assert saver.resume(state) == 1
        assert x[1] == 10 * ranks
        comm.on_stream(0).all_reduce(x)
        assert x[1] == 10 * ranks * ranks

        x[0] = 5 + rank
        with ts.DDP(comm, {"w": x}) as ddp:
            assert x[0] == 5
            ddp.set_stream(Stream())
            grad = ddp.grads["w"]
            assert grad.__dlpack_device__() == (2, rank)
            assert grad.shape == (2,)
            assert "dltensor" in repr(grad.__dlpack__(stream=-1))
            refused(invalid, "is on CUDA device", lambda: ddp.grads.__setitem__("w", host))
            CUDA.simulated_cuda_store(grad.address, rank + 1)
            ddp.ready("w")
            ddp.wait()
            assert CUDA.simulated_cuda_load(grad.address) == (ranks + 1) / 2
            if "hook" in sys.argv:  # all ranks are Python
                ddp.set_hook(lambda bucket: bucket.comm.on_stream(bucket.stream).all_reduce(list(bucket.grads)))
                ddp.ready("w")
                ddp.wait()
                assert CUDA.simulated_cuda_load(grad.address) == ranks * (ranks + 1) / 2
        fsdp_trains(comm)
        tensor_parallel_trains(comm)
        pipeline_trains(comm)
    grad = Floats(rank, CUDA.simulated_cuda_allocate(rank, 8), 2)
    optimizer = ts.SGD({"x": x}, {"x": grad}, lr=0.5)
    optimizer.set_stream(Stream())
    x[0], grad[0], grad[1] = 1, 2, 0
    optimizer.step()
    assert x[0] == 0
    assert optimizer.clip_grad_norm(1) == 2
    assert 0.999 < grad[0] < 1
    optimizer.zero_grad()
    assert grad[0] == 0
    refused(invalid, "is on the CPU", lambda: ts.SGD({"x": x, "y": host}, {"x": grad, "y": host}))
    refused(invalid, "the CPU has no streams", lambda: ts.SGD({"y": host}, {"y": host}).set_stream(1))
    print(f"rank {rank}: python is well")


main()
