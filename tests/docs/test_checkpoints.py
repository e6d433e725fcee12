"""docs/CHECKPOINTS.md: its programs run as they stand, each going on from the one before, with other ranks and in
another language; then what the page reads is there. Each language has two, numbered here: rows, and an object of the
program's own."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from patience import patience
from user_programs import PREFIX, ROOT, c, java, python, rust

PAGE = (ROOT / "docs" / "CHECKPOINTS.md").read_text(encoding="utf-8")


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def said_by(command: list[str], ranks: int, cwd: Path) -> str:
    job = subprocess.run(
        [str(PREFIX / "bin" / "tessera"), "run", "-n", str(ranks), *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def test_each_program_goes_on_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [(c, 3), (python, 2), (java, 4), (rust, 3), (c, 1), (rust, 2), (java, 1), (python, 4), (c, 2)]
    programs = {build: build(tmp_path, examples(build.__name__)[0]) for build in (c, python, java, rust)}
    for done, (language, ranks) in enumerate(jobs):
        output = said_by(programs[language], ranks, tmp_path)
        for rank in range(ranks):
            said = rf"rank {rank} of {ranks}: step {3 * done}, epoch {3 * done}, w {3 * done}(\.0+)?$"
            assert re.search(said, output, re.M), output
    last = 3 * len(jobs)

    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(examples("python")[2], names)
    checkpoint = names["checkpoint"]
    assert isinstance(checkpoint, ts.Checkpoint)
    assert (checkpoint.step, checkpoint.saved_values["epoch"]) == (last, last)
    with ts.Checkpoint("whole") as whole:
        assert (whole["w"] == last).all()
    exec(examples("python")[4], names)
    chosen = names["state"]
    assert isinstance(chosen, ts.State)
    assert chosen["seen"] == last
    assert (chosen["encoder"]["embedding"] == last).all()
    assert not chosen["head"].any()
    assert names["report"] == ts.LoadReport((), (), (), ("head",), verified=True)
    torch = pytest.importorskip("torch")
    exec(examples("python")[3], names)
    state = names["state"]
    assert isinstance(state, dict)
    assert torch.equal(state["w"], torch.full((1000, 64), float(last)))
    assert len(list(Path("runs/rows").glob("step-*"))) == 3


@pytest.mark.parametrize("form", ["tessera", "torch_dcp"])
def test_an_optimizer_of_pytorch_takes_what_one_of_ours_saved(tmp_path: Path, form: str) -> None:
    torch = pytest.importorskip("torch")
    weight = np.ones((3, 4), np.float32)
    with ts.init() as comm, ts.Saver(comm, tmp_path, format=form) as saver:
        ddp = ts.DDP(comm, {"fc.weight": weight})
        opt = ts.AdamW(ddp, lr=0.02, betas=(0.8, 0.9))
        ddp.grads["fc.weight"][...] = 2
        ddp.ready_all()
        ddp.wait()
        opt.step()
        saver.save(1, ts.State(model=ddp, optim=opt))
    with ts.Checkpoint(tmp_path) as checkpoint:
        path, average = checkpoint.path, checkpoint["optim.state.fc.weight.exp_avg"]
    model = torch.nn.Sequential()
    model.add_module("fc", torch.nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=False)
    program = examples("python")[5]
    if form == "tessera":
        (reader,) = re.findall(r"`(storage_reader=tessera\S+)`", PAGE)
        program = "import tessera.torch\n" + program.replace("checkpoint_id=path", reader)
    exec(program, {"model": model, "optimizer": optimizer, "path": path})
    (parameter,) = model.parameters()
    assert (parameter.detach().numpy() == weight).all()
    assert (optimizer.state[parameter]["exp_avg"].numpy() == average).all()
    settings = optimizer.param_groups[0]
    assert (settings["lr"], tuple(settings["betas"]), settings["amsgrad"]) == (0.02, (0.8, 0.9), False)


def test_an_object_of_each_language_goes_on_from_that_of_each_other(tmp_path: Path) -> None:
    # Each ordered pair of languages stands side by side once.
    jobs = [c, rust, java, rust, python, rust, c, java, python, java, c, python, c]
    assert len(set(pairwise(jobs))) == 12
    programs = {build: build(tmp_path, examples(build.__name__)[1]) for build in (c, python, java, rust)}
    for done, language in enumerate(jobs):
        output = said_by(programs[language], done % 2 + 1, tmp_path)
        steps = range(1, 3 * done + 1)
        best = min(steps, key=lambda step: abs(step - 10.5), default=0)
        loss = f"{abs(best - 10.5):.1f}" if best else "[Ii]nf(inity)?"
        said = re.findall(rf"step {3 * done}: lowest loss {loss} at step {best}$", output, re.M)
        assert len(said) == done % 2 + 1, output
    with ts.Checkpoint(tmp_path / "runs" / "best") as checkpoint:
        assert checkpoint.saved_values == {"best.loss": 0.5, "best.step": 10}
