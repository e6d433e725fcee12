"""DDP, optimizers and the sampler."""

import itertools

import numpy as np
import pytest
import tessera as ts


def params(rank: int = 0):
    rng = np.random.default_rng(rank)
    return {"fc.weight": rng.random((3, 4), np.float32), "fc.bias": rng.random(3, np.float32), "scale": rng.random(())}


def test_every_rank_starts_from_the_values_of_rank_0(ranks):
    def body(comm: ts.Comm):
        mine = params(comm.rank)
        ddp = ts.DDP(comm, mine)
        assert ddp.names == tuple(mine)
        assert ddp.params["fc.bias"] is mine["fc.bias"]
        return mine

    for mine in ranks(3, body):
        for name, array in params(0).items():
            assert (mine[name] == array).all()


def test_gradients_are_averaged(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params(), bucket_bytes=16, first_bucket_bytes=16)
        for step in range(3):
            for name, grad in ddp.grads.items():
                assert grad.shape == ddp.params[name].shape
                grad[...] = comm.rank + step
            if step == 0:
                ddp.ready_all()
            elif step == 1:
                ddp.ready("scale", "fc.weight")
                ddp.ready(1)
            else:
                ddp.ready(2)
                ddp.ready_all()
            ddp.wait()
            for grad in ddp.grads.values():
                assert (grad == 0.5 + step).all()
        ddp.zero_grad()
        assert not any(grad.any() for grad in ddp.grads.values())

    ranks(2, body)


def test_gradients_are_summed_if_asked(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, [("w", np.zeros(2))], op="sum")
        ddp.grads["w"][:] = comm.rank + 1
        ddp.ready("w")
        ddp.wait()
        return ddp.grads["w"][0]

    assert ranks(3, body) == [6, 6, 6]


def test_half_precision_gradients(ranks):
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, {"a": np.zeros(5, np.float16), "b": np.zeros(5, ml_dtypes.bfloat16)})
        for grad in ddp.grads.values():
            grad[:] = comm.rank
        ddp.ready_all()
        ddp.wait()
        assert ddp.grads["b"].dtype == ml_dtypes.bfloat16
        return [float(grad[0]) for grad in ddp.grads.values()]

    assert ranks(2, body) == [[0.5, 0.5]] * 2


def test_ranks_that_register_different_parameters_are_told_which(ranks):
    def body(comm: ts.Comm):
        names = ["a", "b", "c"] if comm.rank == 0 else ["a", "x", "c"]
        ts.DDP(comm, {name: np.zeros(3) for name in names})

    for outcome in ranks.outcomes(2, body):
        assert isinstance(outcome, ts.Mismatch)
        assert "b" in str(outcome)
        assert "x" in str(outcome)


def test_mistakes_of_a_step_are_named(alone: ts.Comm):
    ddp = ts.DDP(alone, params())
    ddp.ready("fc.bias")
    with pytest.raises(ts.InvalidState, match=r"fc\.bias"):
        ddp.ready("fc.bias")
    with pytest.raises(ts.InvalidState, match=r"fc\.weight"):
        ddp.wait()
    ddp.ready_all()
    ddp.wait()
    with pytest.raises(ts.NotFound, match=r"nothing.*fc\.weight"):
        ddp.ready("nothing")
    for number in (3, -1, 2**70):
        with pytest.raises(ts.NotFound, match="there is no parameter"):
            ddp.ready(number)


def test_names_are_stripped_of_wrappers(alone: ts.Comm):
    ddp = ts.DDP(alone, {"module._orig_mod.fc": np.zeros(2)})
    assert ddp.names == ("fc",)
    ddp.ready("module._orig_mod.fc")
    ddp.wait()
    ddp.ready("fc")
    ddp.wait()


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"w": np.zeros(3, np.int32)},
        {"w": np.zeros((4, 4))[:, :2]},
        [("w", np.zeros(3)), ("w", np.zeros(3))],
    ],
    ids=["none", "integers", "not contiguous", "same name"],
)
def test_bad_parameters_are_refused(alone: ts.Comm, bad):
    with pytest.raises(ts.InvalidArgument):
        ts.DDP(alone, bad)


def test_bare_arrays_are_named_by_number(alone: ts.Comm):
    assert ts.DDP(alone, [np.zeros(2), np.zeros(3)]).names == ("0", "1")


def test_a_ddp_needs_a_communicator():
    with pytest.raises(TypeError):
        ts.DDP("comm", {"w": np.zeros(2)})  # type: ignore[arg-type]


# ---------------------------------------------------------------- optimizers


def test_the_cpu_has_one_stream():
    opt = ts.SGD({"w": np.zeros(2)}, {"w": np.ones(2)})
    opt.set_stream(None)
    with pytest.raises(ts.InvalidArgument, match="the CPU has no streams"):
        opt.set_stream(1)
    with pytest.raises(TypeError, match="must be a CUDA stream"):
        opt.set_stream("first")


