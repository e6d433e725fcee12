"""The third program of "Getting Started with Distributed Checkpoint (DCP)": a plain model, without a process group.

What differs from the document is in README.md beside this file.
"""

import tessera.torch.checkpoint as dcp
import torch.nn as nn

CHECKPOINT_DIR = "checkpoint"


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def run_checkpoint_load_example():
    # create the non FSDP-wrapped toy model
    model = ToyModel()
    state_dict = {
        "model": model.state_dict(),
    }

    # since no progress group is initialized, DCP will disable any collectives.
    dcp.load(
        state_dict=state_dict,
        checkpoint_id=CHECKPOINT_DIR,
    )
    model.load_state_dict(state_dict["model"])
    return model


if __name__ == "__main__":
    print("Running basic DCP checkpoint loading example.")
    run_checkpoint_load_example()
