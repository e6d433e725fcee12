"""PyTorch's modules and optimizers as parts of a `tessera.State`, saved and resumed by a `tessera.Saver`."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adam_tensor_rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "plain_sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
}


def job(make, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    return model, make(model.parameters())


def train(model, opt, begin, end):
    for step in range(begin, end):
        opt.zero_grad()
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_process_goes_on_as_if_there_had_been_no_end(tmp_path: Path, name):
    make = OPTIMIZERS[name]
    whole, whole_opt = job(make)
    train(whole, whole_opt, 0, 6)
    model, opt = job(make)
    train(model, opt, 0, 3)
    with ts.Saver(None, tmp_path) as saver:
        saver.save(3, ts.State(model=model, optim=opt))
    fresh, fresh_opt = job(make, seed=1)
    with ts.Saver(None, tmp_path) as saver:
        assert saver.resume(ts.State(model=fresh, optim=fresh_opt)) == 3
    assert all(param.grad is None for param in fresh.parameters())
    train(fresh, fresh_opt, 3, 6)
    for ours, theirs in zip(fresh.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_where_nothing_is_loaded_there_is_no_state_and_no_step(tmp_path: Path):
    model, opt = job(OPTIMIZERS["adamw"])
    before = [param.clone() for param in model.parameters()]
    model[0].weight.grad = torch.ones(3, 4)
    with ts.Saver(None, tmp_path) as saver:
        assert saver.resume(ts.State(model=model, optim=opt)) == 0
        assert not opt.state
        assert opt.param_groups[0]["lr"] == 0.1
        saver.save(1, ts.State(other=1))
        with pytest.raises(ts.Mismatch, match=r"optim\.state\.0\.exp_avg"):
            saver.resume(ts.State(model=model, optim=opt))
    assert not opt.state
    assert torch.equal(model[0].weight.grad, torch.ones(3, 4))
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_what_was_saved_before_the_first_step_is_loaded(tmp_path: Path):
    model, opt = job(OPTIMIZERS["adamw"])
    with ts.Saver(None, tmp_path) as saver:
        saver.save(0, ts.State(model=model, optim=opt))
        fresh, fresh_opt = job(OPTIMIZERS["adamw"], seed=1)
        assert saver.resume(ts.State(model=fresh, optim=fresh_opt)) == 0
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert not fresh_opt.state


def test_what_was_saved_as_step_zero_after_a_step_is_loaded(tmp_path: Path):
    model, opt = job(OPTIMIZERS["adamw"])
    train(model, opt, 0, 1)
    with ts.Saver(None, tmp_path) as saver:
        saver.save(0, ts.State(model=model, optim=opt))
        fresh, fresh_opt = job(OPTIMIZERS["adamw"], seed=1)
        saver.resume(ts.State(model=fresh, optim=fresh_opt))
    assert torch.equal(fresh_opt.state[fresh[0].weight]["exp_avg"], opt.state[model[0].weight]["exp_avg"])


def test_parameters_of_which_nothing_was_saved_begin_anew(tmp_path: Path):
    model, opt = job(OPTIMIZERS["adamw"])
    train(model, opt, 0, 2)
    with ts.Saver(None, tmp_path) as saver:
        saver.save(2, ts.State(model=model, jobs=[{"optim": opt}]))
    fresh, _ = job(OPTIMIZERS["adamw"], seed=1)
    fresh.append(nn.Linear(1, 1))
    fresh_opt = OPTIMIZERS["adamw"](fresh.parameters())
    with ts.Checkpoint(tmp_path) as checkpoint:
        state = ts.State(model=fresh, jobs=[{"optim": fresh_opt}])
        report = checkpoint.load(state, allow_missing=True, only=["model.*", "jobs.0.optim.state.*"])
    assert "model.3.weight" in report.missing
    assert torch.equal(fresh_opt.state[fresh[2].weight]["exp_avg"], opt.state[model[2].weight]["exp_avg"])
    assert fresh[3].weight not in fresh_opt.state
    train(fresh, fresh_opt, 2, 3)
    assert all(param.isfinite().all() for param in fresh.parameters())


def used_alone(make=OPTIMIZERS["adamw"]):
    model = nn.ModuleDict({"aux": nn.Linear(2, 2), "used": nn.Linear(2, 2)})
    return model, make(model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_never_had_a_gradient_have_no_state(tmp_path: Path, name):
    model, opt = used_alone(OPTIMIZERS[name])
    for _ in range(2):
        model["used"](torch.ones(1, 2)).sum().backward()
        opt.step()
    with ts.Saver(None, tmp_path) as saver:
        saver.save(2, ts.State(model=model, optim=[opt]))
        for _ in range(2):
            fresh, fresh_opt = used_alone(OPTIMIZERS[name])
            assert saver.resume(ts.State(model=fresh, optim=[fresh_opt])) == 2
            assert str(fresh_opt.state_dict()["state"]) == str(opt.state_dict()["state"])
    renamed, renamed_opt = used_alone(OPTIMIZERS[name])
    with ts.Checkpoint(tmp_path) as checkpoint:
        rules = {"optim.": "o.", "model.": "m."}
        checkpoint.load(ts.State(m=renamed, o=[renamed_opt]), rename=rules)
    assert str(renamed_opt.state_dict()["state"]) == str(opt.state_dict()["state"])


def test_parameters_that_were_trained_and_are_frozen_now_have_the_state_that_was_saved(tmp_path: Path):
    model, opt = job(OPTIMIZERS["adamw"])
    train(model, opt, 0, 2)
    with ts.Saver(None, tmp_path) as saver:
        saver.save(2, ts.State(model=model, optim=opt))
        fresh, fresh_opt = job(OPTIMIZERS["adamw"], seed=1)
        fresh[0].requires_grad_(False)
        assert saver.resume(ts.State(model=fresh, optim=fresh_opt)) == 2
    assert torch.equal(fresh_opt.state[fresh[0].weight]["exp_avg"], opt.state[model[0].weight]["exp_avg"])


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.LazyLinear(2)), "uninitialized parameter"),
        (nn.Sequential(nn.Linear(2, 2, device="meta")), "meta"),
    ],
    ids=["lazy", "meta"],
)
def test_a_tensor_that_cannot_be_saved_is_told_by_its_name(tmp_path: Path, model, why):
    with (
        ts.Saver(None, tmp_path) as saver,
        pytest.raises(ts.InvalidArgument, match=rf"model\.0\.weight: .*{why}"),
    ):
        saver.save(1, ts.State(model=model))


def test_views_whose_memory_holds_other_values_are_refused(tmp_path: Path):
    whole = torch.tensor([1 + 2j])
    for view, why in ((whole.conj(), "conjugate"), (whole.conj().imag, r"negated memory; resolve_neg\(\)")):
        with (
            ts.Saver(None, tmp_path) as saver,
            pytest.raises(ts.InvalidArgument, match=f"x: the Tensor cannot be used here: .*{why}"),
        ):
            saver.save(0, ts.State(x=view))


def test_an_optimizer_whose_step_wants_a_closure_is_left_as_it_is(tmp_path: Path):
    model, _ = job(OPTIMIZERS["sgd"])
    opt = torch.optim.LBFGS(model.parameters())
    with ts.Saver(None, tmp_path) as saver:
        saver.save(1, ts.State(model=model, optim=opt))
        assert saver.resume(ts.State(model=model, optim=opt)) == 1
    assert not opt.state
    assert all(param.grad is None for param in model.parameters())


def test_sharded_parameters_are_sent_to_the_module_that_knows_them(tmp_path: Path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(4, 3))
        with (
            ts.Saver(None, tmp_path) as saver,
            pytest.raises(ts.InvalidArgument, match=r"model\.weight is a DTensor.*tessera\.torch\.checkpoint"),
        ):
            saver.save(1, ts.State(model=model))
    finally:
        dist.destroy_process_group()