def test_gradients_are_bounded():
    w, g = np.zeros(2), np.array([3.0, -4.0])
    opt = ts.SGD({"w": w}, {"w": g})
    assert opt.clip_grad_norm(6.0) == 5.0
    np.testing.assert_array_equal(g, [3, -4])
    assert opt.clip_grad_norm(100, 1) == 7.0
    assert opt.clip_grad_norm(2.0, float("inf")) == 4.0
    np.testing.assert_allclose(g, [1.5, -2], rtol=1e-5)
    opt.clip_grad_value(1.75)
    np.testing.assert_allclose(g, [1.5, -1.75], rtol=1e-5)
    g[0] = np.nan
    assert opt.clip_grad_norm(0.1) == float("inf")
    assert g[1] == -1.75
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ts.InvalidArgument, match="max_norm"):
            opt.clip_grad_norm(bad)
        with pytest.raises(ts.InvalidArgument, match="is"):
            opt.clip_grad_value(bad)
    with pytest.raises(ts.InvalidArgument, match="p"):
        opt.clip_grad_norm(1.0, 0.5)
    with pytest.raises(TypeError):
        opt.clip_grad_norm("much")  # type: ignore[arg-type]


def test_sgd_by_hand():
    w, g = np.array([1.0, -2.0]), np.array([0.5, 0.25])
    opt = ts.SGD({"w": w}, {"w": g}, lr=0.1, momentum=0.9, weight_decay=0.01)
    expected, momentum = w.copy(), np.zeros(2)
    for step in range(5):
        grad = g + 0.01 * expected
        momentum = grad if step == 0 else 0.9 * momentum + grad
        expected = expected - 0.1 * momentum
        opt.step()
        np.testing.assert_allclose(w, expected, rtol=1e-12)
    assert opt.steps == 5


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_by_hand(decoupled):
    w, g = np.array([1.0, -2.0]), np.array([0.5, 0.25])
    make = ts.AdamW if decoupled else ts.Adam
    opt = make([("w", w)], [("w", g)], lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
    expected, m, v = w.copy(), np.zeros(2), np.zeros(2)
    for step in range(1, 6):
        grad = g if decoupled else g + 0.1 * expected
        if decoupled:
            expected *= 1 - 0.01 * 0.1
        m = 0.8 * m + 0.2 * grad
        v = 0.99 * v + 0.01 * grad * grad
        expected -= 0.01 * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.99**step)) + 1e-6)
        opt.step()
        np.testing.assert_allclose(w, expected, rtol=1e-12)


def test_adagrad_by_hand():
    w, g = np.array([1.0, -2.0]), np.array([0.5, 0.25])
    opt = ts.Adagrad(
        {"w": w}, {"w": g}, lr=0.1, lr_decay=0.5, weight_decay=0.1, initial_accumulator_value=0.25, eps=1e-6
    )
    expected, total = w.copy(), np.full(2, 0.25)
    for step in range(5):
        grad = g + 0.1 * expected
        total += grad * grad
        expected -= 0.1 / (1 + step * 0.5) * grad / (np.sqrt(total) + 1e-6)
        opt.step()
        np.testing.assert_allclose(w, expected, rtol=1e-12)


def test_lion_by_hand():
    w, g = np.array([1.0, -2.0, 3.0]), np.array([0.5, -0.25, 0.0])
    opt = ts.Lion({"w": w}, {"w": g}, lr=0.1, betas=(0.5, 0.75), weight_decay=0.1)
    expected, mean = w.copy(), np.zeros(3)
    for step in range(5):
        g *= -1 if step % 2 else 0.5
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * np.sign(0.5 * mean + 0.5 * g)
        mean = 0.75 * mean + 0.25 * g
        opt.step()
        np.testing.assert_allclose(w, expected, rtol=1e-12)


def test_lamb_by_hand():
    w, g = np.array([1.0, -2.0, 3.0]), np.array([0.5, -0.25, 0.0])
    opt = ts.Lamb({"w": w}, {"w": g}, lr=0.1, betas=(0.5, 0.75), eps=1e-6, weight_decay=0.1, max_coeff=1.25)
    expected, m, v = w.copy(), np.zeros(3), np.zeros(3)
    for step in range(1, 6):
        g *= -1 if step % 2 else 0.5
        m = 0.5 * m + 0.5 * g
        v = 0.75 * v + 0.25 * g * g
        direction = m / (np.sqrt(v) + 1e-6) + 0.1 * expected
        ratio = np.clip(np.linalg.norm(expected) / np.linalg.norm(direction), 0.01, 1.25)
        expected -= 0.1 * np.sqrt(1 - 0.75**step) / (1 - 0.5**step) * ratio * direction
        opt.step()
        np.testing.assert_allclose(w, expected, rtol=1e-12)


def test_lamb_is_not_for_one_copy_per_host(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, {"w": np.ones(4)}, share_params=True)
        with pytest.raises(ts.Unsupported, match="without share_params"):
            ts.Lamb(ddp)

    ranks(2, body)


