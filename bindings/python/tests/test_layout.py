"""Layouts and meshes."""

import numpy as np
import pytest
import tessera as ts


def test_shards_are_cut_like_torch_chunk():
    layout = ts.Layout((10, 4), [4], [ts.Shard(0)])
    assert [layout.boxes(rank) for rank in range(4)] == [
        [ts.Box((0, 0), (3, 4))],
        [ts.Box((3, 0), (3, 4))],
        [ts.Box((6, 0), (3, 4))],
        [ts.Box((9, 0), (1, 4))],
    ]
    assert ts.Layout((2,), [3], [ts.Shard(0)]).boxes(2) == []


def test_boxes_of_two_dimensions_cover_the_tensor_once():
    array = np.arange(35).reshape(5, 7)
    layout = ts.Layout(array.shape, [2, 3], [ts.Shard(0), ts.Shard(1)])
    seen = np.zeros_like(array)
    for rank in range(6):
        for box in layout.boxes(rank):
            seen[box.slices] += 1
    assert (seen == 1).all()


def test_replicas_hold_the_same():
    layout = ts.Layout((4,), [2, 2], [ts.Replicate(), ts.Shard(0)])
    assert layout.boxes(0) == layout.boxes(2) == [ts.Box((0,), (2,))]


def test_explicit_boxes():
    boxes = [[ts.Box((0, 0), (2, 3)), ((2, 0), (1, 1))], [], [((2, 1), (1, 2))]]
    layout = ts.Layout.from_boxes((3, 3), boxes)
    assert layout.shape == (3, 3)
    assert layout.boxes(0) == [ts.Box((0, 0), (2, 3)), ts.Box((2, 0), (1, 1))]
    assert layout.boxes(1) == []
    assert ts.Layout.from_boxes((), [[((), ())]]).boxes(0) == [ts.Box((), ())]


def test_ranks_gather_what_each_holds(ranks, tmp_path):
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    held = [[ts.Box((3, 0), (1, 3)), ((0, 0), (1, 3))], [ts.Box((1, 0), (2, 3))], []]

    def body(comm):
        layout = ts.Layout.gather(comm, whole.shape, held[comm.rank])
        boxes = [layout.boxes(rank) for rank in range(3)]
        pieces = [whole[box.slices].copy() for box in boxes[comm.rank]]
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(1, ts.State(w=ts.Sharded(layout, pieces, comm.rank, "float32")))
        return boxes

    assert ranks(3, body) == [[[ts.Box(*box) for box in of_rank] for of_rank in held]] * 3
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert (checkpoint["w"] == whole).all()


def test_what_one_rank_cannot_gather_is_told_to_all(ranks):
    def gather(boxes, shape=(4,)):
        return ranks.outcomes(2, lambda comm: ts.Layout.gather(comm, shape[: 1 + comm.rank], boxes[comm.rank]))

    for error in gather([[], [((3,), (2,))]]):
        assert type(error) is ts.InvalidArgument
        assert "rank 1: the box with offsets [3]" in str(error)
    for error in gather([[((0,), (3,))], [((2,), (2,))]]):
        assert type(error) is ts.InvalidArgument
        assert "[0:3] of rank 0 and [2:4] of rank 1 overlap" in str(error)
    for error in gather([[], []], (4, 1)):
        assert type(error) is ts.Mismatch
        assert "rank 1 passes boxes of a tensor of shape [4, 1]" in str(error)


def test_what_is_no_box_or_communicator_is_not_gathered(ranks):
    (error,) = ranks.outcomes(1, lambda comm: ts.Layout.gather(comm, (4,), [((0, 0), (1, 1))]))
    assert type(error) is ts.InvalidArgument
    assert "a box of this rank has 2 offsets" in str(error)
    with pytest.raises(TypeError, match="comm"):
        ts.Layout.gather(None, (4,), [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: ts.Layout((4,), [2], [ts.Shard(1)]),
        lambda: ts.Layout((4,), [2], []),
        lambda: ts.Layout((1,) * 9, [2], [ts.Shard(0)]),
        lambda: ts.Layout.from_boxes((4,), [[((0,), (3,))], [((2,), (2,))]]),
        lambda: ts.Layout.from_boxes((4,), [[((0, 0), (3, 1))]]),
        lambda: ts.Layout.from_boxes((4,), [[((3,), (2,))]]),
    ],
    ids=["no such dimension", "no placement", "nine dimensions", "overlap", "rank of a box", "outside"],
)
def test_bad_layouts_are_refused(make):
    with pytest.raises(ts.InvalidArgument):
        make()


