"""The digits network as a pipeline: four stages with one parameter each, on four ranks or on two.

A rank of two has the weights or the biases. Further ranks are replicas of the pipeline with other samples ("dp"), or
share each stage's parameter ("tp").
"""

import numpy as np
import tessera as ts

STAGES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
MICROBATCHES = 4


class Pipelined:
    """Every rank has one stage or two, and computes them when the library calls back."""

    def __init__(self, comm, params, parallel, loss_of, opened):
        tp_ranks = 2 if "tp" in parallel else 1
        ranks = 4 if parallel == "pp" and comm.world_size % 4 == 0 else 2
        mesh = opened(ts.Mesh(comm, {"pp": ranks, "same": comm.world_size // ranks}))
        same = opened(ts.Mesh(mesh["same"], {"dp": comm.world_size // ranks // tp_ranks, "tp": tp_ranks}))
        self.data_ranks, self.loss_of, self.evaluated = same["dp"], loss_of, []

        stages = range(mesh.coordinate("pp"), len(STAGES), ranks)
        self.counts = len(STAGES) - 1 in stages and same.coordinate("tp") == 0  # has all samples' logits
        params = {STAGES[stage]: params[STAGES[stage]] for stage in stages}
        self.tp = None
        if tp_ranks > 1:
            self.tp = ts.TensorParallel(same, params, {"fc1": "column", "fc2": "row"}, dim="tp")
            params = self.tp.slices
        self.params = params
        self.model = ts.DDP(self.data_ranks, params, tp=self.tp)
        schedule = "1f1b" if ranks == len(STAGES) else "interleaved_1f1b"
        self.pipe = opened(
            ts.Pipeline(
                mesh["pp"], list(stages), self.forward, self.backward, microbatches=MICROBATCHES, schedule=schedule
            )
        )

    def forward(self, call):
        [x], param = call.inputs, self.params[STAGES[call.stage]]
        if call.stage == 0:
            return x @ param.T
        if call.stage == 1:
            return np.maximum(x + param, 0)
        if call.stage == 2:
            made = x @ param.T
            return self.tp.leave(made) if self.tp else made  # of slices: the sum of all ranks' parts
        logits, labels = x + param, call.targets[0]
        if not call.training:
            self.evaluated.append(logits)
            return None
        loss, d_logits = self.loss_of(logits, labels)
        return d_logits * np.float32(call.weight), loss  # the former for the backward

    def backward(self, call):
        name = STAGES[call.stage]
        grad = self.model.grads[name]
        d_made = call.outputs[0] if call.stage == 3 else call.output_grads[0]
        if call.stage == 1:
            d_made = d_made * (call.outputs[0] > 0)
        if name.endswith("bias"):
            grad += d_made.sum(axis=0)
            d_x = d_made
        else:
            grad += d_made.T @ call.inputs[0]
            d_x = d_made @ self.params[name]
        if call.is_last_backward:
            self.model.ready(name)  # averaged over the replicas, while other stages still compute
        return d_x

    def forward_backward(self, x, labels):
        """Returns the loss; the gradients are the average of all replicas then."""
        for grad in self.model.grads.values():
            grad[...] = 0
        losses = self.pipe.step(x, labels)
        self.model.wait()
        return mean(losses, len(labels))

    def logits(self, x, labels):
        """On the ranks of the last stage; None on others."""
        self.evaluated = []
        self.pipe.eval(x, labels)
        return np.concatenate(self.evaluated) if self.evaluated else None


def mean(values, rows):
    """Of values that are means over a micro-batch each."""
    sizes = [len(part) for part in np.array_split(range(rows), MICROBATCHES)]
    return float(np.average(values, weights=sizes))
