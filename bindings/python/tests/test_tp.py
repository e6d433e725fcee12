"""Tensor parallelism: what ranks with slices compute together is what one rank computes, checkpoints included."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera as ts
from patience import patience

ROWS, INPUTS, OUTPUTS = 6, 5, 4
SECONDS = patience(20.0)
PLAN = {"fc1": "column", "fc2": "row"}


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.5, 0.5, shape)


def model(hidden: int) -> dict[str, np.ndarray]:
    return {
        "fc1.weight": values(1, hidden, INPUTS),
        "fc1.bias": values(2, hidden),
        "fc2.weight": values(3, OUTPUTS, hidden),
        "fc2.bias": values(4, OUTPUTS),
    }


X, DY = values(5, ROWS, INPUTS), values(6, ROWS, OUTPUTS)


def dense(params: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Outputs, the gradient of the inputs and those of the parameters, on one rank."""
    h = np.tanh(X @ params["fc1.weight"].T + params["fc1.bias"])
    y = h @ params["fc2.weight"].T + params["fc2.bias"]
    dh = DY @ params["fc2.weight"] * (1 - h**2)
    grads = {"fc1.weight": dh.T @ X, "fc1.bias": dh.sum(0), "fc2.weight": DY.T @ h, "fc2.bias": DY.sum(0)}
    return y, dh @ params["fc1.weight"], grads


def part(whole: np.ndarray, dim: int, comm: ts.Comm) -> np.ndarray:
    """This rank's chunk of an array."""
    most = -(-whole.shape[dim] // comm.world_size)
    return np.ascontiguousarray(
        np.take(whole, range(comm.rank * most, min((comm.rank + 1) * most, whole.shape[dim])), dim)
    )


def step(tp: ts.TensorParallel, comm: ts.Comm, dim: int | None) -> tuple[np.ndarray, np.ndarray]:
    """One step of the perceptron; its outputs and the gradient of its inputs, whole or this rank's rows."""
    x, dy = (X, DY) if dim is None else (part(X, dim, comm), part(DY, dim, comm))
    whole = tp.enter(x, dim, out=None if dim is None else np.empty_like(X))
    h = np.tanh(whole @ tp["fc1.weight"].T + tp["fc1.bias"])
    y = tp.leave(h @ tp["fc2.weight"].T, dim, bias=tp["fc2.bias"])
    tp.grads["fc2.bias"] = dy.sum(0)
    dy = tp.leave_backward(dy, dim, out=None if dim is None else np.empty_like(DY))
    dh = dy @ tp["fc2.weight"] * (1 - h**2)
    tp.grads["fc2.weight"] = dy.T @ h
    tp.grads["fc1.weight"] = dh.T @ whole
    tp.grads["fc1.bias"] = dh.sum(0)
    dx = tp.enter_backward(dh @ tp["fc1.weight"], dim)
    tp.sum_grads()
    return y, dx


@pytest.mark.parametrize("size", [1, 2, 3])
def test_outputs_and_gradients_are_those_of_one_rank(ranks, size):
    def body(comm: ts.Comm) -> None:
        with ts.Mesh(comm, {"tp": size}) as mesh:
            for hidden in (8, 13, 1):
                params = model(hidden)
                y, dx, grads = dense(params)
                for dim in (None, 0):
                    with ts.TensorParallel(mesh, params, PLAN, sequence_parallel=dim is not None) as tp:
                        own_y, own_dx = step(tp, comm, dim)
                        np.testing.assert_allclose(
                            own_y, y if dim is None else part(y, 0, comm), rtol=1e-12, atol=1e-14
                        )
                        np.testing.assert_allclose(
                            own_dx, dx if dim is None else part(dx, 0, comm), rtol=1e-12, atol=1e-14
                        )
                        for name, grad in grads.items():
                            cut = tp.cut(name)
                            own = grad if cut is None else part(grad, cut, comm)
                            np.testing.assert_allclose(tp.grads[name], own, rtol=1e-12, atol=1e-14)

    ranks(size, body)


def test_a_checkpoint_is_that_of_the_whole_model(ranks, tmp_path: Path):
    params = model(13)

    def train(comm: ts.Comm, steps: int, resume: bool) -> dict[str, np.ndarray]:
        with ts.Mesh(comm, {"dp": 1, "tp": comm.world_size}) as mesh:
            deferred = {name: ts.Deferred(array.shape, array.dtype) for name, array in params.items()}
            tp = ts.TensorParallel(mesh, deferred if resume else params, PLAN, dim="tp")
            optimizer = ts.AdamW(tp, lr=0.01)
            state = ts.State(model=tp, optim=optimizer)
            with ts.Saver(comm, tmp_path) as saver:
                if resume:
                    assert saver.resume(state) == 2
                for i in range(steps):
                    step(tp, comm, None)
                    assert optimizer.clip_grad_norm(0.1) > 0.1
                    optimizer.step()
                    if i == 1 and not resume:
                        saver.save(2, state)
            whole = {}
            for name, array in params.items():
                cut = tp.cut(name)
                whole[name] = tp[name].copy() if cut is None else tp.gather(tp[name], cut, np.empty_like(array))
            tp.close()
            return whole

    expected = ranks(1, lambda comm: train(comm, 3, False))[0]
    for name, array in ranks(2, lambda comm: train(comm, 3, False))[0].items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-12)
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors["model.fc2.weight"].shape == (OUTPUTS, 13)
    for size in (1, 3):
        for name, array in ranks(size, lambda comm: train(comm, 1, True))[0].items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-12)


