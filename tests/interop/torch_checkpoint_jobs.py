"""What test_torch_checkpoint.py runs: under torchrun's environment, one process a rank, over Gloo.

usage: torch_checkpoint_jobs.py JOB ARGUMENT...

save KIND DIRECTORY trains a model and saves it in every way into sub-directories, and DIRECTORY/whole.pt with every
tensor gathered. load KIND DIRECTORY... makes the model anew with other values, loads each of these saves in every way,
and compares bit by bit. errors and stages are tests of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tessera as ts
import tessera.torch.checkpoint as tcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tessera.torch.checkpoint import joined
from tessera.torch.checkpoint.state_dict import get_state_dict, set_state_dict
from tessera.torch.checkpoint.stateful import Stateful
from tessera.torch.ranks import gather, ranks_of
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_ranks import patience


class Net(nn.Module):
    """Sizes that 3 and 4 ranks do not divide, nor 2 what 2 have cut, a buffer and an integer scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        return torch.as_tensor(self.down(torch.relu(self.up(hidden))).square().mean())


def plain(model: Net) -> nn.Module:
    return model


def ddp(model: Net) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: Net) -> nn.Module:
    for layer in (model.up, model.down):
        fully_shard(layer)
    fully_shard(model)
    return model


def hsdp(model: Net) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "part")))
    return model


