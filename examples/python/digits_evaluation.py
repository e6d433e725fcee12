"""How well all ranks together recognise held-out digits, by the library's metrics."""

import numpy as np
import tessera as ts


def evaluate(comm, others, network, pixels, labels):
    """The accuracy, and all that the log tells. The digits are distributed over `others`, computed over `comm`."""
    data = ts.Sampler(others, length=len(labels), shuffle=False)
    share = data.batch(len(labels))
    logits, labels = network.logits(pixels[share], labels[share]), labels[share]

    confusion = ts.Metric("confusion_matrix", classes=10)
    roc = ts.Metric("roc_curve", task="multiclass", classes=10)  # a curve of each digit against the rest
    auroc = ts.Metric("auroc", task="multiclass", classes=10)
    if network.counts:  # of ranks that have the same digits, one counts them
        valid = data.valid()  # without what fills up the last step
        confusion.update(logits.argmax(axis=1), labels, valid=valid)
        roc.update(logits, labels, valid=valid)
        auroc.update(logits, labels, valid=valid)
    confusion.compute(comm)  # of all ranks' samples, and the same on every rank
    roc.compute(comm)
    area = auroc.compute(comm)

    matrix = confusion.array("matrix")
    accuracy = matrix.trace() / matrix.sum()
    facts = {"accuracy": round(float(accuracy), 6), "auroc": round(area, 6), "matrix": matrix.ravel().tolist()}
    for name in (f"{rate}.{digit}" for digit in range(10) for rate in ("fpr", "tpr")):
        facts[name] = np.round(roc.array(name), 6).tolist()
    return accuracy, facts