def test_plans_take_placements_and_layouts(ranks):
    def body(comm: ts.Comm) -> None:
        fused = np.arange(24.0).reshape(12, 2)  # q, k and v of 4 rows each
        boxes = [[((4 * one + 2 * rank, 0), (2, 2)) for one in range(3)] for rank in range(2)]
        layout = ts.Layout.from_boxes((12, 2), boxes)
        params = {"qkv": fused, "a": fused.copy(), "b": fused.copy(), "ids": np.arange(3)}
        plan = {"qkv": layout, "a": ts.Shard(1), "b": ts.Replicate()}
        with ts.Mesh(comm, {"tp": 2}) as mesh, ts.TensorParallel(mesh, params, plan) as tp:
            rows = [4 * one + 2 * comm.rank + i for one in range(3) for i in range(2)]
            assert (tp["qkv"] == fused[rows]).all()
            assert (tp["a"] == fused[:, [comm.rank]]).all()
            assert (tp["b"] == fused).all()
            assert tp.names == ("qkv", "a", "b", "ids")
            assert [tp.cut(name) for name in tp.names] == [0, 1, None, None]
            assert list(tp.grads) == ["qkv", "a", "b"]
            assert [box.offsets for box in tp.layout("qkv").boxes(1)] == [(2, 0), (6, 0), (10, 0)]
            tp.grads["b"] = np.ones_like(fused)
            tp.zero_grad()
            assert not tp.grads["b"].any()
            tp.set_stream(None)
            with pytest.raises(ts.InvalidArgument, match="the CPU has no streams"):
                tp.set_stream(1)
            with pytest.raises(ts.Unsupported, match="is on CUDA device 3, but the communicator has no transport"):
                ts.TensorParallel(mesh, {"w": ts.Deferred((4,), device=3)}, {})

    ranks(2, body)


