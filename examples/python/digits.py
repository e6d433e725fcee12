#!/usr/bin/env python3
"""Digits: a 64-128-10 network learns handwritten digits on any number of ranks: data-parallel, fully sharded,
tensor-parallel, a pipeline, or several of these.

    python digits.py                            alone
    tessera run -n 4 python digits.py           four ranks
    tessera run -n 4 python digits.py --parallel fsdp       or tp, dp+tp, fsdp+tp, pp, dp+tp+pp
    tessera run -n 1 digits_c : -n 3 python digits.py

Forward and backward are plain NumPy; all that is distributed is `tessera`. examples/README.md says what the four
languages' versions agree on.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import time

import numpy as np
import tessera as ts
from digits_evaluation import evaluate
from digits_pipeline import Pipelined

MASK = (1 << 64) - 1


def read_digits(path):
    """The training set and the held-out set, each (pixels [n, 64], labels [n])."""
    try:
        rows = np.loadtxt(path, delimiter=",", dtype=np.int64, ndmin=2)
    except OSError as error:
        usage_error(f"cannot read {path} ({error}): start in the clone's root or name the file by --data")
    except ValueError as error:
        usage_error(f"{path} is not the digits: {error}")
    if rows.shape != (1797, 65) or not np.isin(rows[:, 64], range(10)).all():
        usage_error(f"{path} is not the digits: its rows are not 1797 of 64 pixels and a label")
    pixels, labels = (rows[:, :64] / 16).astype(np.float32), rows[:, 64]
    number = np.arange(len(rows))
    held_out = (number < 1782) & (number % 6 == 5)
    return (pixels[~held_out], labels[~held_out]), (pixels[held_out], labels[held_out])


def initial_values(seed):
    """The parameters before the first step, the same in every language: SplitMix64, uniform in ±1/sqrt(fan_in)."""
    state = seed & MASK
    params = {}
    for name, shape, fan_in in [
        ("fc1.weight", (128, 64), 64),
        ("fc1.bias", (128,), 64),
        ("fc2.weight", (10, 128), 128),
        ("fc2.bias", (10,), 128),
    ]:
        values = np.empty(np.prod(shape))
        for i in range(values.size):
            state = (state + 0x9E3779B97F4A7C15) & MASK
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
            draw = z ^ (z >> 31)
            values[i] = (2 * ((draw >> 40) / 2**24) - 1) / np.sqrt(fan_in)
        params[name] = values.astype(np.float32).reshape(shape)
    return params


def hidden_layer(params, x):
    return np.maximum(x @ params["fc1.weight"].T + params["fc1.bias"], 0)


def logits_of(params, hidden, tp):
    logits = hidden @ params["fc2.weight"].T
    if tp:  # of slices: the sum of all ranks' parts, to which the bias is added once
        return tp.leave(logits, bias=params["fc2.bias"])
    return logits + params["fc2.bias"]


def loss_of(logits, labels):
    """The mean cross-entropy and its gradient."""
    logits -= logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    loss = float((log_sum[:, 0] - logits[rows, labels]).mean())
    d_logits = np.exp(logits - log_sum)
    d_logits[rows, labels] -= 1
    return loss, d_logits / np.float32(len(labels))


def fc2_backward(params, grads, hidden, d_logits):
    np.matmul(d_logits.T, hidden, out=grads["fc2.weight"])
    np.sum(d_logits, axis=0, out=grads["fc2.bias"])
    return (d_logits @ params["fc2.weight"]) * (hidden > 0)


def fc1_backward(grads, x, d_hidden):
    np.matmul(d_hidden.T, x, out=grads["fc1.weight"])
    np.sum(d_hidden, axis=0, out=grads["fc1.bias"])


class DataParallel:
    """Every rank has all parameters, or all of its slices."""

    counts = True  # this rank its samples in an evaluation

    def __init__(self, comm, params, tp):
        self.params, self.tp = params, tp
        self.model = ts.DDP(comm, params, tp=tp)

    def forward_backward(self, x, labels):
        """Returns the loss; the gradients are the average of all ranks then."""
        hidden = hidden_layer(self.params, x)
        loss, d_logits = loss_of(logits_of(self.params, hidden, self.tp), labels)
        d_hidden = fc2_backward(self.params, self.model.grads, hidden, d_logits)
        self.model.ready("fc2.weight", "fc2.bias")  # reduced in the background while fc1's are computed
        fc1_backward(self.model.grads, x, d_hidden)
        self.model.ready("fc1.weight", "fc1.bias")
        self.model.wait()
        return loss

    def logits(self, x, labels):
        return logits_of(self.params, hidden_layer(self.params, x), self.tp)


class FullySharded:
    """Every rank has its rows; a layer is whole while it computes."""

    counts = True

    def __init__(self, comm, params, tp):
        layers = ("fc1", "fc2")
        units = {layer: {name: params[name] for name in params if name.startswith(layer)} for layer in layers}
        self.tp = tp
        self.model = ts.FSDP(comm, units, tp=tp)

    def forward_backward(self, x, labels):
        with self.model.forward("fc1") as params:
            hidden = hidden_layer(params, x)
        with self.model.forward("fc2") as params:
            loss, d_logits = loss_of(logits_of(params, hidden, self.tp), labels)
        with self.model.backward("fc2") as (params, grads):
            d_hidden = fc2_backward(params, grads, hidden, d_logits)
        with self.model.backward("fc1") as (_, grads):
            fc1_backward(grads, x, d_hidden)
        self.model.wait()
        return loss

    def logits(self, x, labels):
        with self.model.summon_full_params() as params:
            return logits_of(params, hidden_layer(params, x), self.tp)


PARALLEL = {"ddp": DataParallel, "fsdp": FullySharded}
PARALLEL |= {"tp": DataParallel, "dp+tp": DataParallel, "fsdp+tp": FullySharded}
PARALLEL |= {"pp": Pipelined, "dp+tp+pp": Pipelined}
MULTIPLE_OF = {"dp+tp": 2, "fsdp+tp": 2, "pp": 2, "dp+tp+pp": 4}  # the number of ranks


def mesh_of(comm, parallel):
    """Of groups that share a model ("tp"); ranks with the same slices have other samples ("dp")."""
    ranks = comm.world_size if parallel == "tp" else 2
    return ts.Mesh(comm, {"dp": comm.world_size // ranks, "tp": ranks})


def network_of(comm, params, parallel, opened):
    """The network, and the ranks that have other samples. `opened` closes things in the end."""
    multiple = MULTIPLE_OF.get(parallel, 1)
    if comm.world_size % multiple:
        numbers = "an even number of" if multiple == 2 else f"a multiple of {multiple}"
        usage_error(f"--parallel {parallel} needs {numbers} ranks, not {comm.world_size}")
    if "pp" in parallel:
        network = Pipelined(comm, params, parallel, loss_of, opened)
        return network, network.data_ranks
    if "tp" not in parallel:
        return PARALLEL[parallel](comm, params, None), comm
    mesh = opened(mesh_of(comm, parallel))
    tp = ts.TensorParallel(mesh, params, {"fc1": "column", "fc2": "row"}, dim="tp")
    network = PARALLEL[parallel](mesh["dp"], tp.slices, tp)
    network.counts = mesh.coordinate("tp") == 0  # the ranks of "tp" have the same samples
    return network, mesh["dp"]


def show_bar(phase, done, total):
    """A bar on standard error: how far a save or a load is. Saves in the background call it on another thread."""
    what = {ts.Phase.WRITE: "saving", ts.Phase.READ: "loading"}.get(phase)
    if what and total:
        end = "\n" if done == total else ""
        print(f"\r{what} [{'#' * (20 * done // total):20}]", end=end, file=sys.stderr, flush=True)


def train(options, training, held_out):
    with ts.init() as comm, contextlib.ExitStack() as stack:
        first = comm.rank == 0
        values = initial_values(options.seed)
        network, others = network_of(comm, values, options.parallel, stack.enter_context)
        opt = ts.AdamW(network.model, lr=0.003)
        data = ts.Sampler(others, length=len(training[0]), seed=options.seed)
        progress = show_bar if options.progress and first else None
        saver = ts.Saver(comm, options.checkpoints, keep_latest=3, format=options.format, progress=progress)
        state = ts.State(model=network.model, optim=opt, data=data)
        if "pp" in options.parallel:
            state.join(comm)  # each rank has some of the parameters

        step = saver.resume(state)  # 0 when there is nothing yet
        if first:
            where = f"resumed after step {step}" if step else "from the beginning"
            print(f"digits: {comm.world_size} ranks, {where}", flush=True)
            if step >= options.steps:
                print(f"digits: nothing left to do: --steps is {options.steps}", flush=True)
        stop = False
        while step < options.steps and not stop:
            batch = data.batch(options.batch)
            loss = network.forward_backward(training[0][batch], training[1][batch])
            opt.step()
            step += 1
            if step % 10 == 0 or step == options.steps:
                log(options, comm, step=step, loss=round(loss, 6))
                if first:
                    print(f"step {step}/{options.steps} loss {loss:.4f}", flush=True)
            stop = saver.should_stop(step)  # the same answer on all ranks
            if stop or (options.save_every and step % options.save_every == 0):
                saver.save_async(step, state, metrics={"loss": loss})
            time.sleep(options.pace / 1000)

        saver.wait()
        if stop:
            if first:
                print(f"digits: stopped after step {step}", flush=True)
            return
        accuracy, facts = evaluate(comm, others, network, *held_out)
        log(options, comm, step=step, **facts)
        if first:
            print(f"held-out accuracy {accuracy:.4f}", flush=True)


def log(options, comm, **facts):
    """Append one JSON line with one write, since ranks may share the file."""
    if options.log:
        line = {"time": round(time.time(), 3), "rank": comm.rank, "world": comm.world_size, **facts, "lang": "python"}
        file = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, (json.dumps(line, separators=(",", ":")) + "\n").encode())
        os.close(file)


def number(least):
    """The type of an argument: an integer that is not below `least`."""

    def parse(text):
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f'cannot be "{text}": a number from {least} to 999999999')
        return int(text)

    return parse


def parallel(text):
    if text not in PARALLEL:
        raise argparse.ArgumentTypeError(f'cannot be "{text}": ddp, fsdp, tp, dp+tp, fsdp+tp, pp or dp+tp+pp')
    return text


def usage_error(message):
    message = re.sub(r"^argument (--[a-z-]+):", r"\1", message)  # as the other languages' versions say it
    print(f"digits: {message}; see examples/README.md", file=sys.stderr)
    sys.exit(2)


def parse_options():
    parser = argparse.ArgumentParser(description="Train the digits network.", allow_abbrev=False)
    parser.error = usage_error
    parser.add_argument("--data", default="examples/data/digits.csv")
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--steps", type=number(1), default=600)
    parser.add_argument("--save-every", type=number(0), default=50)
    parser.add_argument("--batch", type=number(1), default=32)
    parser.add_argument("--seed", type=number(0), default=7)
    parser.add_argument("--log")
    parser.add_argument("--format", default="tessera")
    parser.add_argument("--parallel", type=parallel, default="ddp")
    parser.add_argument("--pace", type=number(0), default=0)
    parser.add_argument("--progress", type=number(0), default=0)
    return parser.parse_args()


@ts.record
def main():
    options = parse_options()
    train(options, *read_digits(options.data))


if __name__ == "__main__":
    try:
        main()
    except ts.TesseraError as error:
        print(f"digits: {error}", file=sys.stderr)
        sys.exit(1)