@pytest.mark.parametrize("make", [ts.SGD, ts.Adam, ts.AdamW, ts.Adagrad, ts.Lion, ts.Lamb])
def test_an_optimizer_over_a_ddp_steps_alike_on_all_ranks(ranks, make):
    def body(comm: ts.Comm):
        mine = params()
        ddp = ts.DDP(comm, mine)
        opt = make(ddp, lr=0.1)
        assert isinstance(opt, ts.Optimizer)
        for grad in ddp.grads.values():
            grad[...] = comm.rank - 1
        ddp.ready_all()
        with pytest.raises(ts.InvalidState):
            opt.step()
        ddp.wait()
        opt.step()
        opt.zero_grad()
        assert not any(grad.any() for grad in ddp.grads.values())
        return mine

    first, second = ranks(2, body)
    for name, before in params().items():
        assert (first[name] == second[name]).all()
        assert (first[name] > before).all()


def test_the_learning_rate_can_be_scheduled():
    w, g = np.ones(1), np.ones(1)
    opt = ts.SGD({"w": w}, {"w": g}, lr=0.5)
    assert opt.lr == 0.5
    opt.lr = 0.25
    opt.step()
    assert (opt.lr, w[0]) == (0.25, 0.75)
    with pytest.raises(ts.InvalidArgument):
        opt.lr = float("nan")


def test_a_literal_zero_is_a_zero():
    w = np.ones(1)
    ts.AdamW({"w": w}, {"w": np.zeros(1)}, lr=0.5, weight_decay=0).step()
    assert w[0] == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: ts.SGD({"w": np.ones(2)}),
        lambda: ts.SGD({"w": np.ones(2)}, {}),
        lambda: ts.SGD({"w": np.ones(2)}, {"w": np.ones(2), "x": np.ones(2)}),
        lambda: ts.SGD({"w": np.ones(2)}, {"w": np.ones(3)}),
        lambda: ts.SGD({"w": np.ones(2)}, {"w": np.ones(2, np.float32)}),
        lambda: ts.SGD({"w": np.ones(2)}, {"w": np.ones(2)}, lr=-1),
        lambda: ts.SGD({"w": np.ones(2)}, {"w": np.ones(2)}, nesterov=True),
        lambda: ts.Adam({"w": np.ones(2)}, {"w": np.ones(2)}, betas=(1.0, 0.9)),
        lambda: ts.AdamW({"w": np.ones(2, np.int32)}, {"w": np.ones(2, np.int32)}),
        lambda: ts.Adagrad({"w": np.ones(2)}, {"w": np.ones(2)}, lr_decay=-1),
        lambda: ts.Lion({"w": np.ones(2)}, {"w": np.ones(2)}, betas=(0.9, 1.0)),
        lambda: ts.Lamb({"w": np.ones(2)}, {"w": np.ones(2)}, min_coeff=11),
    ],
    ids=[
        "no grads",
        "missing",
        "extra",
        "shape",
        "dtype",
        "lr",
        "nesterov",
        "betas",
        "integers",
        "lr_decay",
        "lion betas",
        "min_coeff",
    ],
)
def test_bad_optimizers_are_refused(call):
    with pytest.raises(ts.InvalidArgument):
        call()


# ---------------------------------------------------------------- sampler


def test_an_epoch_gives_each_sample_once(ranks):
    def body(comm: ts.Comm):
        data = ts.Sampler(comm, length=100, seed=5, drop_last=False)
        taken = []
        while data.epoch == 0:
            batch = data.batch(7)
            assert batch.dtype == np.int64
            taken.append(batch)
        assert (data.epoch, data.position) == (1, 0)
        return np.concatenate(taken)

    taken = np.concatenate(ranks(4, body))
    assert sorted(taken) == list(range(100))


def test_the_order_depends_on_seed_and_epoch_alone(alone: ts.Comm):
    def order(seed, epoch):
        data = ts.Sampler(alone, length=50, seed=seed)
        data.epoch = epoch
        return data.batch(50).tolist()

    assert order(1, 0) == order(1, 0)
    orders = [order(seed, epoch) for seed, epoch in itertools.product((1, 2), (0, 1))]
    assert len({tuple(one) for one in orders}) == 4


def test_without_shuffle_the_order_is_the_data_sets(alone: ts.Comm):
    data = ts.Sampler(alone, 5, shuffle=False)
    assert data.batch(3).tolist() == [0, 1, 2]
    assert data.position == 3
    assert data.batch(3).tolist() == [3, 4]


@pytest.mark.parametrize("size", [0, -2])
def test_a_batch_needs_a_size(alone: ts.Comm, size):
    with pytest.raises(ts.InvalidArgument, match=f"the batch size is {size}; it must be at least 1"):
        ts.Sampler(alone, 5).batch(size)


def test_bad_samplers_are_refused(alone: ts.Comm):
    with pytest.raises(ts.InvalidArgument):
        ts.Sampler(alone, 0)
    data = ts.Sampler(alone, 5)
    with pytest.raises(ts.InvalidArgument):
        data.epoch = -1
    data.close()
    with pytest.raises(ts.InvalidState, match="closed"):
        data.batch(1)
