"""The demo: one training job of four ranks in C, Python, Java and Rust loses a rank to SIGKILL and goes on with three.

Run it by ``./dev demo``. It starts ``tessera run`` on the four digits trainers, kills the Java rank in mid-training,
lets the job resume from the shared checkpoint, checks the result in several ways, and writes ``demo-out/report.html``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import report
from charts import Curve, Part
from evaluation import Evaluation
from programs import ROOT, TESSERA
from training import VICTIM, Training, tensor_pictures, train


def load_without_launcher(root: Path) -> tuple[dict[str, Any], str]:
    """Every tensor of the newest checkpoint, in this process alone; checksums are verified on the way."""
    import tessera as ts

    with ts.Checkpoint(root) as checkpoint:
        tensors = {name: checkpoint[name] for name in checkpoint.tensors}
        return tensors, f"{len(tensors)} tensors of step {checkpoint.step}, world size 1, no launcher"


def load_in_pytorch(checkpoint: Path, expected: dict[str, Any]) -> str:
    """PyTorch's own reader must give the same bits."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {name: torch.full(array.shape, -1, dtype=torch.from_numpy(array).dtype) for name, array in expected.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be here
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    for name, tensor in state.items():
        if tensor.numpy().tobytes() != expected[name].tobytes():
            raise SystemExit(f"PyTorch read other bits of {name}")
    return f"HuggingFaceStorageReader of PyTorch {torch.__version__}: {len(state)} tensors, bit-equal"


def run_tessera(*arguments: str) -> str:
    done = subprocess.run([str(TESSERA), *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise SystemExit(f"tessera {' '.join(arguments)} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return done.stdout


def check(root: Path, newest: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """What holds of the last checkpoint, each with its proof; and notes on what could not be tried."""
    verify = run_tessera("ckpt", "verify", str(newest)).strip()
    tensors, loaded = load_without_launcher(root)
    checks = [
        ("tessera ckpt verify reads every byte", verify.splitlines()[-1]),
        ("the checkpoint loads in Python without a launcher", loaded),
    ]
    if importlib.util.find_spec("torch") is None:
        return checks, ["PyTorch is not installed here: its reader was not tried. ./dev test tries it."]
    return [*checks, ("the checkpoint loads in PyTorch", load_in_pytorch(newest, tensors))], []


def step_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["step"])


def curve_speed(rows: list[dict[str, Any]], world: int) -> float:
    part = [row for row in rows if row["world"] == world]
    seconds = part[-1]["time"] - part[0]["time"]
    return (part[-1]["step"] - part[0]["step"]) / seconds if seconds > 0 else 0.0


def timings_of(training: Training, rows: list[dict[str, Any]], newest: Path, pace_ms: int) -> list[tuple[str, str]]:
    assert training.kill is not None
    assert training.resume is not None
    committed = list(newest.parent.glob("step-*/manifest.json"))
    size = sum(path.stat().st_size for path in newest.glob("rank-*.safetensors"))
    paced = f", held back to {pace_ms} ms a step so that one can watch" if pace_ms > 0 else ""
    return [
        ("whole job", f"{training.seconds:.1f} s"),
        ("from the kill until three ranks had loaded the checkpoint", f"{training.resume[0] - training.kill[0]:.2f} s"),
        (f"steps a second with four ranks{paced}", f"{curve_speed(rows, 4):.0f}"),
        (f"steps a second with three ranks{paced}", f"{curve_speed(rows, 3):.0f}"),
        ("checkpoints that were kept", str(len(committed))),
        ("files of the newest", f"{size / 1024:.0f} KiB"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="where results go (emptied first)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--pace", type=int, default=20, help="milliseconds that a step lasts at least")
    options = parser.parse_args()
    out: Path = options.out
    root = out / "checkpoints"
    shutil.rmtree(out, ignore_errors=True)
    root.mkdir(parents=True)

    print("tessera run: four ranks, C, Python, Java and Rust, train one model", flush=True)
    training = train(out, options.steps, options.save_every, options.pace)
    assert training.kill is not None
    assert training.resume is not None
    assert training.before is not None
    evaluated = sorted((row for row in training.rows if "accuracy" in row), key=lambda row: int(row["rank"]))
    accuracy = evaluated[0]["accuracy"]
    print(f"held-out accuracy {accuracy * 100:.1f} %")

    newest = root / (root / "latest").read_text(encoding="utf-8").strip()
    tree = run_tessera("ckpt", "tree", str(newest))
    print(f"\n$ tessera ckpt tree {shown(newest)}\n{tree}")
    checks, notes = check(root, newest)
    for what, outcome in checks:
        print(f"✓ {what}: {outcome}")

    rows = [row for row in training.rows if row["rank"] == 0 and "loss" in row]
    curve = [(row["step"], row["world"], row["loss"]) for row in rows]
    report.write_report(
        report.Run(
            curve=Curve(curve, training.kill[1], training.resume[1], VICTIM),
            accuracy=accuracy,
            evaluations=[Evaluation.of(row) for row in evaluated],
            before=training.before,
            after=Part(training.after, step_of(newest), tensor_pictures(newest)),
            timings=timings_of(training, rows, newest, options.pace),
            checks=checks,
            tree=tree,
            notes=notes,
        ),
        out / "report.html",
    )
    print(f"\nThe report: {out / 'report.html'}")
    print(f'Go on:  eval "$(./dev env)" && tessera ckpt tree {shown(out)}/checkpoints/latest')
    if accuracy < 0.95:
        print("accuracy is below 95 %", file=sys.stderr)
        return 1
    return 0


def shown(path: Path) -> str:
    """As one would type it from here."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    sys.exit(main())