def test_activations_move_along_any_dimension_and_in_the_background(ranks):
    def body(comm: ts.Comm) -> None:
        whole = values(7, 3, 4, 6)
        with ts.Mesh(comm, {"tp": 2}) as mesh, ts.TensorParallel(mesh, {"w": values(1, 2)}, {}) as tp:
            for dim in (0, 1, -1):
                own = tp.split(whole, dim)
                assert (own == part(whole, dim % 3, comm)).all()
                out = np.empty_like(whole)
                assert (tp.gather(own, dim, out) == whole).all()
                with pytest.raises(ts.InvalidArgument, match="async_op needs out"):
                    tp.enter(own, dim, async_op=True)
                out[...] = 0
                work = tp.enter(own, dim, out=out, async_op=True)
                work.wait()
                assert (out == whole).all()
            assert (tp.enter(part(whole, 1, comm), 1) == whole).all()  # its size divides
            total = np.empty_like(whole)
            tp.leave(whole, out=total, bias=np.arange(6.0), async_op=True).wait()
            np.testing.assert_allclose(total, 2 * whole + np.arange(6.0))
            tp.enter_backward(whole, out=total, async_op=True).wait()
            np.testing.assert_allclose(total, 2 * whole)
            half = np.empty_like(part(whole, 1, comm))
            tp.leave_backward(part(whole, 1, comm), 1, out=total, async_op=True).wait()
            assert (total == whole).all()
            tp.enter_backward(whole, 1, out=half, async_op=True).wait()
            np.testing.assert_allclose(half, 2 * part(whole, 1, comm))

    ranks(2, body)


@pytest.mark.parametrize("size", [1, 3])
def test_an_embedding_and_the_loss_over_a_cut_vocabulary(ranks, size):
    words, features = 7, 3
    ids = np.array([[0, 6, 2], [3, 3, 5]])
    table, dout = values(1, words, features), values(2, 2, 3, features)
    logits, targets = values(3, 4, words), np.array([0, 6, -100, 3])
    smooth, weights = 0.2, values(4, words) + 1

    def loss() -> tuple[float, np.ndarray]:
        shifted = logits - logits.max(1, keepdims=True)
        log = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        share = np.full_like(logits, smooth / words) * weights
        rows = targets >= 0
        share[rows, targets[rows]] += (1 - smooth) * weights[targets[rows]]
        share[~rows] = 0
        divisor = weights[targets[rows]].sum()
        grad = (share.sum(1, keepdims=True) * np.exp(log) - share) / divisor
        return -(share * log).sum() / divisor, grad

    def body(comm: ts.Comm) -> None:
        with (
            ts.Mesh(comm, {"tp": size}) as mesh,
            ts.TensorParallel(mesh, {"tok.weight": table}, {"tok": "vocabulary"}) as tp,
        ):
            assert (tp.embed("tok.weight", ids) == table[ids]).all()
            assert (tp.embed("tok.weight", ids, dim=1) == part(table[ids], 1, comm)).all()
            tp.embed_backward("tok.weight", ids, dout)
            tp.embed_backward("tok.weight", ids, part(dout, 1, comm), dim=1)  # adds
            expected = np.zeros_like(table)
            np.add.at(expected, ids, dout)
            np.testing.assert_allclose(tp.grads["tok.weight"], part(2 * expected, 0, comm), rtol=1e-12, atol=1e-14)
            with pytest.raises(ts.InvalidArgument, match="id 7 at position 0"):
                tp.embed("tok.weight", np.array([7]))
            options: dict[str, Any] = {"label_smoothing": smooth, "class_weights": weights}
            found, grad = tp.cross_entropy(part(logits, 1, comm), targets, words, **options)
            whole_loss, whole_grad = loss()
            np.testing.assert_allclose(found, whole_loss, rtol=1e-12)
            np.testing.assert_allclose(grad, part(whole_grad, 1, comm), rtol=1e-12, atol=1e-14)
            each, _ = tp.cross_entropy(part(logits, 1, comm), targets, words, reduction="none", grad_scale=2)
            assert each.shape == (4,)
            assert each[2] == 0
            with pytest.raises(ts.InvalidArgument, match="reduction is 'most'"):
                tp.cross_entropy(part(logits, 1, comm), targets, words, reduction="most")

    ranks(size, body)


