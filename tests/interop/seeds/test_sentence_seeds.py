"""The document's training and evaluation on one host: README.md beside this file tells what differs."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from sklearn.metrics import precision_recall_curve

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from launched import run_launched  # noqa: E402
from run_torch import run_python  # noqa: E402
from sampling import sample  # noqa: E402
from sentences import Model, SentenceDataset  # noqa: E402

from train import EPOCHS  # noqa: E402

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow


def write_sentences(path: Path, lines: int, seed: int) -> None:
    """Those of label 1 have more of the later words."""
    draw = random.Random(seed)
    text = []
    for _ in range(lines):
        label = draw.randrange(2)
        text.append(
            f"{label} " + " ".join(f"word{int(draw.betavariate(2 + label, 3 - label) * 100)}" for _ in range(12))
        )
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def alone(train_file: Path, test_file: Path, ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What one process makes of the ranks' batches: the test errors, and the parameters at the end."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data, test = SentenceDataset(train_file), SentenceDataset(test_file)
    mse = torch.nn.MSELoss()
    errors = []
    for epoch in range(EPOCHS):
        loaders = []
        for rank in range(ranks):
            sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=ranks, rank=rank)
            sampler.set_epoch(epoch)
            loaders.append(torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler))
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            for words, labels in batches:
                (mse(model(words), labels) / ranks).backward()
            optimizer.step()
        with torch.no_grad():
            words, labels = (torch.stack(list(column)) for column in zip(*test, strict=True))
            errors.append(float(mse(model(words), labels)))
    return errors, model.state_dict()


def launched(launcher: str, ranks: int, program: Path, *arguments: object, cwd: Path) -> str:
    environment = {"OMP_NUM_THREADS": "1"}
    if launcher == "torchrun":
        start = ["-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc_per_node={ranks}"]
        done = run_python(*start, program, *arguments, cwd=cwd, environment=environment)
    else:
        done = run_launched(ranks, program, *arguments, cwd=cwd, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    sample([(name, ranks) for name in ("torchrun", "tessera run") for ranks in (2, 4)], 1, "sentences"),
)
def test_it_trains_and_evaluates_as_one_process(tmp_path: Path, launcher: str, ranks: int) -> None:
    train_file, test_file, model_path = (tmp_path / name for name in ("train.txt", "test.txt", "model.pt"))
    write_sentences(train_file, 330, seed=1)  # the ranks' last batches are smaller
    write_sentences(test_file, 101, seed=2)
    errors, parameters = alone(train_file, test_file, ranks)
    printed = launched(launcher, ranks, HERE / "train.py", train_file, test_file, model_path, cwd=tmp_path)
    told = [float(line.split()[-1]) for line in printed.splitlines() if "test error" in line]
    assert told == pytest.approx(errors, rel=1e-5)
    assert errors[-1] < errors[0]
    saved = torch.load(model_path)["model"]
    assert saved.keys() == {f"module.{name}" for name in parameters}
    for name, value in parameters.items():
        torch.testing.assert_close(saved[f"module.{name}"], value)


def test_the_evaluation_finds_the_same_curve_on_several_ranks(tmp_path: Path) -> None:
    test_file, model_path = tmp_path / "test.txt", tmp_path / "model.pt"
    write_sentences(test_file, 101, seed=2)  # the ranks' last batches are filled up
    torch.manual_seed(3)
    model = Model()
    torch.save({"model": {f"module.{name}": value for name, value in model.state_dict().items()}}, model_path)
    alone = run_python(HERE / "eval.py", test_file, model_path, cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    printed = launched("tessera run", 3, HERE / "eval.py", test_file, model_path, cwd=tmp_path)
    assert json.loads(printed[printed.index("{") :]) == json.loads(alone.stdout)
    with torch.no_grad():
        words, labels = (torch.stack(list(column)) for column in zip(*SentenceDataset(test_file), strict=True))
        scores = model(words)
    precision, recall, thresholds = precision_recall_curve(labels.numpy(), scores.numpy())
    measured = json.loads(alone.stdout)
    assert measured["error"] == pytest.approx(float(torch.nn.functional.mse_loss(scores.double(), labels.double())))
    assert measured["precision"] == pytest.approx(list(precision))
    assert measured["recall"] == pytest.approx(list(recall))
    assert measured["thresholds"] == pytest.approx(list(thresholds))
