"""The evaluation program of the document's part on one host: it reads what `train.py` saved, without "module.".

It computes the error and the precision-recall curve, alone, as in the document, or on several ranks, which share the
samples and find the same curve.

What differs from the document is in README.md beside this file. usage: eval.py TEST_FILE MODEL_PATH
"""

import json
import sys

import tessera
import torch
from sentences import Model, SentenceDataset
from tessera.torch.metrics import Metric


def main():
    test_file, model_path = sys.argv[1:]
    model = Model()
    model.load_state_dict(
        {k.replace("module.", ""): v for k, v in torch.load(model_path, map_location="cpu")["model"].items()},
        strict=True,
    )

    test_dataset = SentenceDataset(test_file)
    error, curve = Metric("mean_squared_error"), Metric("precision_recall_curve")
    with tessera.init() as comm:
        sampler = tessera.Sampler(comm, len(test_dataset), shuffle=False)
        with torch.no_grad():
            model.eval()
            while sampler.epoch == 0 and len(batch := sampler.batch(32)):
                words, labels = (torch.stack(column) for column in zip(*(test_dataset[i] for i in batch), strict=True))
                scores = model(words)
                error.update(scores, labels, valid=sampler.valid())
                curve.update(scores, labels.long(), valid=sampler.valid())
        measured = {"error": error.compute(comm)}
        curve.compute(comm)
        measured |= {name: curve.array(name).tolist() for name in ("precision", "recall", "thresholds")}
        if comm.rank == 0:
            print(json.dumps(measured))


if __name__ == "__main__":
    main()