def test_the_mean_over_data_ranks_is_one(ranks):
    logits, targets = values(3, 5, 4), np.array([0, 3, 1, 1, 2])

    def body(comm: ts.Comm) -> float:
        with ts.Mesh(comm, {"dp": 2, "tp": 1}) as mesh:
            tp = ts.TensorParallel(mesh, {"w": values(1, 2)}, {}, dim="tp")
            mine = slice(0, 3) if comm.rank == 0 else slice(3, 5)
            loss, _ = tp.cross_entropy(logits[mine], targets[mine], 4, data_ranks=mesh["dp"])
            tp.close()
            return float(loss)

    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert sum(ranks(2, body)) == pytest.approx(-log[range(5), targets].mean())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_by_two_ranks_train_and_save_like_one(ranks, tmp_path: Path, kind: str):
    params = model(7)

    def train(comm: ts.Comm, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
        wide = 2 if comm.world_size > 1 else 1
        with ts.Mesh(comm, {"dp": comm.world_size // wide, "tp": wide}) as mesh:
            tp = ts.TensorParallel(mesh, params, PLAN, dim="tp")
            units = {layer: {name: tp[name] for name in params if name.startswith(layer)} for layer in ("fc1", "fc2")}
            models: ts.DDP | ts.FSDP
            if kind == "ddp":
                models = ts.DDP(mesh["dp"], tp.slices, tp=tp, op="sum")
            else:
                models = ts.FSDP(mesh["dp"], units, tp=tp, op="sum", keep_whole=["fc1", "fc2"])
            optimizer = ts.AdamW(models, lr=0.02)
            state = ts.State(model=models, optim=optimizer)
            rows = slice(mesh.coordinate("dp"), None, mesh.size("dp"))
            norms = []
            with ts.Saver(comm, tmp_path / kind) as saver:
                for _ in range(saver.resume(state), steps):
                    half_step(tp, models, X[rows], DY[rows])
                    norms.append(optimizer.clip_grad_norm(0.5))
                    optimizer.step()
                saver.save(steps, state)
            if isinstance(models, ts.FSDP):
                assert models.layout("fc2.weight").shape == (OUTPUTS, 7)
            models.close()
            tp.close()
        with ts.Checkpoint(tmp_path / kind) as checkpoint:
            whole = {name: np.empty_like(array) for name, array in params.items()}
            for name, array in whole.items():
                checkpoint.read(f"model.{name}", array)
            return norms, whole

    def half_step(tp: ts.TensorParallel, models: ts.DDP | ts.FSDP, x: np.ndarray, dy: np.ndarray) -> None:
        def run(value: Any, grad: Any) -> None:
            h = np.tanh(x @ value["fc1.weight"].T + value["fc1.bias"])
            tp.leave(h @ value["fc2.weight"].T, bias=value["fc2.bias"])
            dh = dy @ value["fc2.weight"] * (1 - h**2)
            for name, found in {
                "fc1.weight": dh.T @ x,
                "fc1.bias": dh.sum(0),
                "fc2.weight": dy.T @ h,
                "fc2.bias": dy.sum(0),
            }.items():
                grad[name][...] = found

        if isinstance(models, ts.DDP):
            run(tp.slices, models.grads)
            models.ready_all()
        else:
            with models.forward("fc1"), models.forward("fc2"):
                pass
            with models.backward("fc2") as (second, of_second), models.backward("fc1") as (first, of_first):
                run({**first, **second}, {**of_first, **of_second})
        models.wait()

    expected_norms, expected = ranks(1, lambda comm: train(comm, 4))[0]
    (tmp_path / kind).rename(tmp_path / "one")
    norms, _ = ranks(4, lambda comm: train(comm, 2))[0]
    more, found = ranks(2, lambda comm: train(comm, 4))[0]
    np.testing.assert_allclose(norms + more, expected_norms, rtol=1e-9)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-9)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_activations_enter_and_leave_part_by_part(ranks, dim):
    whole = np.arange(24.0).reshape(2, 4, 3)

    def body(comm: ts.Comm) -> None:
        with ts.Mesh(comm, {"tp": 2}) as mesh:
            tp = ts.TensorParallel(mesh, {"w": np.zeros(1)}, {})
            mine = tp.split(whole, dim)
            out, copy = np.empty_like(whole), np.empty_like(whole)
            axis = np.moveaxis(copy, dim, 0)

            def see(where: slice, part: Any) -> None:
                axis[where] = np.moveaxis(part, dim, 0)

            assert tp.enter_parts(mine, dim, see, out) is out
            np.testing.assert_array_equal(out, whole)
            np.testing.assert_array_equal(copy, whole)

            def compute(where: slice) -> Any:
                return np.moveaxis(np.moveaxis(whole, dim, 0)[where], 0, dim)

            part = tp.leave_parts(whole.shape, dim, compute, "f8", np.ones(mine.shape[-1]))
            np.testing.assert_array_equal(part, 2 * mine + 1)

    ranks(2, body)


def test_a_part_that_is_not_computed_is_an_error(ranks):
    def fails(where: slice, _: object = None) -> None:
        raise ValueError(f"nothing from {where.start} on")

    def body(comm: ts.Comm) -> None:
        with ts.Mesh(comm, {"tp": 2}) as mesh:
            tp = ts.TensorParallel(mesh, {"w": np.zeros(1)}, {})
            if comm.rank == 1:
                with pytest.raises(ValueError, match="nothing from 0 on"):
                    tp.enter_parts(np.ones(1), 0, fails)
            else:
                tp.enter_parts(np.ones(1), 0, lambda where, part: None)  # is unharmed
            with pytest.raises(ts.InvalidArgument, match="dim is 3"):
                tp.enter_parts(np.ones(1), 3, fails)
            with pytest.raises(ValueError if comm.rank else ts.Aborted, match="nothing from 0 on"):
                tp.leave_parts((2,), 0, fails if comm.rank else lambda where: np.ones(1, np.float32))

    ranks(2, body)


def test_bad_plans_are_refused_on_all_ranks(ranks):
    def refused(plan: Any, match: str, error: type[Exception] = ts.InvalidArgument, **how: Any) -> None:
        def body(comm: ts.Comm) -> None:
            with ts.Mesh(comm, {"dp": 1, "tp": 2}) as mesh, pytest.raises(error, match=match):
                own = plan(comm) if callable(plan) else plan
                ts.TensorParallel(mesh, how.get("params", model(8)), own, dim=how.get("dim", "tp"))

        ranks(2, body)

    refused({"fc3": "column", "fc9": "row"}, '2 patterns.*"fc3", "fc9"')
    refused({"fc1": "column", "fc?.weight": "row"}, "fc1.weight")
    refused({"fc1": "columns"}, "the style of 'fc1' is 'columns'")
    refused({"fc1.bias": "vocabulary"}, "fc1.bias.*needs 2")
    refused({"fc1": ("column", 1)}, r'"fc1.weight" .*1 heads do not divide over 2 ranks')
    refused({"fc1": ("column", 3)}, "do not divide into 3 heads")
    refused({"fc1": ("column", 0)}, "has 0 heads")
    refused({"fc1": ("vocabulary", 2)}, "it must be one of")
    refused(lambda comm: {"fc1": "column" if comm.rank else "row"}, "plans of the ranks differ", ts.Mismatch)
    refused({}, "2 dimensions", dim=None)
    refused({}, '"pp"', ts.NotFound, dim="pp")
    refused([], "plan is a list", TypeError)


def test_lamb_over_replicated_shards_of_slices_steps_like_one_rank(ranks):
    """Its norms are of whole parameters: of two slices, each in the shards of two ranks, which two more replicate."""
    random = np.random.default_rng(11)
    shapes = {"fc1.weight": (6, 5), "fc1.bias": (6,), "fc2.weight": (3, 6), "fc2.bias": (3,)}

    def drawn() -> dict[str, np.ndarray]:
        return {name: random.uniform(-1, 1, shape) for name, shape in shapes.items()}

    params, gradients = drawn(), [drawn() for _ in range(4)]
    settings = {"lr": 0.05, "weight_decay": 0.1}
    expected = {name: array.copy() for name, array in params.items()}
    grads = {name: np.zeros_like(array) for name, array in params.items()}
    alone = ts.Lamb(expected, grads, **settings)
    for found in gradients:
        for name, grad in found.items():
            grads[name][...] = grad
        alone.step()

    def body(comm: ts.Comm) -> None:
        with ts.Mesh(comm, {"dp": 4, "tp": 2}) as mesh:

            def part(name: str, array: np.ndarray) -> np.ndarray:
                dim = {"fc2.weight": 1, "fc2.bias": None}.get(name, 0)
                return array if dim is None else np.split(array, 2, dim)[mesh.coordinate("tp")]

            tp = ts.TensorParallel(mesh, params, {"fc1": "column", "fc2": "row"}, dim="tp")
            units = {layer: {name: tp[name] for name in params if name.startswith(layer)} for layer in ("fc1", "fc2")}
            fsdp = ts.FSDP(mesh["dp"], units, tp=tp, shard_ranks=2)
            optimizer = ts.Lamb(fsdp, **settings)
            share = (0.25, 0.75, 1.25, 1.75)[mesh.coordinate("dp")]  # of the mean
            for found in gradients:
                for layer in ("fc2", "fc1"):
                    with fsdp.backward(layer) as (_, of_layer):
                        for name in units[layer]:
                            of_layer[name][...] = share * part(name, found[name])
                fsdp.wait()
                optimizer.step()
            for layer, names in units.items():
                with fsdp.forward(layer) as values:
                    for name in names:
                        np.testing.assert_allclose(values[name], part(name, expected[name]), rtol=1e-12)
            fsdp.close()
            tp.close()

    ranks(8, body)


def test_shards_of_fsdp_are_not_cut(ranks):
    def body(comm: ts.Comm) -> None:
        params = {"fc1.weight": values(1, 4, 2)}
        with ts.Mesh(comm, {"tp": 2}) as mesh, ts.FSDP(comm, {"fc1": params}) as model:
            assert model.shards["fc1.weight"].shape == (2, 2)
            with pytest.raises(
                ts.InvalidArgument, match=r'"fc1.weight" is a shard of an FSDP model: create the tensor-'
            ):
                ts.TensorParallel(mesh, dict(model.shards), {"fc1": "column"})
            ts.TensorParallel(mesh, params, {"fc1": "column"}).close()  # the program's own memory

    ranks(2, body)


def test_the_pages_program_runs(tmp_path: Path):
    page = (Path(__file__).parents[3] / "docs/TENSOR_PARALLEL.md").read_text()
    program = tmp_path / "program.py"
    program.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    losses = [
        subprocess.run(
            ["tessera", "run", "-n", str(size), sys.executable, program],
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS * 3,
        ).stdout.split("loss ")[1]
        for size in (1, 2)
    ]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=2e-6)


def test_misuse_is_told(ranks):
    def body(comm: ts.Comm) -> None:
        with ts.Mesh(comm, {"tp": 1}) as mesh:
            tp = ts.TensorParallel(mesh, {"norm.weight": values(1, 3)}, {"norm": "sequence"})
            optimizer = ts.SGD(tp, lr=1)
            with pytest.raises(ts.InvalidState, match="sum_grads"):
                optimizer.step()
            tp.sum_grads()
            optimizer.step()
            with pytest.raises(ts.NotFound, match=r"norm\.weight"):
                tp["norm"]
            with pytest.raises(ts.InvalidArgument, match="dim is 2"):
                tp.split(values(1, 2, 2), 2)
            with pytest.raises(TypeError, match="grads is"):
                ts.Adam(tp, {"norm.weight": values(1, 3)})
            ts.Adam(tp)
            tp.close()
            with pytest.raises(ts.InvalidState, match="closed"):
                tp.sum_grads()
        with pytest.raises(TypeError, match="mesh is a Comm"):
            ts.TensorParallel(comm, {"w": values(1, 3)}, {})

    ranks(1, body)
