"""Safetensors of the Hugging Face kind, both ways, bit by bit.

PyTorch's HuggingFaceStorageWriter and the safetensors package write them and Tessera reads; Tessera writes, by one
process and by three ranks, and both of them read, PyTorch also by two ranks into DTensors, and its DCP reads what is
converted to it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TESSERA
from patience import patience

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
ts = pytest.importorskip("tessera")

import torch.distributed.checkpoint as dcp  # noqa: E402
from fork_server import Start  # noqa: E402
from run_torch import run_ranks  # noqa: E402
from test_torch_dcp import HERE, flat, run_torch  # noqa: E402
from torch_ranks import bits  # noqa: E402

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
STORED_ONLY = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64"]

EXPORT = """
import sys
import tessera as ts

with ts.init() as comm, ts.Checkpoint(sys.argv[1]) as checkpoint:
    checkpoint.export(sys.argv[2], comm, format=sys.argv[3], max_file_bytes=int(sys.argv[4]) or None)
"""


def every_dtype() -> dict[str, torch.Tensor]:
    numbers = torch.arange(6 * 5) % 40
    made = {name: numbers.reshape(6, 5).to(getattr(torch, name)) for name in DTYPES + STORED_ONLY}
    return made | {"scalar": torch.tensor(-1.5), "none": torch.empty(0, 4, dtype=torch.int16)}


def assert_same(read: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(read) == sorted(wanted)
    for name, value in wanted.items():
        assert read[name].dtype == value.dtype, name
        assert read[name].shape == value.shape, name
        assert bits(read[name]) == bits(value), name


def assert_tessera_reads(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    with ts.Checkpoint(path) as ours:
        assert sorted(ours) == sorted(wanted)
        assert ours.unreadable == {}
        for name, value in wanted.items():
            assert ours[name].shape == tuple(value.shape), name
            assert ours[name].tobytes() == bits(value), name


def ckpt(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([str(TESSERA), "ckpt", *arguments], capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distributed")
    run_torch("hf", 2, directory)
    return directory


def test_what_pytorchs_ranks_save_is_one_checkpoint(distributed: Path) -> None:
    wanted = flat(torch.load(distributed / "whole.pt"))
    names = sorted(path.name for path in (distributed / "checkpoint").iterdir())
    assert names == [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    assert_tessera_reads(distributed / "checkpoint", wanted)
    tree = json.loads(ckpt("tree", "--json", str(distributed / "checkpoint")))
    assert tree["world_size"] == 2
    assert [piece["rank"] for piece in tree["tensors"]["columns"]["written_by"]] == [0, 1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_it_is_loaded_by_another_number_of_ranks(distributed: Path, rank: int) -> None:
    import numpy as np

    whole = torch.load(distributed / "whole.pt")["columns"].numpy()
    layout = ts.Layout(whole.shape, (3,), (ts.Shard(0),))
    pieces = [np.empty(box.sizes, whole.dtype) for box in layout.boxes(rank)]
    state = ts.State()
    state["columns"] = ts.Sharded(layout, pieces, rank, "float64")
    with ts.Checkpoint(distributed / "checkpoint") as ours:
        ours.load(state, allow_unexpected=True)
    for box, piece in zip(layout.boxes(rank), pieces, strict=True):
        assert (piece == whole[box.slices]).all()


def test_safetensors_own_files_are_read(tmp_path: Path) -> None:
    wanted = every_dtype()
    safetensors_torch.save_file(wanted, tmp_path / "model.safetensors", metadata={"format": "pt", "note": "x"})
    assert_tessera_reads(tmp_path / "model.safetensors", wanted)
    assert_tessera_reads(tmp_path, wanted)


def test_tied_weights_of_save_model_have_both_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    safetensors_torch.save_model(model, str(tmp_path / "model.safetensors"))
    assert_tessera_reads(tmp_path, model.state_dict())
    ckpt("convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf")
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    other[1].weight = other[0].weight
    safetensors_torch.load_model(other, str(tmp_path / "out" / "model.safetensors"))
    assert_same(other.state_dict(), model.state_dict())


def test_a_quantised_model_is_left_as_it_is(tmp_path: Path) -> None:
    """Weights of eight bits beside their scales, as Hugging Face has them: nobody multiplies one by the other."""
    blocks = torch.arange(256 * 3.0).reshape(256, 3) / 7
    wanted = {
        "model.layers.0.mlp.up_proj.weight": blocks.to(torch.float8_e4m3fn),
        "model.layers.0.mlp.up_proj.weight_scale_inv": torch.tensor([[0.003], [0.125]]),
        "model.layers.0.mlp.down_proj.qweight": torch.arange(-60, 60, dtype=torch.int32).reshape(8, 15),
        "model.layers.0.mlp.down_proj.qzeros": torch.arange(15, dtype=torch.int32).reshape(1, 15),
        "model.layers.0.mlp.down_proj.scales": torch.arange(15).reshape(1, 15).to(torch.float16) / 3,
    }
    source = tmp_path / "model"
    source.mkdir()
    safetensors_torch.save_file(wanted, source / "model.safetensors", metadata={"format": "pt"})
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert_tessera_reads(source, wanted)
    told = json.loads(ckpt("tree", "--json", str(source)))["tensors"]
    assert told["model.layers.0.mlp.up_proj.weight"]["dtype"] == "f8_e4m3"
    for to in ("native", "hf", "torch_dcp", "torch_save"):
        ckpt("convert", str(source), str(tmp_path / to), "--to", to)
        assert_tessera_reads(tmp_path / to, wanted)
        assert json.loads(ckpt("diff", "--json", str(source), str(tmp_path / to)))["same"]
    assert_same(safetensors_torch.load_file(tmp_path / "hf" / "model.safetensors"), wanted)
    state = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(state, checkpoint_id=tmp_path / "torch_dcp", no_dist=True)
    assert_same(state, wanted)


def convert_by(ranks: int, path: Path, out: Path, to: str, max_file_bytes: int = 0) -> None:
    """By the command line, or by ranks together."""
    if ranks == 0:
        limit = ["--max-shard-size", f"{max_file_bytes}B"] if max_file_bytes else []
        ckpt("convert", str(path), str(out), "--to", to, *limit)
        return
    program = out.parent / "export.py"
    program.write_text(EXPORT, encoding="utf-8")
    command = [str(TESSERA), "run", "-n", str(ranks), sys.executable, str(program), str(path), str(out)]
    command += [to if to.startswith("torch_") else "safetensors", str(max_file_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [0, 3])
def test_what_is_written_is_read_by_safetensors_and_pytorch(tmp_path: Path, ranks: int) -> None:
    wanted = every_dtype()
    safetensors_torch.save_file(wanted, tmp_path / "in.safetensors")
    convert_by(ranks, tmp_path / "in.safetensors", tmp_path / "one", "hf")
    assert_same(safetensors_torch.load_file(tmp_path / "one" / "model.safetensors"), wanted)

    convert_by(ranks, tmp_path / "in.safetensors", tmp_path / "cut", "hf", 300)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(len(bits(value)) for value in wanted.values())
    assert_same(
        {k: v for file in files for k, v in safetensors_torch.load_file(tmp_path / "cut" / file).items()}, wanted
    )
    assert_tessera_reads(tmp_path / "cut", wanted)

    known = {
        name: value for name, value in wanted.items() if name != "float8_e8m0fnu"
    }  # of which PyTorch does not know
    safetensors_torch.save_file(known, tmp_path / "known.safetensors")
    convert_by(ranks, tmp_path / "known.safetensors", tmp_path / "known", "hf", 300)
    state = {name: torch.zeros_like(value) for name, value in known.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "known")), no_dist=True)
    assert_same(state, known)


@pytest.mark.parametrize("max_file_bytes", [0, 300])
def test_what_three_ranks_write_is_read_by_two_of_pytorch_into_dtensors(tmp_path: Path, max_file_bytes: int) -> None:
    """Cut evenly and not, and where the second rank has nothing."""
    wanted = {name: value for name, value in every_dtype().items() if name != "float8_e8m0fnu"}
    wanted |= {
        "few": torch.arange(4.0).reshape(1, 4),
        "odd": torch.arange(7 * 3.0).reshape(7, 3),
        "line": torch.arange(9),
    }
    safetensors_torch.save_file(wanted, tmp_path / "in.safetensors")
    torch.save(wanted, tmp_path / "whole.pt")
    convert_by(3, tmp_path / "in.safetensors", tmp_path / "out", "hf", max_file_bytes)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_file_bytes > 0)
    start = Start.FORK if max_file_bytes else Start.EXECUTE
    said = run_ranks(HERE / "torch_hf_load.py", 2, tmp_path / "out", tmp_path / "whole.pt", start=start)
    assert sorted(said.splitlines()) == [f"rank {rank}: {len(wanted)} tensors" for rank in range(2)]


@pytest.mark.parametrize("ranks", [0, 3])
def test_what_is_converted_to_dcp_is_read_by_pytorch(tmp_path: Path, ranks: int) -> None:
    wanted = every_dtype() | {"large": torch.arange(1_000_000.0).reshape(1000, 1000)}
    wanted |= {"complex128": torch.arange(5).to(torch.complex128)}
    torch.save(wanted | {"step": 7, "nested": {"lr": 0.5, "name": "größer"}}, tmp_path / "in.pt")
    convert_by(ranks, tmp_path / "in.pt", tmp_path / "dcp", "torch_dcp")
    assert_tessera_reads(tmp_path / "dcp", wanted)
    state = {name: torch.zeros_like(value) for name, value in wanted.items()}
    state |= {"step": 0, "nested": {"lr": 0.0, "name": ""}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert (state.pop("step"), state.pop("nested")) == (7, {"lr": 0.5, "name": "größer"})
    assert_same(state, wanted)


def test_every_format_becomes_every_other(tmp_path: Path) -> None:
    wanted = every_dtype()
    safetensors_torch.save_file(wanted, tmp_path / "begin.safetensors")
    path = tmp_path / "begin.safetensors"
    for step, to in enumerate(
        ["native", "torch_dcp", "torch_save", "hf", "torch_dcp", "safetensors", "torch_save", "native"]
    ):
        out = tmp_path / f"{step}-{to}"
        ckpt("convert", str(path), str(out), "--to", to)
        assert_tessera_reads(out, wanted)
        assert json.loads(ckpt("diff", "--json", str(path), str(out)))["same"]
        path = out


def test_every_subcommand_takes_them(distributed: Path) -> None:
    path = str(distributed / "checkpoint")
    assert json.loads(ckpt("info", "--json", path))["format"] == "safetensors"
    assert json.loads(ckpt("ls", "--json", path))[0]["state"] == "committed"
    assert "columns" in ckpt("tree", path)
    assert "columns" in ckpt("shards", path)
    assert json.loads(ckpt("cat", "--json", path, "scalar"))["first"] == [2.5]
    assert json.loads(ckpt("cat", "--json", path, "whole.complex64", "--slice", "1, 0"))["values"] == [3.0, 0.0]
    told = json.loads(ckpt("verify", "--json", path))
    assert told["sound"] and not told["checksums"]
