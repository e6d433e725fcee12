"""One rank of ours: native checkpoints, with one saver for all rounds."""

from __future__ import annotations

import numpy as np
import tessera as ts
from checkpoint_worker import in_part, scratch, serve
from checkpoint_workload import Piece, Share

PLACEMENTS = {"rows": ts.Shard(0), "columns": ts.Shard(1), "replicated": ts.Replicate()}


class Tessera:
    def __init__(self, share: Share, pieces: dict[str, list[Piece]]) -> None:
        self.store = ts.Store(f"file://{scratch() / 'rendezvous'}", insecure=True)
        self.comm = ts.Comm.create(self.store, share.rank, share.world_size)
        layouts = layouts_of(share)
        held = {name: [view_of(piece.bits) for piece in of_tensor] for name, of_tensor in pieces.items()}
        dtypes = {"f32": ts.DType.F32, "bf16": ts.DType.BF16}
        parts = {
            tensor.name: ts.Sharded(layouts[tensor.name], held[tensor.name], share.rank, dtypes[tensor.dtype])
            for tensor in share.tensors()
        }
        self.state = ts.State(**parts)
        self.part = ts.State(**{name: parts[name] for name in in_part(list(parts))})
        self.root = scratch() / "ours"
        self.saver = ts.Saver(self.comm, self.root)

    def barrier(self) -> None:
        self.comm.barrier()

    def save(self, number: str) -> str:
        self.saver.save(int(number), self.state)
        return str(next(self.root.glob(f"step-{int(number):08}-*")))

    def load(self, path: str) -> None:
        with ts.Checkpoint(path) as checkpoint:
            checkpoint.load(self.state, comm=self.comm)

    def load_part(self, path: str) -> None:
        with ts.Checkpoint(path) as checkpoint:
            checkpoint.load(self.part, allow_unexpected=True, comm=self.comm)

    def close(self) -> None:
        self.saver.close()
        self.comm.finalize()
        self.comm.close()
        self.store.close()


def view_of(bits: np.ndarray) -> np.ndarray:
    return bits if bits.itemsize == 2 else bits.view(np.float32)


def layouts_of(share: Share) -> dict[str, ts.Layout]:
    if share.placement != "flat":
        placements = [PLACEMENTS[share.placement]]
        by_shape = {t.shape: ts.Layout(t.shape, [share.world_size], placements) for t in share.tensors()}
        return {tensor.name: by_shape[tensor.shape] for tensor in share.tensors()}
    layouts = {}
    for unit in share.units().values():
        of_ranks = [share.boxes_of(unit, rank) for rank in range(share.world_size)]
        for tensor in unit:
            layouts[tensor.name] = ts.Layout.from_boxes(tensor.shape, [boxes[tensor.name] for boxes in of_ranks])
    return layouts


if __name__ == "__main__":
    serve(Tessera)
