"""Metrics, compared with scikit-learn's on all samples; and what they refuse."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera as ts
from sklearn import metrics as sk

SEEDS = range(3)
CLOSE = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}


@pytest.fixture(autouse=True)
def _quiet():
    """scikit-learn warns of what is not defined; here it is NaN or 0 without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def computed(metric: ts.Metric, *arrays: np.ndarray, **more: Any) -> ts.Metric:
    """After updates of a third of the samples and of the rest."""
    third = len(arrays[0]) // 3
    for part in (slice(0, third), slice(third, None)):
        metric.update(*(a[part] for a in arrays), **{name: a[part] for name, a in more.items() if a is not None})
    return metric


def number(metric: ts.Metric, *arrays: np.ndarray, **more: Any) -> float:
    return computed(metric, *arrays, **more).compute()


def weights_of(random: np.random.Generator, n: int) -> list[np.ndarray | None]:
    return [None, random.integers(0, 8, n) / 4.0, random.random(n)]


def scores_of(random: np.random.Generator, shape: Any) -> list[np.ndarray]:
    scores = random.random(shape)
    return [scores, scores.round(1), scores.astype(np.float32)]


@pytest.mark.parametrize("seed", SEEDS)
def test_binary_curves(seed: int):
    random = np.random.default_rng(seed)
    n = 300
    y = random.integers(0, 2, n)
    for w in weights_of(random, n):
        for s in scores_of(random, n):
            auroc = number(ts.Metric("auroc"), s, y, weights=w)
            np.testing.assert_allclose(auroc, sk.roc_auc_score(y, s, sample_weight=w), **CLOSE)
            for most in (0.1, 0.5):
                partial = number(ts.Metric("auroc", max_fpr=most), s, y, weights=w)
                np.testing.assert_allclose(partial, sk.roc_auc_score(y, s, sample_weight=w, max_fpr=most), **CLOSE)
            ap = number(ts.Metric("average_precision"), s, y, weights=w)
            np.testing.assert_allclose(ap, sk.average_precision_score(y, s, sample_weight=w), **CLOSE)
            pr = ts.Metric("precision_recall_curve")
            assert math.isnan(number(pr, s, y, weights=w))
            for name, expected in zip(
                ("precision", "recall", "thresholds"), sk.precision_recall_curve(y, s, sample_weight=w), strict=True
            ):
                np.testing.assert_allclose(pr.array(name), expected, **CLOSE)
            # Rounding decides which points are on a line if weights are not sums of a few powers of two.
            dropped = w is None or bool((w * 4 == (w * 4).round()).all())
            roc = ts.Metric("roc_curve", all_points=not dropped)
            number(roc, s, y, weights=w)
            for name, expected in zip(
                ("fpr", "tpr", "thresholds"),
                sk.roc_curve(y, s, sample_weight=w, drop_intermediate=dropped),
                strict=True,
            ):
                np.testing.assert_allclose(roc.array(name), expected, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_curves_of_classes_and_labels(seed: int):
    random = np.random.default_rng(seed)
    n, classes = 200, 4
    y = random.integers(0, classes, n)
    raw = random.random((n, classes)).round(1) + 0.1
    p = raw / raw.sum(axis=1, keepdims=True)
    many = random.integers(0, 2, (n, classes))
    more: dict[str, Any] = {"classes": classes}
    for w in weights_of(random, n):
        for average in ("macro", "weighted", "micro"):
            options = {**more, "task": "multiclass", "average": average}
            expected = sk.roc_auc_score(y, p, multi_class="ovr", average=average, sample_weight=w)
            np.testing.assert_allclose(number(ts.Metric("auroc", **options), p, y, weights=w), expected, **CLOSE)
            expected = sk.average_precision_score(y, p, average=average, sample_weight=w)
            np.testing.assert_allclose(
                number(ts.Metric("average_precision", **options), p, y, weights=w), expected, **CLOSE
            )
            options["task"] = "multilabel"
            expected = sk.roc_auc_score(many, p, average=average, sample_weight=w)
            np.testing.assert_allclose(number(ts.Metric("auroc", **options), p, many, weights=w), expected, **CLOSE)
    for average in ("macro", "weighted"):
        pairs = ts.Metric("auroc", task="multiclass", classes=classes, average=average, one_vs_one=True)
        expected = sk.roc_auc_score(y, p, multi_class="ovo", average=average)
        np.testing.assert_allclose(number(pairs, p, y), expected, **CLOSE)
    each = ts.Metric("auroc", task="multilabel", classes=classes, average="none")
    assert math.isnan(number(each, p, many))
    np.testing.assert_allclose(each.array("values"), sk.roc_auc_score(many, p, average=None), **CLOSE)
    curves = computed(ts.Metric("roc_curve", task="multiclass", classes=classes), p, y)
    curves.compute()
    np.testing.assert_allclose(curves.array("tpr.2"), sk.roc_curve(y == 2, p[:, 2])[1], **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_labels(seed: int):
    random = np.random.default_rng(seed)
    n, classes = 200, 5
    y, g = random.integers(0, classes - 1, n), random.integers(0, classes, n)
    every = list(range(classes))
    for w in weights_of(random, n):
        task: dict[str, Any] = {"task": "multiclass", "classes": classes}
        np.testing.assert_allclose(
            number(ts.Metric("accuracy", **task), g, y, weights=w), sk.accuracy_score(y, g, sample_weight=w), **CLOSE
        )
        for adjusted in (False, True):
            expected = sk.balanced_accuracy_score(y, g, sample_weight=w, adjusted=adjusted)
            found = number(ts.Metric("balanced_accuracy", classes=classes, adjusted=adjusted), g, y, weights=w)
            np.testing.assert_allclose(found, expected, **CLOSE)
        for normalize, theirs in (("none", None), ("true", "true"), ("predictions", "pred"), ("all", "all")):
            matrix = computed(ts.Metric("confusion_matrix", classes=classes, normalize=normalize), g, y, weights=w)
            matrix.compute()
            expected = sk.confusion_matrix(y, g, labels=every, sample_weight=w, normalize=theirs)
            assert matrix.array("matrix").dtype == (np.int64 if w is None and theirs is None else np.float64)
            np.testing.assert_allclose(matrix.array("matrix"), expected, **CLOSE)
        for average in ("micro", "macro", "weighted", "none"):
            for zero in (0.0, 1.0, math.nan):
                check_ratios(g, y, w, {**task, "average": average, "zero_division": zero}, labels=every)


def check_ratios(g: np.ndarray, y: np.ndarray, w: Any, options: dict[str, Any], **theirs: Any) -> None:
    theirs |= {"sample_weight": w, "zero_division": options.get("zero_division", 0.0)}
    average = options.get("average", "binary")
    theirs["average"] = None if average == "none" else average
    found: dict[str, Callable[..., Any]] = {
        "precision": sk.precision_score,
        "recall": sk.recall_score,
        "f_beta": lambda *a, **k: sk.fbeta_score(*a, beta=0.5, **k),
    }
    for kind, reference in found.items():
        metric = ts.Metric(kind, **options, **({"beta": 0.5} if kind == "f_beta" else {}))  # type: ignore[arg-type]
        value = number(metric, g, y, weights=w)
        np.testing.assert_allclose(
            metric.array("values") if average == "none" else value, reference(y, g, **theirs), **CLOSE
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_ratios_of_one_class_and_of_labels(seed: int):
    random = np.random.default_rng(seed)
    n = 60
    y, g = random.integers(0, 2, n), random.integers(0, 2, n)
    many, guess = random.integers(0, 2, (n, 3)), random.integers(0, 2, (n, 3))
    many[:5] = guess[3:8] = 0
    for w in weights_of(random, n):
        check_ratios(g, y, w, {})
        for average in ("samples", "micro", "macro", "weighted", "none"):
            for zero in (0.0, 1.0, math.nan):
                options = {"task": "multilabel", "classes": 3, "average": average, "zero_division": zero}
                check_ratios(guess, many, w, options)
        metric = ts.Metric("accuracy", task="multilabel", classes=3)
        np.testing.assert_allclose(
            number(metric, guess, many, weights=w), sk.accuracy_score(many, guess, sample_weight=w), **CLOSE
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_scores_of_classes(seed: int):
    random = np.random.default_rng(seed)
    n, classes = 150, 6
    y = random.integers(0, classes, n)
    s = random.random((n, classes)).round(1)
    logits = random.normal(0, 3, (n, classes))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for w in weights_of(random, n):
        for k in (1, 2, 5):
            expected = sk.top_k_accuracy_score(y, s, k=k, labels=range(classes), sample_weight=w)
            found = number(ts.Metric("top_k_accuracy", classes=classes, top_k=k), s, y, weights=w)
            np.testing.assert_allclose(found, expected, **CLOSE)
        expected = sk.log_loss(y, p, labels=range(classes), sample_weight=w)
        for logit, scores in ((False, p), (True, logits)):
            metric = ts.Metric("log_loss", task="multiclass", classes=classes, from_logits=logit)
            np.testing.assert_allclose(number(metric, scores, y, weights=w), expected, **CLOSE)
        binary = ts.Metric("log_loss")
        expected = sk.log_loss(y == 1, p[:, 1], sample_weight=w)
        np.testing.assert_allclose(number(binary, np.ascontiguousarray(p[:, 1]), y == 1, weights=w), expected, **CLOSE)
    perplexity = number(ts.Metric("perplexity", classes=classes), logits, y)
    np.testing.assert_allclose(perplexity, np.exp(sk.log_loss(y, p, labels=range(classes))), **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_regression(seed: int):
    random = np.random.default_rng(seed)
    n = 200
    y = random.normal(100, 5, (n, 3))
    g = y + random.normal(0, 1, (n, 3))
    for w in weights_of(random, n):
        if w is None or (w * 4 == (w * 4).round()).all():
            y[:, 2] = 7.0  # scikit-learn's mean of such targets is exact only with such weights
        else:
            y[:, 2] = random.normal(0, 1, n)
        for average, theirs in (("macro", "uniform_average"), ("none", "raw_values")):
            for kind, reference in (
                ("mean_absolute_error", sk.mean_absolute_error),
                ("mean_squared_error", sk.mean_squared_error),
                ("root_mean_squared_error", sk.root_mean_squared_error),
                ("r2_score", sk.r2_score),
            ):
                metric = ts.Metric(kind, outputs=3, average=average)  # type: ignore[arg-type]
                value = number(metric, g, y, weights=w)
                expected = reference(y, g, sample_weight=w, multioutput=theirs)
                np.testing.assert_allclose(metric.array("values") if average == "none" else value, expected, **CLOSE)
        weighted = number(ts.Metric("r2_score", outputs=3, average="weighted"), g, y, weights=w)
        expected = sk.r2_score(y, g, sample_weight=w, multioutput="variance_weighted")
        np.testing.assert_allclose(weighted, expected, **CLOSE)
        first = np.ascontiguousarray(g[:, 0])
        np.testing.assert_allclose(number(ts.Metric("mean"), first, weights=w), np.average(first, weights=w), **CLOSE)
    assert number(ts.Metric("sum"), np.array([1e16, 1.0, 1.0, -1e16])) == 2


def test_binned_curves_are_exact_at_their_thresholds():
    random = np.random.default_rng(7)
    y, s = random.integers(0, 2, 500), random.random(500)
    roc = computed(ts.Metric("binned_roc_curve", thresholds=11), s, y)
    roc.compute()
    at = np.arange(10, -1, -1) / 10
    assert roc.array("thresholds").tolist() == [math.inf, *at]
    np.testing.assert_allclose(roc.array("tpr")[1:], [(s[y == 1] >= t).mean() for t in at], **CLOSE)
    pr = computed(ts.Metric("binned_precision_recall_curve", thresholds=11), s, y)
    pr.compute()
    assert pr.array("thresholds").tolist() == at[::-1].tolist()
    fine = number(ts.Metric("binned_auroc", thresholds=10001), s, y)
    assert fine == pytest.approx(sk.roc_auc_score(y, s), abs=1e-3)
    fine = number(ts.Metric("binned_average_precision", thresholds=10001), s, y)
    assert fine == pytest.approx(sk.average_precision_score(y, s), abs=1e-2)


def test_ranks_have_the_bits_of_one(ranks, tmp_path: Path):
    random = np.random.default_rng(3)
    y, s, w = random.integers(0, 2, 101), random.random(101).astype(np.float32), random.random(101)
    expected = number(ts.Metric("average_precision"), s, y, weights=w)

    def job(comm: ts.Comm):
        sampler = ts.Sampler(comm, 101, seed=comm.world_size)
        assert sampler.valid().tolist() == []
        metric, second = ts.Metric("average_precision"), ts.Metric("average_precision")
        while sampler.epoch == 0:
            batch = sampler.batch(7)
            to = metric if sampler.position % 2 else second
            to.update(s[batch], y[batch], weights=w[batch], valid=sampler.valid())
        metric.merge(second)
        assert metric.compute(comm) == expected
        metric.gather(comm)
        assert metric.compute(comm) == expected
        saver = ts.Saver(comm, tmp_path / str(comm.world_size))
        saver.save(1, ts.State(ap=ts.MetricPart(comm, metric)))

    def load(comm: ts.Comm):
        metric = ts.Metric("average_precision")
        ts.Checkpoint(tmp_path / "2").load(ts.State(ap=ts.MetricPart(comm, metric)))
        assert metric.compute(comm) == expected
        metric.reset()
        assert math.isnan(metric.compute(comm))

    ranks(2, job)
    ranks(5, job)
    ranks(3, load)


def test_bad_input_is_refused_and_named():
    for wrong, close in (("auc", "auroc"), ("AUROC", "auroc"), ("f1", "f_beta"), ("MSE", "mean_squared_error")):
        with pytest.raises(ts.InvalidArgument, match=rf"there is no metric '{wrong}'.* the closest: {close}"):
            ts.Metric(wrong)  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgument, match="average is None; pass 'none' for the values of each class"):
        ts.Metric("recall", task="multiclass", classes=3, average=None)
    with pytest.raises(ts.InvalidArgument, match="top_k is 5, but there are only 3 classes"):
        ts.Metric("top_k_accuracy", classes=3, top_k=5)
    with pytest.raises(ts.InvalidArgument, match="since classes is 2: set classes to 7"):
        ts.Metric("perplexity").update(np.zeros((4, 7)), np.zeros(4, np.int64))
    with pytest.raises(ts.InvalidArgument, match="auroc has no option beta"):
        ts.Metric("auroc", beta=2.0)
    with pytest.raises(ts.InvalidArgument, match="task is 'unary'"):
        ts.Metric("auroc", task="unary")  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgument, match="the task is multilabel; set it to multiclass, or leave it out"):
        ts.Metric("confusion_matrix", task="multilabel", classes=3)
    with pytest.raises(ts.InvalidArgument, match="the metric mean takes no targets"):
        ts.Metric("mean").update([1.0], [1.0])
    with pytest.raises(TypeError, match="predictions is None; it must be an array or a list"):
        ts.Metric("mean").update(None)  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgument, match="more than the limit"):
        ts.Metric("confusion_matrix", classes=100_000)
    metric = ts.Metric("auroc")
    good = np.array([0.1, 0.9]), np.array([0, 1])
    metric.update(*good)
    for scores, labels, what in (
        (np.array([0.5, np.nan]), good[1], r"predictions\[1\] is nan"),
        (good[0], np.array([0, 2]), r"targets\[1\] is 2; labels must be 0 to 1"),
        (good[0], np.array([0]), "2 and 1 samples"),
        (good[0], np.array([0.0, 1.0]), "targets are f64; labels must be"),
        (np.array([1, 2], np.complex64), good[1], "predictions are c64"),
    ):
        with pytest.raises(ts.InvalidArgument, match=what):
            metric.update(scores, labels)
    with pytest.raises(ts.InvalidArgument, match="predictions are c64"):
        metric.compute()  # an update failed
    assert metric.compute() == 1
    with pytest.raises(ts.NotFound, match="no arrays"):
        metric.array("fpr")
    with pytest.raises(TypeError, match="comm is a int"):
        metric.compute(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="comm is a Metric"):
        ts.MetricPart(metric, metric)  # type: ignore[arg-type]
    assert repr(metric) == "<tessera.Metric auroc>"
    assert metric.kind == "auroc"
    metric.close()
    with pytest.raises(ts.InvalidState, match="closed"):
        metric.compute()


def test_lists_and_columns_are_copied():
    table = np.array([[0.1, 0.0], [0.4, 0.0], [0.35, 1.0], [0.8, 1.0]])
    scores, labels, valid = table[:, 0], table[:, 1].astype(np.int64), [True, True, True, True]
    expected = 0.75
    for given in (
        (scores, np.repeat(labels, 2)[::2]),
        (scores.tolist(), labels.tolist()),
        (memoryview(table[:, 0]), tuple(labels.tolist())),
    ):
        metric = ts.Metric("auroc")
        metric.update(*given, valid=valid)
        assert metric.compute() == expected
    for masked in ([1, 1, 0, 0], [True, True, False, False], (1, True, 0, False), [1.0, 1.0, 0.0, 0.0]):
        mean = ts.Metric("mean")
        mean.update([1, 3, 100, 100], valid=masked)
        assert mean.compute() == 2
    with pytest.raises(ts.InvalidArgument, match="valid is i64; it must be u8 or bool"):
        mean.update([1, 3], valid=[0, 2])
    mean.update([], valid=[])
    assert mean.compute() == 2
    matrix = ts.Metric("confusion_matrix", task="multiclass", classes=3)
    matrix.update([0, 2, 2], [0, 1, 2])
    matrix.compute()
    assert matrix.array("matrix").trace() == 2
    top = ts.Metric("top_k_accuracy", classes=3, top_k=1)
    top.update([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]], [1, 1], weights=[1, 3])
    assert top.compute() == 0.25
    top.update(np.asfortranarray([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]), [1, 0])
    with pytest.raises(ts.InvalidArgument, match="the predictions are no array"):
        top.update([[0.1, 0.7, 0.2], [0.5]], [1, 1])


def test_a_failed_update_is_not_lost(tmp_path: Path, alone: ts.Comm):
    metric, other = ts.Metric("auroc"), ts.Metric("auroc")
    with pytest.raises(ts.InvalidArgument):
        metric.update([np.nan], [1])
    with pytest.raises(
        ts.InvalidState, match=r"cannot be merged: an update of it has failed \(predictions\[0\] is nan"
    ):
        other.merge(metric)
    with ts.Saver(alone, tmp_path) as saver:
        state = ts.State(auroc=ts.MetricPart(alone, metric))
        with pytest.raises(ts.InvalidState, match="cannot be saved"):
            saver.save(1, state)
        metric.reset()
        saver.save(1, state)


def test_a_failed_update_is_an_error_on_every_rank(ranks):
    def job(comm: ts.Comm):
        metric = ts.Metric("auroc")
        if comm.rank == 1:
            with pytest.raises(ts.InvalidArgument):
                metric.update(np.array([np.nan]), np.array([1]))
        else:
            metric.update(np.array([0.1, 0.9]), np.array([0, 1]))
        with pytest.raises(ts.InvalidArgument, match=r"rank 1: predictions\[0\] is nan"):
            metric.compute(comm)
        assert metric.compute(comm) == 1

    ranks(3, job)
