"""The demo's training job: it is started, followed through the files that it writes, and loses a rank on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charts import LANGUAGES as NAMES
from charts import Part, Piece, Rank, TensorPicture
from programs import LANGUAGES, ROOT, TESSERA, digits

VICTIM = "java"


@dataclass
class Training:
    """What happened, with times in seconds since the start."""

    seconds: float = 0.0
    kill: tuple[float, int] | None = None  # when, step
    resume: tuple[float, int] | None = None  # when, the checkpoint's step
    rows: list[dict[str, Any]] = field(default_factory=list)
    before: Part | None = None  # the ranks until the kill, and the checkpoint that the others went on from
    after: list[Rank] = field(default_factory=list)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that others are still writing."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Progress:
    """A bar that is drawn over itself on a terminal, and is now and then a line of its own elsewhere."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = -1
        self.open = False  # the bar's line waits for more

    def show(self, step: int, loss: float, world: int) -> None:
        if step == self.step:
            return
        self.step, done = step, 30 * step // self.steps
        line = f"[{'█' * done}{'░' * (30 - done)}] step {step:>5}/{self.steps}  loss {loss:.4f}  {world} ranks"
        if sys.stdout.isatty():
            print(f"\r\033[K{line}", end="", flush=True)
            self.open = True
        elif step % max(self.steps // 10, 1) == 0:
            print(line, flush=True)

    def say(self, text: str) -> None:
        """What is no step: on a line of its own, which stays."""
        self.end()
        print(text, flush=True)

    def end(self) -> None:
        if self.open:
            print(flush=True)
        self.open = False


def tensor_pictures(checkpoint: Path) -> list[TensorPicture]:
    """Which box of each tensor is in which rank's file, read from the files' own headers."""
    pictures: dict[str, TensorPicture] = {}
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        rank = int(re.match(r"rank-(\d+)", path.name).group(1))  # type: ignore[union-attr]
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        for name, entry in header.items():
            shape = manifest["tensors"][name]["shape"]
            picture = pictures.setdefault(name, TensorPicture(name, entry["dtype"], shape, []))
            picture.pieces.append(Piece(rank, offsets[name]["saved_offsets"], entry["shape"]))
    return [pictures[name] for name in sorted(pictures)]


def ranks_of(events: list[dict[str, Any]], number: int, killed: int | None = None) -> list[Rank]:
    """The processes of a round of the launcher, in order of ranks, and how each ended as far as that is known."""
    program_of = {Path(digits(language, [])[0]).name: language for language in LANGUAGES}
    ranks = {}
    for event in events:
        if event.get("round") != number:
            continue
        if event["event"] == "start":
            ranks[event["rank"]] = Rank(event["rank"], program_of[event["program"]], event["pid"], "")
        elif event["event"] == "exit":
            how = event.get("signal") or f"exit code {event['code']}"
            by_demo = event["pid"] == killed
            by = " from this demo" if by_demo else " from the launcher" if event["ended_by_agent"] else ""
            ranks[event["rank"]].end = how + by
    return [ranks[rank] for rank in sorted(ranks)]


class Follower:
    """Looks at the job's files again and again, kills the victim once, and notes what happens."""

    def __init__(self, out: Path, steps: int, save_every: int) -> None:
        self.out = out
        self.steps = steps
        self.kill_at = steps // 2 + save_every * 4 // 5  # well after a checkpoint: these steps are done again
        self.started = time.time()
        self.progress = Progress(steps)
        self.training = Training()
        self.killed_pid = -1

    @property
    def log(self) -> Path:
        return self.out / "train.jsonl"

    def events(self) -> list[dict[str, Any]]:
        return read_json_lines(self.out / "events.jsonl")

    def look(self) -> None:
        rows = [row for row in read_json_lines(self.log) if row["rank"] == 0 and "loss" in row]
        if self.training.kill and not self.training.resume:
            self.look_for_resume()
        if not rows:
            return
        self.progress.show(rows[-1]["step"], rows[-1]["loss"], rows[-1]["world"])
        if self.training.kill is None and rows[-1]["step"] >= self.kill_at:
            self.kill(rows[-1]["step"])

    def kill(self, step: int) -> None:
        victim = next(rank for rank in ranks_of(self.events(), self.first_round()) if rank.language == VICTIM)
        os.kill(victim.pid, signal.SIGKILL)
        self.training.kill = (time.time() - self.started, step)
        self.killed_pid = victim.pid
        name = NAMES[victim.language]
        self.progress.say(f"kill -9 {victim.pid}: rank {victim.rank}, the {name} one, is gone after step {step}")

    def look_for_resume(self) -> None:
        said = re.findall(
            r"digits: (\d+) ranks, resumed after step (\d+)", (self.out / "job.txt").read_text("utf-8", "replace")
        )
        if not said:
            return
        world, step = map(int, said[-1])
        self.training.resume = (time.time() - self.started, step)
        # Now, since a few saves later the saver keeps it no longer.
        directory = next((self.out / "checkpoints").glob(f"step-{step:08}-*/manifest.json")).parent
        ranks = ranks_of(self.events(), self.first_round(), self.killed_pid)
        self.training.before = Part(ranks, step, tensor_pictures(directory))
        self.progress.say(f"resumed from step {step} with {world} ranks")

    def first_round(self) -> int:
        return min(int(event["round"]) for event in self.events() if event["event"] == "start")

    def result(self) -> Training:
        last = max(int(event["round"]) for event in self.events() if event["event"] == "start")
        self.training.seconds = time.time() - self.started
        self.training.rows = read_json_lines(self.log)
        self.training.after = ranks_of(self.events(), last)
        return self.training


def train(out: Path, steps: int, save_every: int, pace_ms: int) -> Training:
    """Run the job, kill one rank on the way, and return what happened."""
    follower = Follower(out, steps, save_every)
    arguments = ["--data", str(ROOT / "examples" / "data" / "digits.csv"), "--checkpoints", str(out / "checkpoints")]
    arguments += ["--steps", str(steps), "--save-every", str(save_every), "--batch", "32", "--seed", "7"]
    arguments += ["--log", str(follower.log), "--pace", str(pace_ms)]
    command = [str(TESSERA), "run", "--min-ranks", "3", "--max-restarts", "3", "--on-loss", "shrink"]
    command += ["--log-dir", str(out / "logs"), "--events", str(out / "events.jsonl")]
    for i, language in enumerate(LANGUAGES):
        command += ([":"] if i else []) + ["-n", "1", *digits(language, arguments)]

    with (out / "job.txt").open("wb") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while job.poll() is None:
                time.sleep(0.02)
                follower.look()
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(timeout=60)
    follower.look()
    follower.progress.end()
    training = follower.training
    if job.returncode != 0 or not training.kill or not training.resume:
        print((out / "job.txt").read_text(encoding="utf-8", errors="replace")[-4000:])
        missing = "" if job.returncode != 0 else "; it was over before a rank could be killed, or never resumed"
        raise SystemExit(
            f"the job ended with status {job.returncode}{missing}; see {out / 'job.txt'} and {out / 'logs'}"
        )
    return follower.result()