def test_a_rank_that_is_none_is_refused_and_so_is_a_closed_layout():
    layout = ts.Layout((4,), [2], [ts.Shard(0)])
    with pytest.raises(ts.InvalidArgument):
        layout.boxes(2)
    layout.close()
    with pytest.raises(ts.InvalidState, match="closed"):
        layout.boxes(0)


def test_a_mesh_has_a_communicator_a_dimension(ranks):
    def body(comm: ts.Comm):
        with ts.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
            assert mesh.names == ("dp", "tp")
            assert mesh.ndim == 2
            assert mesh.shape == {"dp": 2, "tp": 2}
            assert (mesh.coordinate("dp"), mesh.coordinate("tp")) == divmod(comm.rank, 2)
            x = np.array([comm.rank], np.int64)
            mesh["tp"].all_reduce(x)
            assert mesh["tp"] is mesh["tp"]
            group = mesh["dp"]
            with pytest.raises(ts.NotFound, match="pp"):
                mesh.size("pp")
        with pytest.raises(ts.InvalidState, match="closed"):
            group.barrier()
        with pytest.raises(ts.InvalidState, match="closed"):
            mesh["tp"]
        return int(x[0])

    assert ranks(4, body) == [1, 1, 5, 5]


def test_a_mesh_or_a_split_that_one_rank_asks_for_badly_is_refused_on_all(ranks):
    bad = [
        lambda comm: ts.Mesh(comm, {"dp": 2}),
        lambda comm: ts.Mesh(comm, {"dp": 0, "tp": 3}),
        lambda comm: ts.Mesh(comm, {f"d{i}": 1 for i in range(9)}),
        lambda comm: comm.split(0, name=""),
        lambda comm: comm.split(0, timeout=-1),
    ]

    def body(comm: ts.Comm):
        for one in bad:
            good = bad.index(one) < 3
            with pytest.raises(ts.InvalidArgument) as told:
                if comm.rank == 1:
                    one(comm)
                elif good:
                    ts.Mesh(comm, {"dp": 3})
                else:
                    comm.split(0)
            assert str(told.value).startswith("rank 1: ") or comm.rank == 1
        with ts.Mesh(comm, {"dp": 3}) as mesh:  # nothing else has happened
            mesh["dp"].barrier()

    ranks(3, body)


def test_a_mesh_is_sliced_and_flattened(ranks):
    def body(comm: ts.Comm):
        with ts.Mesh(comm, {"dp": 2, "cp": 2, "tp": 1}) as mesh:
            part = mesh["dp", "cp"]
            assert part.shape == {"dp": 2, "cp": 2}
            assert part["cp"] is mesh["cp"]
            with pytest.raises(ts.NotFound, match="tp"):
                part["tp"]
            with pytest.raises(ts.InvalidArgument, match="order"):
                mesh["cp", "dp"]
            with part.flatten() as flat, part.flatten("data") as named:
                assert flat.names == ("dp_cp",)
                assert named.coordinate("data") == comm.rank
                x = np.array([comm.rank])
                flat["dp_cp"].all_reduce(x)
            group = part["dp"]
            part.close()
            group.barrier()
        with pytest.raises(ts.InvalidState, match="closed"):
            group.barrier()
        return int(x[0])

    assert ranks(4, body) == [6] * 4


def test_a_mesh_of_another_size_is_refused(ranks):
    for outcome in ranks.outcomes(2, lambda comm: ts.Mesh(comm, {"dp": 3})):
        assert isinstance(outcome, ts.InvalidArgument)