def tp(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def mesh(model: Net) -> nn.Module:
    """Tensor parallel inside, FSDP outside: strided shards on a 2 x n mesh."""
    grid = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    return model


KINDS: dict[str, Callable[[Net], nn.Module]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tp": tp,
    "mesh": mesh,
}


class AppState(Stateful):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def trained(kind: str, seed: int, steps: int) -> AppState:
    torch.manual_seed(seed)
    model = KINDS[kind](Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * seed)
    for step in range(steps):
        model(torch.arange(8) + step % 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return AppState(model, optimizer)


def table(filled: bool) -> Any:
    """A table that is cut on both dimensions where there are enough ranks, by a mesh that leaves some ranks empty."""
    whole = torch.arange(7 * 3.0).reshape(7, 3) if filled else torch.zeros(7, 3)
    if dist.is_initialized() and dist.get_world_size() == 4:
        return distribute_tensor(whole, init_device_mesh("cpu", (4, 1)), [Shard(1), Replicate()])
    if dist.is_initialized() and dist.get_world_size() > 1:
        return distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return whole


def state_of(app: AppState, filled: bool) -> dict[str, Any]:
    return {
        "app": app,
        "table": table(filled),
        "step": 7 if filled else 0,
        "betas": (0.9, 0.95) if filled else None,
        "size": torch.Size([2, 3]) if filled else None,  # no plain value: a pickle
        "notes": {"name": "größer", "blob": b"\x00\xff"} if filled else {"name": None, "blob": None},
        "mixed": [{"weight": torch.arange(4.0) * filled}, 3 if filled else 0],
        "half": torch.arange(5).to(torch.bfloat16) * filled,
        "transposed": (torch.arange(12.0) * filled).reshape(3, 4).t(),
        "scalar": torch.tensor(3 if filled else 0),
        "none": torch.empty(0, 5),
    }


def gathered(value: Any) -> Any:
    if isinstance(value, Stateful) and not isinstance(value, dict):
        return gathered(value.state_dict())
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [gathered(item) for item in value]
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def differences(want: Any, got: Any, name: str = "") -> list[str]:
    if isinstance(want, dict):
        if want.keys() != got.keys():
            return [f"{name}: {list(want)} {list(got)}"]
        return [text for key in want for text in differences(want[key], got[key], f"{name}.{key}")]
    if isinstance(want, list):
        return [text for i, item in enumerate(want) for text in differences(item, got[i], f"{name}.{i}")]
    if isinstance(want, torch.Tensor):
        same = want.dtype == got.dtype and torch.equal(want, got)
    else:
        same = want == got and type(want) is type(got)
    return [] if same else [f"{name}: {want} {got}"]


def save(kind: str, where: str) -> None:
    directory = Path(where)
    app = trained(kind, 1, 3)
    state = state_of(app, True)
    whole = gathered(state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(whole, directory / "whole.pt")
    for form in ("tessera", "torch_dcp"):
        tcp.save({**state, "step": 6}, checkpoint_id=directory / f"own-{form}", format=form)
        tcp.save(state, checkpoint_id=directory / f"own-{form}", format=form)  # replaces it
        dcp.save(state, storage_writer=tcp.FileSystemWriter(directory / f"plugin-{form}", format=form))
    in_background(app, state, tcp.async_save, checkpoint_id=directory / "async-torch_dcp", format="torch_dcp")
    writer = tcp.FileSystemWriter("/nowhere", cached_state_dict=True)
    for _ in range(2):
        in_background(app, state, tcp.async_save, storage_writer=writer, checkpoint_id=directory / "cached-tessera")
    writer = tcp.FileSystemWriter("/nowhere")
    plain_items = {key: item for key, item in state.items() if key != "size"}  # PyTorch's staging refuses it
    in_background(
        app, plain_items, dcp.async_save, storage_writer=writer, checkpoint_id=directory / "plugin-async-tessera"
    )
    dcp.save(state, checkpoint_id=directory / "theirs-torch_dcp")


def in_background(app: AppState, state: dict[str, Any], function: Any, **how: Any) -> None:
    """What the trainer does after the call must not be in the checkpoint."""
    future = function(state, **how)
    with torch.no_grad():
        kept = [parameter.clone() for parameter in app.model.parameters()]
        for parameter in app.model.parameters():
            parameter.fill_(-1)
        future.result(timeout=patience(120))
        for parameter, value in zip(app.model.parameters(), kept, strict=True):
            parameter.copy_(value)


def emptied(app: AppState) -> AppState:
    """The same model and optimizer with other values."""
    with torch.no_grad():
        for tensor in [*app.model.parameters(), *app.model.buffers()]:
            tensor.fill_(-1)
        for moments in app.optimizer.state.values():
            for value in moments.values():
                value.fill_(-1)
    for group in app.optimizer.param_groups:
        group["lr"] = 7.0
    return app


def load(kind: str, *directories: str) -> None:
    found = []
    app = trained(kind, 2, 1)
    for directory in map(Path, directories):
        want = torch.load(directory / "whole.pt", weights_only=False)
        for checkpoint in sorted(path for path in directory.iterdir() if path.is_dir()):
            ways = {"own": lambda state, at=checkpoint: tcp.load(state, checkpoint_id=at)}
            if checkpoint.name.startswith("own"):
                ways["plugin"] = lambda state, at=checkpoint: dcp.load(state, storage_reader=tcp.FileSystemReader(at))
            if checkpoint.name.endswith("torch_dcp") and not checkpoint.name.startswith("theirs"):
                ways["theirs"] = lambda state, at=checkpoint: dcp.load(state, checkpoint_id=at)
            for way, function in ways.items():
                state = state_of(emptied(app), False)
                if "plugin-async" in checkpoint.name:
                    del state["size"]
                function(state)
                expected = {key: item for key, item in want.items() if key in state}
                found += [f"{checkpoint} {way}{text}" for text in differences(expected, gathered(state))]
    assert not found, "\n".join(found[:20])


def errors(where: str) -> None:
    """Every rank gets the same kind of error, also where only one rank's part is bad."""
    directory, rank = Path(where), dist.get_rank()
    sharded = [Shard(0)]
    ranks = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"a": distribute_tensor(torch.arange(600000.0), ranks, sharded), "b": torch.ones(3), "n": 1}
    tcp.save(state, checkpoint_id=directory / "good")

    def refused(kind: type[BaseException], text: str, function: Callable[[], object]) -> None:
        try:
            function()
        except kind as error:
            assert text in str(error), str(error)
        else:
            raise AssertionError(f"rank {rank}: no {kind.__name__}")

    more = {**state, "missing": torch.zeros(2), "b": torch.zeros(4), "gone": 1}
    refused(ts.Mismatch, "3 differences", lambda: tcp.load(more, checkpoint_id=directory / "good"))
    partial = tcp.DefaultLoadPlanner(allow_partial_load=True)
    less = {"b": torch.zeros(3), "missing": torch.full((2,), 5.0)}
    tcp.load(less, checkpoint_id=directory / "good", planner=partial)
    assert less["b"].tolist() == [1, 1, 1]
    assert less["missing"].tolist() == [5, 5]
    refused(ts.NotFound, "nothing", lambda: tcp.load(state, checkpoint_id=directory / "nothing"))

    # Of one name, but not of one shape.
    differing = {"a": torch.zeros(3 + rank)}
    refused(ts.Mismatch, "'a'", lambda: tcp.save(differing, checkpoint_id=directory / "differing"))
    refused(ts.Mismatch, "as a DTensor", lambda: tcp.save(differing, checkpoint_id=directory / "differing"))
    # Replicas that differ, where the writer compares them.
    checking = tcp.FileSystemWriter(directory / "replicas", check_replicas=True)
    pairs = init_device_mesh("cpu", (dist.get_world_size(), 1))
    halves = DTensor.from_local(torch.full((3, 2), float(rank)), pairs, [Replicate(), Shard(0)], run_check=False)
    only = {f"only{rank}": rank}  # names that the ranks do not share make them exchange tables
    for other in ({}, only):
        for mixed in ({"m": torch.full((3,), float(rank))}, {"m": halves}, {"m": rank}):
            for save in (tcp.save, tcp.async_save):
                mine = {**mixed, **other}
                refused(ts.Mismatch, "'m'", lambda save=save, mine=mine: save(mine, storage_writer=checking))
        assert not list((directory / "replicas").glob("step-*"))
    tcp.save({"m": torch.ones(3), "n": 1, **only}, storage_writer=checking)
    # One rank cannot bring its part; nothing is written.
    bad = {"a": torch.zeros(3, device="meta" if rank == 1 else "cpu")}
    refused(ts.InvalidArgument, "meta", lambda: tcp.save(bad, checkpoint_id=directory / "bad"))
    assert not (directory / "bad").exists()
    # A writer that may not replace what is there.
    careful = tcp.FileSystemWriter(directory / "good", overwrite=False)
    refused(ts.InvalidState, "overwrite", lambda: tcp.save(state, storage_writer=careful))
    # The root is a file: all ranks hear of it, in the future too.
    if rank == 0:
        (directory / "file").write_text("")
    dist.barrier()
    refused(ts.TesseraError, "file", lambda: tcp.save(state, checkpoint_id=directory / "file"))

    # One rank's file is damaged; it alone reads it.
    dist.barrier()
    if rank == 0:
        file = next((directory / "good").glob("step-*/rank-00001.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1000] ^= 1
        file.write_bytes(content)
    dist.barrier()
    refused(ts.Corrupt, "rank-00001", lambda: tcp.load(state, checkpoint_id=directory / "good"))
    failed = None
    try:
        dcp.load(state, storage_reader=tcp.FileSystemReader(directory / "good"))
    except dcp.CheckpointException as error:
        failed = error
    assert failed is not None
    assert [type(one[0]) for one in failed.failures.values()] == [ts.Corrupt]
    # And the ranks go on together.
    tcp.save(state, checkpoint_id=directory / "good")
    tcp.load(state, checkpoint_id=directory / "good")


def coordinators(where: str) -> None:
    """Whoever coordinates, the ranks save and load the same: planned by us, or by PyTorch for planners of one's own."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    heard = []

    class Saves(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            heard.append(is_coordinator)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    class Loads(dcp.DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            heard.append(is_coordinator)
            super().set_up_planner(state_dict, metadata, is_coordinator)

    class Epoch(Stateful):
        number = 0

        def state_dict(self) -> dict[str, Any]:
            return {"number": self.number}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.number = state_dict["number"]

    ids = set()
    for number, (saves, loads) in enumerate(((None, None), (Saves, Loads), (Saves, None), (None, Loads))):
        for coordinator in range(2):
            path = Path(where, f"{number}-{coordinator}")
            epoch, other = Epoch(), Epoch()
            epoch.number = 3
            saved = {"x": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "n": 7, "epoch": epoch}
            writer = tcp.FileSystemWriter(path)
            told = tcp.save_state_dict(saved, writer, coordinator_rank=coordinator, planner=saves and saves())
            got = {"x": distribute_tensor(torch.zeros(5), mesh, [Shard(0)]), "n": 0, "epoch": other}
            reader = tcp.FileSystemReader(path)
            tcp.load_state_dict(got, reader, coordinator_rank=coordinator, planner=loads and loads())
            assert got["x"].full_tensor().tolist() == [0, 1, 2, 3, 4], (number, coordinator)
            assert got["n"] == 7 and other.number == 3, (number, coordinator)
            assert set(heard) <= {rank == coordinator}, (number, coordinator, heard)
            heard.clear()
            save_ids = gather(ranks_of(None, False).comm, str(told.storage_meta.save_id).encode())
            assert len(set(save_ids)) == 1, save_ids
            ids.add(save_ids[0])
    assert len(ids) == 8
    for call in (tcp.save_state_dict, tcp.load_state_dict):
        storage = tcp.FileSystemWriter(where) if call is tcp.save_state_dict else tcp.FileSystemReader(where)
        try:
            call({"n": 1}, storage, coordinator_rank=2)
        except ts.InvalidArgument as error:
            assert "coordinator_rank is 2; it must be 0 to 1" in str(error)
        else:
            raise AssertionError("rank 2 coordinates")


def stages(where: str) -> None:
    """Names that only some ranks have, a mesh of some ranks, a group whose rank 0 is not the world's."""
    directory, rank, size = Path(where), dist.get_rank(), dist.get_world_size()
    half = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("stage", "dp"))["dp"]
    stage = rank // (size // 2)
    state = {
        f"stage{stage}": distribute_tensor(torch.arange(5.0) + 10 * stage, half, [Shard(0)]),
        f"rank{rank}": torch.full((2,), float(rank)),
        f"note{rank}": rank,
        "shared": torch.ones(2),
    }
    for form in ("tessera", "torch_dcp"):
        tcp.save(state, checkpoint_id=directory / f"stages-{form}", format=form)
        dcp.save(state, storage_writer=tcp.FileSystemWriter(directory / f"planned-{form}", format=form))
    groups = [dist.new_group([1, 0]), dist.new_group(list(range(1, size)))]
    if rank > 0:
        tcp.save({"of": rank, "x": torch.arange(3.0)}, checkpoint_id=directory / "group", process_group=groups[1])
        got = {"of": 0, "x": torch.zeros(3)}
        tcp.load(got, checkpoint_id=directory / "group", process_group=groups[1])
        assert got["of"] == 1
        assert got["x"].tolist() == [0, 1, 2]
    tcp.save({"x": torch.full((1,), float(rank))}, checkpoint_id=directory / f"alone{rank}", no_dist=True)


def tables(where: str) -> None:
    """Ranks with different names tell each other what they have, and never what is in it."""
    rank = dist.get_rank()
    told: list[int] = []
    of_joined = joined.gather

    def noted(comm: ts.Comm | None, content: bytes) -> list[bytes]:
        told.append(len(content))
        return of_joined(comm, content)

    joined.gather = noted

    def told_of(number: int, name: str) -> int:
        told.clear()
        directory = Path(where) / f"{name[:-1]}-{number}"
        tcp.save({name: torch.full((number,), float(rank)), "shared": torch.ones(number)}, checkpoint_id=directory)
        assert ts.Checkpoint(directory)[name].shape == (number,)
        return sum(told)

    # Of the same names everywhere a hash travels, and no table.
    assert told_of(100, "all0") == told_of(1_000_000, "all0") == 33 + 36  # a hash, and the save's id
    few, many = told_of(100, f"only{rank}"), told_of(1_000_000, f"only{rank}")
    # A number has up to four digits more: as a shape and as the size of a box, of two names.
    assert 33 < few <= many <= few + 4 * 4, (few, many)
    assert many < 500, many


def once(where: str) -> None:
    """What the ranks of a host all want is read once by all of them together, and boxes of another rank's too."""

    def bytes_read() -> int:
        (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
        return int(line.split()[1])

    size = 12 << 20
    state = {"x": torch.arange(size // 4, dtype=torch.float32), "small": torch.ones(3)}
    tcp.save(state, checkpoint_id=where)
    for _ in range(2):  # imports are read, too
        got = {"x": torch.zeros(size // 4), "small": torch.zeros(3)}
        before = bytes_read()
        tcp.load(got, checkpoint_id=where)
        count = torch.tensor(float(bytes_read() - before))
        assert torch.equal(got["x"], state["x"]) and torch.equal(got["small"], state["small"])
    dist.all_reduce(count)
    assert size <= count < 1.2 * size, count
    # A rank that cannot plan its load keeps the others from reading theirs.
    rank = dist.get_rank()
    got = {"x": torch.zeros(size // 4), "small": torch.zeros(3 if rank == 0 else 4)}
    try:
        tcp.load(got, checkpoint_id=where)
    except ts.Mismatch as error:
        assert "small" in str(error)
        assert not got["x"].any()
    else:
        raise AssertionError("a state that does not fit was loaded")
    # One that wants nothing takes part.
    got = {"x": torch.zeros(size // 4)} if rank == 0 else {}
    tcp.load(got, checkpoint_id=where)
    assert rank > 0 or torch.equal(got["x"], state["x"])


def elsewhere(where: str) -> None:
    """PyTorch's ways to save from another process, and to copy by a stager of one's own, with our storage."""
    directory, rank = Path(where), dist.get_rank()
    writer = tcp.FileSystemWriter("/nowhere", format="torch_dcp")
    by_process = tcp.AsyncCheckpointerType.PROCESS
    for turn in range(2):
        state = {"x": torch.full((3,), float(turn)), "y": table(True)}
        tcp.async_save(
            state, storage_writer=writer, checkpoint_id=directory / "process", async_checkpointer_type=by_process
        ).result(timeout=patience(120))
    stager = DefaultStager(StagingOptions(False, False, False, False))
    saving = tcp.async_save(state, checkpoint_id=directory / "stager", async_stager=stager)
    getattr(saving, "upload_completion", saving).result(timeout=patience(120))
    stager.close()
    for name in ("process", "stager"):
        got = {"x": torch.zeros(3), "y": table(False)}
        tcp.load(got, checkpoint_id=directory / name)
        assert got["x"].tolist() == [1, 1, 1], (rank, name)
        assert torch.equal(gathered(got["y"]), gathered(table(True))), (rank, name)


def hosts(where: str) -> None:
    """Ranks that share no memory."""
    comm = ranks_of(None, False).comm
    assert comm is not None
    assert comm.transport == "gloo"
    state = {"x": table(True), "n": 5}
    tcp.save(state, checkpoint_id=Path(where) / "own")
    dcp.save(state, storage_writer=tcp.FileSystemWriter(Path(where) / "plugin"))
    for name in ("own", "plugin"):
        got = {"x": table(False), "n": 0}
        tcp.load(got, checkpoint_id=Path(where) / name)
        assert torch.equal(gathered(got["x"]), gathered(state["x"]))
        assert got["n"] == 5


JOBS = {
    "elsewhere": elsewhere,
    "hosts": hosts,
    "once": once,
    "save": save,
    "load": load,
    "errors": errors,
    "coordinators": coordinators,
    "stages": stages,
    "tables": tables,
}


def main() -> None:
    import os

    if os.environ.get("WORLD_SIZE", "1") != "1":
        dist.init_process_group("gloo")
    JOBS[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
