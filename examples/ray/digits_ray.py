#!/usr/bin/env python3
"""Digits under Ray: Ray Data reads and distributes the rows, Ray's actors are the ranks, Tessera averages and saves.

    python digits_ray.py --workers 4 --epochs 10 --checkpoints /shared/digits

Run it again with more epochs, or on another number of workers: it resumes from the newest checkpoint.
"""

import argparse
import os

import numpy as np
import ray
import tessera as ts
import tessera.ray
from pyarrow.csv import ReadOptions

COLUMNS = [f"p{i}" for i in range(64)] + ["label"]


def network(seed):
    rng = np.random.default_rng(seed)
    shapes = {"fc1.weight": (64, 128), "fc1.bias": (128,), "fc2.weight": (128, 10), "fc2.bias": (10,)}
    return {name: rng.uniform(-0.1, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def of_batch(batch):
    pixels = np.stack([batch[name] for name in COLUMNS[:64]], axis=1)
    return (pixels / 16).astype(np.float32), np.asarray(batch["label"])


def forward(params, x):
    hidden = np.maximum(x @ params["fc1.weight"] + params["fc1.bias"], 0)
    logits = hidden @ params["fc2.weight"] + params["fc2.bias"]
    exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, exps / exps.sum(axis=1, keepdims=True)


def train(comm, training, held_out, root, epochs):
    """What each rank does. Returns the step count, the accuracy on the held-out rows and the host."""
    params = network(seed=7)
    ddp = ts.DDP(comm, params)
    optimizer = ts.AdamW(ddp, lr=0.003)
    state = ts.State(model=ddp, optim=optimizer)
    with ts.Saver(comm, root, keep_latest=2) as saver:
        begun = saver.resume(state)  # the step of a save is the number of epochs done
        for epoch in range(begun, epochs):
            loss = 0.0
            for batch in training[comm.rank].iter_batches(batch_size=25, batch_format="numpy"):
                x, labels = of_batch(batch)
                hidden, p = forward(params, x)
                rows = np.arange(len(labels))
                loss = float(-np.log(p[rows, labels] + 1e-9).mean())
                p[rows, labels] -= 1
                p /= len(labels)
                ddp.grads["fc2.weight"][:] = hidden.T @ p
                ddp.grads["fc2.bias"][:] = p.sum(axis=0)
                d_hidden = (p @ params["fc2.weight"].T) * (hidden > 0)
                ddp.grads["fc1.weight"][:] = x.T @ d_hidden
                ddp.grads["fc1.bias"][:] = d_hidden.sum(axis=0)
                ddp.ready_all()
                ddp.wait()
                optimizer.step()
            state.metric("loss", loss)
            saver.save_async(epoch + 1, state)
            if comm.rank == 0:
                print(f"epoch {epoch + 1}/{epochs} loss {loss:.4f}", flush=True)
        saver.wait()
    right = np.zeros(2, np.int64)  # of how many
    for batch in held_out[comm.rank].iter_batches(batch_size=64, batch_format="numpy"):
        x, labels = of_batch(batch)
        right += [(forward(params, x)[1].argmax(axis=1) == labels).sum(), len(labels)]
    comm.all_reduce(right)
    return begun, right[0] / right[1]


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.path.join(here, "..", "data", "digits.csv"))
    parser.add_argument("--checkpoints", default="checkpoints", help="a directory that all nodes share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    digits = ray.data.read_csv(options.data, read_options=ReadOptions(column_names=COLUMNS))
    held_out, training = digits.split_at_indices([297])
    shards = [part.streaming_split(options.workers, equal=True) for part in (training, held_out)]
    results = tessera.ray.run(
        train,
        options.workers,
        args=(*shards, os.path.abspath(options.checkpoints), options.epochs),
        resources_per_worker={"CPU": 1},
    )
    begun, accuracy = results[0]
    print(f"{options.workers} ranks, epochs {begun} to {options.epochs}: held-out accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
