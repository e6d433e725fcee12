"""Random numbers: every part of a tensor has the bits of the whole."""

import math

import numpy as np
import pytest
import tessera as ts


def whole(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return ts.random.normal(np.empty(shape, dtype), seed=7, stream=3, deviation=0.02)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "layout",
    [
        ts.Layout((7, 5), [3], [ts.Shard(0)]),
        ts.Layout((7, 5), [4], [ts.Shard(1)]),
        ts.Layout((7, 5), [2, 2], [ts.Replicate(), ts.Shard(1)]),
        ts.Layout.from_boxes((7, 5), [[((1, 0), (1, 5)), ((4, 2), (2, 3))], [], [((0, 0), (1, 2)), ((2, 4), (2, 1))]]),
    ],
    ids=["rows", "columns", "replicas", "boxes"],
)
def test_a_part_has_the_bits_of_the_whole(layout: ts.Layout, dtype: str):
    all_of_it = whole((7, 5), dtype)
    for rank in range(3):
        expected = [all_of_it[box.slices].ravel() for box in layout.boxes(rank)]
        flat = np.concatenate(expected) if expected else np.empty(0, dtype)
        held = np.empty_like(flat)
        result = ts.random.normal(held, 7, 3, deviation=0.02, layout=layout, rank=rank)
        assert result is held
        np.testing.assert_array_equal(held, flat)


def test_slices_and_shards_are_initialised_in_one_call(ranks):
    def body(comm: ts.Comm) -> None:
        params = {"fc1.weight": ts.Deferred((7, 5), "float32"), "fc2.weight": ts.Deferred((4, 7), "float32")}
        with ts.Mesh(comm, {"tp": 2}) as mesh, ts.TensorParallel(mesh, params, {"fc1": "column", "fc2": "row"}) as tp:
            for name in tp.names:
                ts.random.normal(tp[name], 7, 3, deviation=0.02, layout=tp.layout(name), rank=comm.rank)
            cut = slice(4 * comm.rank, 4 * comm.rank + 4)
            np.testing.assert_array_equal(tp["fc1.weight"], whole((7, 5))[cut])
            np.testing.assert_array_equal(tp["fc2.weight"], whole((4, 7))[:, cut])
        with ts.FSDP(comm, {"fc": {"w": np.zeros((5, 3), np.float32)}}) as fsdp:
            ts.random.normal(fsdp.shards["w"], 7, 3, deviation=0.02, layout=fsdp.layout("w"), rank=comm.rank)
            np.testing.assert_array_equal(fsdp.shards["w"], whole((5, 3))[3 * comm.rank : 3 * comm.rank + 3])

    ranks(2, body)


def test_numbers_have_their_distributions():
    count = 10**6
    flat = ts.random.uniform(np.empty(count), 1, low=-1, high=3)
    assert flat.min() >= -1
    assert flat.max() < 3
    assert abs(flat.mean() - 1) < 4 * flat.std() / math.sqrt(count)
    bell = ts.random.normal(np.empty(count), 1, 1, mean=5, deviation=2)
    assert abs(bell.mean() - 5) < 4 * 2 / math.sqrt(count)
    assert abs(bell.std() - 2) < 4 * 2 / math.sqrt(2 * count)
    mask = ts.random.bernoulli(np.empty(count, bool), 1, 2, p=0.9)
    assert abs(mask.mean() - 0.9) < 4 * 0.3 / math.sqrt(count)
    assert (mask == (ts.random.uniform(np.empty(count), 1, 2) < 0.9)).all()


def test_seeds_and_streams_are_numbers_of_64_bits():
    seen = {
        ts.random.bernoulli(np.empty(100, np.uint8), seed, stream).tobytes()
        for seed in (0, 1, 2**64 - 1)
        for stream in (0, 1, 2**64 - 1)
    }
    assert len(seen) == 9
    for wrong in (-1, 2**64):
        with pytest.raises(ts.InvalidArgument, match="seed is"):
            ts.random.uniform(np.empty(3), wrong)
        with pytest.raises(ts.InvalidArgument, match="stream is"):
            ts.random.normal(np.empty(3), 0, wrong)
    with pytest.raises(TypeError, match="seed"):
        ts.random.uniform(np.empty(3), 1.5)  # type: ignore[arg-type]


def test_bfloat16_may_be_held_as_its_bits():
    bits = ts.random.normal(np.empty(100, np.uint16), 7, dtype="bfloat16")
    exact = ts.random.normal(np.empty(100), 7)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(values, exact, rtol=2**-8)


def test_what_makes_no_sense_is_refused():
    layout = ts.Layout((6, 4), [2], [ts.Shard(0)])
    part = np.empty((2, 4))
    with pytest.raises(ts.InvalidArgument, match=r"output needs shape \[3, 4\] or \[12\]"):
        ts.random.uniform(part, 0, layout=layout, rank=0)
    with pytest.raises(ts.InvalidArgument, match="needs a rank"):
        ts.random.uniform(part, 0, layout=layout)
    with pytest.raises(ts.InvalidArgument, match="no layout"):
        ts.random.uniform(part, 0, rank=0)
    with pytest.raises(TypeError, match="layout is a"):
        ts.random.uniform(part, 0, layout=part, rank=0)  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgument, match="low is 2 and high is 1"):
        ts.random.uniform(part, 0, low=2)
    with pytest.raises(ts.InvalidArgument, match="deviation is -1"):
        ts.random.normal(part, 0, deviation=-1)
    with pytest.raises(ts.InvalidArgument, match="p is nan"):
        ts.random.bernoulli(part, 0, p=math.nan)
    with pytest.raises(ts.InvalidArgument, match="dtype i64"):
        ts.random.normal(np.empty(3, np.int64), 0)
    with pytest.raises(ts.InvalidArgument, match="not contiguous"):
        ts.random.normal(np.empty((4, 4))[:, 1], 0)
    layout.close()
    with pytest.raises(ts.InvalidState, match="closed"):
        ts.random.uniform(np.empty((3, 4)), 0, layout=layout, rank=0)
