"""The demo: one training job of four ranks in C, Python, Java and Rust loses a rank to SIGKILL and goes on with three.

Run it by ``./dev demo``. It starts ``tessera run`` on the four digits trainers, kills the Java rank in mid-training,
lets the job resume from the shared checkpoint, checks the result in several ways, and writes ``demo-out/report.html``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import report
from programs import LANGUAGES, ROOT, TESSERA, digits

VICTIM = "java"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that others are still writing."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def show_progress(step: int, steps: int, loss: float, world: int, note: str) -> None:
    """One line that is drawn over itself on a terminal, and now and then a line of its own elsewhere."""
    width = 30
    done = width * step // steps
    line = f"[{'█' * done}{'░' * (width - done)}] step {step:>5}/{steps}  loss {loss:.4f}  {world} ranks  {note}"
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="", flush=True)
    elif step % (steps // 10) == 0:
        print(line, flush=True)


def train(out: Path, steps: int, save_every: int, pace_ms: int) -> dict[str, Any]:
    """Run the job, kill one rank on the way, and return what happened with its times."""
    log, events = out / "train.jsonl", out / "events.jsonl"
    arguments = ["--data", str(ROOT / "examples" / "data" / "digits.csv"), "--checkpoints", str(out / "checkpoints")]
    arguments += ["--steps", str(steps), "--save-every", str(save_every), "--batch", "32", "--seed", "7"]
    arguments += ["--log", str(log), "--pace", str(pace_ms)]
    command = [str(TESSERA), "run", "--min-ranks", "3", "--max-restarts", "3", "--on-loss", "shrink"]
    command += ["--log-dir", str(out / "logs"), "--events", str(events)]
    for i, language in enumerate(LANGUAGES):
        command += ([":"] if i else []) + ["-n", "1", *digits(language, arguments)]

    started = time.time()
    kill: tuple[float, int] | None = None
    shown = -1
    with (out / "job.txt").open("wb") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while job.poll() is None:
                time.sleep(0.02)
                rows = [row for row in read_json_lines(log) if row["rank"] == 0 and "loss" in row]
                if not rows:
                    continue
                last = rows[-1]
                if last["step"] != shown:
                    shown = last["step"]
                    note = "" if kill is None else f"({VICTIM} was killed at step {kill[1]})"
                    show_progress(shown, steps, last["loss"], last["world"], note)
                if kill is None and last["step"] > steps // 2:
                    pid = next(
                        event["pid"]
                        for event in read_json_lines(events)
                        if event["event"] == "start" and event["rank"] == LANGUAGES.index(VICTIM)
                    )
                    os.kill(pid, signal.SIGKILL)
                    kill = (time.time() - started, last["step"])
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(timeout=60)
    print()
    if job.returncode != 0 or kill is None:
        print((out / "job.txt").read_text(encoding="utf-8", errors="replace")[-4000:])
        raise SystemExit(f"the job ended with status {job.returncode}; see {out / 'job.txt'} and {out / 'logs'}")
    return {
        "started": started,
        "ended": time.time(),
        "kill": kill,
        "rows": read_json_lines(log),
        "events": read_json_lines(events),
    }


def tensor_pictures(checkpoint: Path) -> tuple[list[report.TensorPicture], int]:
    """Which box of each tensor is in which rank's file, read from the files' own headers; and the files' bytes."""
    pictures: dict[str, report.TensorPicture] = {}
    size = 0
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        size += path.stat().st_size
        rank = int(re.match(r"rank-(\d+)", path.name).group(1))  # type: ignore[union-attr]
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        for name, entry in header.items():
            shape = manifest["tensors"][name]["shape"]
            picture = pictures.setdefault(name, report.TensorPicture(name, entry["dtype"], shape, []))
            picture.pieces.append(report.Piece(rank, offsets[name]["saved_offsets"], entry["shape"]))
    return [pictures[name] for name in sorted(pictures)], size


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="where results go (emptied first)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--pace", type=int, default=20, help="milliseconds that a step lasts at least")
    options = parser.parse_args()
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    (out / "checkpoints").mkdir(parents=True)

    print("tessera run: four ranks, C, Python, Java and Rust, train one model", flush=True)
    result = train(out, options.steps, options.save_every, options.pace)
    started, rows, events = result["started"], result["rows"], result["events"]
    accuracy = next(row["accuracy"] for row in reversed(rows) if "accuracy" in row)
    curve = [
        (row["time"] - started, row["step"], row["world"], row["loss"])
        for row in rows
        if row["rank"] == 0 and "loss" in row
    ]
    resumed = min((entry for entry in curve if entry[2] == 3), key=lambda entry: entry[0])
    restart_step = (resumed[1] - 1) // options.save_every * options.save_every
    starts = [event for event in events if event["event"] == "start"]
    last_round = max(event["round"] for event in starts)
    survivors = [language for language in LANGUAGES if language != VICTIM]
    ranks = [
        (
            event["round"],
            (LANGUAGES if event["round"] != last_round else survivors)[event["rank"]],
            event["rank"],
            event["pid"],
        )
        for event in starts
    ]
    print(f"held-out accuracy {accuracy * 100:.1f} %")

    newest = out / "checkpoints" / (out / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    tree = run_tessera("ckpt", "tree", str(newest))
    print(f"\n$ tessera ckpt tree {newest.relative_to(out.parent)}\n{tree}")
    verify = run_tessera("ckpt", "verify", str(newest)).strip()
    tensors, loaded = load_without_launcher(out / "checkpoints")
    checks = [
        ("tessera ckpt verify reads every byte", verify.splitlines()[-1]),
        ("the checkpoint loads in Python without a launcher", loaded),
    ]
    notes = []
    if importlib.util.find_spec("torch") is not None:
        checks.append(("the checkpoint loads in PyTorch", load_in_pytorch(newest, tensors)))
    else:
        notes.append("PyTorch is not installed here: its reader was not tried. ./dev test tries it.")
    for what, outcome in checks:
        print(f"✓ {what}: {outcome}")

    pictures, size = tensor_pictures(newest)
    checkpoint_count = len(list((out / "checkpoints").glob("step-*/manifest.json")))
    paced = f", held back to {options.pace} ms a step so that one can watch" if options.pace > 0 else ""
    timings = [
        ("whole job", f"{result['ended'] - started:.1f} s"),
        ("from the kill to the first step of the three", f"{resumed[0] - result['kill'][0]:.2f} s"),
        (f"steps a second with four ranks{paced}", f"{curve_speed(curve, 4):.0f}"),
        (f"steps a second with three ranks{paced}", f"{curve_speed(curve, 3):.0f}"),
        ("checkpoints under demo-out/checkpoints, newest", f"{checkpoint_count}, {size / 1024:.0f} KiB"),
    ]
    report.write_report(
        report.Run(
            loss=curve,
            accuracy=accuracy,
            kill=(result["kill"][0], result["kill"][1], VICTIM),
            restart=(resumed[0], restart_step),
            ranks=ranks,
            tensors=pictures,
            checkpoint_languages=dict(enumerate(survivors)),
            timings=timings,
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


def curve_speed(curve: list[tuple[float, int, int, float]], world: int) -> float:
    part = [entry for entry in curve if entry[2] == world]
    seconds = part[-1][0] - part[0][0]
    return (part[-1][1] - part[0][1]) / seconds if seconds > 0 else 0.0


if __name__ == "__main__":
    sys.exit(main())
