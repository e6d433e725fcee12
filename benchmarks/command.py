"""`tessera ckpt` on a checkpoint of 100,000 tensors, against what a person takes for instant: 0.3 s.

A safetensors file of that many small tensors is made and converted to the native format and to PyTorch's DCP. The bound
holds for the native one, and for commands that read no data: all but `diff`, which compares it with itself, `convert`,
which writes safetensors, and `rename-keys`. `latest`, `gc` and `rename-keys` are for the native format alone. Whole
processes are timed, from start to exit, their output thrown away: by the processor's time, user and system, since these
commands have one thread, and a clock would tell what else the machine did.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import results

LAYERS = 10_000
PARTS = {
    **{f"attn.{part}.weight": (16, 8) for part in "qkvo"},
    "mlp.up.weight": (16, 8),
    "mlp.down.weight": (16, 8),
    **{f"norm{i}.weight": (16,) for i in (1, 2)},
    "mlp.up.bias": (16,),
    "mlp.down.bias": (16,),
}
NAME = "model.layers.77.attn.q.weight"
PATH = "PATH"
OUT = "OUT"  # is removed after each round
COMMANDS = {
    "info": ["info", PATH],
    "info --json": ["info", "--json", PATH],
    "ls --json": ["ls", "--json", PATH],
    "tree": ["tree", PATH],
    "tree --json": ["tree", "--json", PATH],
    "cat NAME": ["cat", PATH, NAME],
    "shards": ["shards", PATH],
    "shards NAME": ["shards", PATH, NAME],
    "latest": ["latest", PATH],
    "verify --fast": ["verify", "--fast", PATH],
    "diff": ["diff", PATH, PATH],
    "gc --dry-run": ["gc", "--dry-run", PATH],
    "convert": ["convert", "--to", "safetensors", PATH, OUT],
    "rename-keys": ["rename-keys", "--prefix", "model.", PATH, OUT],
}
NATIVE_ALONE = {"latest", "gc --dry-run", "rename-keys"}
READS_DATA = {"diff", "convert", "rename-keys"}
SECONDS = 0.3


def make_safetensors(path: Path) -> None:
    header: dict[str, object] = {}
    end = 0
    for layer in range(LAYERS):
        for part, shape in PARTS.items():
            size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[f"model.layers.{layer}.{part}"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [end, end + size],
            }
            end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def seconds_of(command: list[str]) -> float:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    begin = used()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return used() - begin


def bench(tessera: Path, rounds: int) -> list[results.Case]:
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        source = scratch / "model.safetensors"
        make_safetensors(source)
        paths = {"native": scratch / "native", "torch_dcp": scratch / "dcp", "safetensors": source}
        for to in ("native", "torch_dcp"):
            subprocess.run([tessera, "ckpt", "convert", source, paths[to], "--to", to], check=True, capture_output=True)
        cases = []
        for form, path in paths.items():
            for name, words in COMMANDS.items():
                if name in NATIVE_ALONE and form != "native":
                    continue
                places = {PATH: str(path), OUT: str(scratch / "out")}
                line = [str(tessera), "ckpt", *(places.get(word, word) for word in words)]
                measured = []
                for _ in range(rounds):
                    measured.append((seconds_of(line), SECONDS))
                    shutil.rmtree(scratch / "out", ignore_errors=True)
                target = 1.0 if form == "native" and name not in READS_DATA else None
                cases.append(
                    results.case(f"{form}: {name}", "processor s", "bound", measured, target, smaller_is_better=True)
                )
                print(f"{form}: {name}: {cases[-1]['ours']:.3f} s", file=sys.stderr)
        return cases
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
