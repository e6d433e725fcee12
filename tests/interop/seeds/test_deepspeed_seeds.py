"""The document's DeepSpeed loop and configuration: README.md beside this file tells what differs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from sampling import sample  # noqa: E402
from sentences import Model, SentenceDataset  # noqa: E402
from test_sentence_seeds import launched, write_sentences  # noqa: E402

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow
LINES, BATCH = 330, 8


def alone(train_file: Path, ranks: int) -> list[float]:
    """The losses of rank 0's samples, in float32, of one process that takes the batches of all ranks."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.00015)
    data = SentenceDataset(train_file)
    words, labels = (torch.stack(list(column)) for column in zip(*data, strict=True))
    per_rank = -(-len(data) // ranks)
    samples = [torch.arange(rank, per_rank * ranks, ranks) % len(data) for rank in range(ranks)]
    losses = []
    for begin in range(0, per_rank, BATCH // ranks):
        optimizer.zero_grad()
        for rank, own in enumerate(samples):
            few = own[begin : begin + BATCH // ranks]
            loss = torch.nn.functional.mse_loss(model(words[few]), labels[few])
            if rank == 0:
                losses.append(loss.item())
            (loss / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def told(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", printed)}


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    sample([(name, ranks) for name in ("torchrun", "tessera run") for ranks in (2, 4)], 1, "deepspeed"),
)
def test_it_trains_and_resumes(tmp_path: Path, launcher: str, ranks: int) -> None:
    train_file, saved = tmp_path / "train.txt", tmp_path / "saved"
    write_sentences(train_file, LINES, seed=1)
    config = ["--deepspeed", "--deepspeed_config", HERE / "ds_config.json"]
    program = HERE / "deepspeed_train.py"
    first = launched(launcher, ranks, program, train_file, "--save_dir", saved, *config, cwd=tmp_path)
    losses, expected = told(first), alone(train_file, ranks)
    assert sorted(losses) == list(range(len(expected)))
    assert list(losses.values()) == pytest.approx(expected, rel=0.02, abs=2e-3)
    # Named by rank 0's loss, as the ranks' differ.
    names = {str(float(one.name)) for one in saved.iterdir() if one.is_dir()}
    assert len(names) == len([step for step in losses if step % 10 == 0])
    by_step = {step: name for step in losses for name in names if abs(float(name) - losses[step]) < 1e-8}
    assert (saved / "latest").read_text() == by_step[max(step for step in losses if step % 10 == 0)]
    load = ["--load_dir", saved, "--ckpt_id", by_step[20]]
    again = launched(
        launcher, ranks, program, train_file, "--save_dir", tmp_path / "more", *load, *config, cwd=tmp_path
    )
    assert told(again) == {step: loss for step, loss in losses.items() if step > 20}


def test_a_world_that_does_not_divide_the_batch_is_told_with_all_numbers(tmp_path: Path) -> None:
    train_file = tmp_path / "train.txt"
    write_sentences(train_file, 20, seed=1)
    config = ["--deepspeed", "--deepspeed_config", HERE / "ds_config.json"]
    program = [HERE / "deepspeed_train.py", train_file, "--save_dir", tmp_path / "saved", *config]
    with pytest.raises(AssertionError, match=r"train_batch_size 8 does not equal .*3 data-parallel ranks"):
        launched("tessera run", 3, *program, cwd=tmp_path)
