package dev.tessera;

import java.lang.ref.Reference;
import java.nio.DoubleBuffer;
import java.nio.LongBuffer;
import java.util.Objects;

/**
 * A metric of the samples of all ranks: exact, with the same bits on all ranks and for every number of ranks.
 * {@link #update(Tensor, Tensor)} adds this rank's samples and communicates nothing; {@link #compute(Comm)} is
 * collective. docs/METRICS.md lists the kinds, what each takes, and the options and arrays that it has.
 *
 * <pre>{@code
 * try (Metric auroc = Metric.of(Metric.Kind.AUROC).build()) {
 *     for (...) {
 *         auroc.update(scores, labels, null, sampler.valid());
 *     }
 *     double area = auroc.compute(comm);
 * }
 * }</pre>
 *
 * <p>Exclusive: one thread at a time.
 */
public final class Metric extends NativeObject {
    /** What a metric computes. The ordinals are the library's numbers. */
    public enum Kind {
        /** The mean of numbers, without targets. */
        MEAN,
        /** The sum of numbers, without targets. */
        SUM,
        /** The mean absolute error of numbers. */
        MEAN_ABSOLUTE_ERROR,
        /** The mean squared error of numbers. */
        MEAN_SQUARED_ERROR,
        /** The root of each output's mean squared error. */
        ROOT_MEAN_SQUARED_ERROR,
        /** The coefficient of determination. */
        R2_SCORE,
        /** The share of samples whose label, or all of whose labels, are right. */
        ACCURACY,
        /** The share of samples whose class is among the k with the largest scores. */
        TOP_K_ACCURACY,
        /** The mean recall of the classes that have samples. */
        BALANCED_ACCURACY,
        /** The array "matrix" of true classes and predicted classes. */
        CONFUSION_MATRIX,
        /** The share of predicted positives that are positive. */
        PRECISION,
        /** The share of positives that are predicted. */
        RECALL,
        /** The weighted harmonic mean of precision and recall. */
        F_BETA,
        /** The arrays "fpr", "tpr" and "thresholds". */
        ROC_CURVE,
        /** The arrays "precision", "recall" and "thresholds". */
        PRECISION_RECALL_CURVE,
        /** The sum of precision times steps of recall. */
        AVERAGE_PRECISION,
        /** The area under the ROC curve. */
        AUROC,
        /** The mean negative log-likelihood of labels. */
        LOG_LOSS,
        /** The exponential of the mean cross entropy of logits. */
        PERPLEXITY,
        /** The ROC curve at fixed thresholds. */
        BINNED_ROC_CURVE,
        /** The precision-recall curve at fixed thresholds. */
        BINNED_PRECISION_RECALL_CURVE,
        /** The average precision of the curve at fixed thresholds. */
        BINNED_AVERAGE_PRECISION,
        /** The area under the ROC curve at fixed thresholds. */
        BINNED_AUROC
    }

    /** What labels are. The ordinals are the library's numbers. */
    public enum Task {
        /** 0 or 1. */
        BINARY,
        /** One of several classes. */
        MULTICLASS,
        /** Several labels of 0 or 1. */
        MULTILABEL
    }

    /** How the values of classes, labels or outputs become one. The ordinals are the library's numbers. */
    public enum Average {
        /** Not: the array "values" has them. */
        NONE,
        /** The metric of all decisions together. */
        MICRO,
        /** The mean. */
        MACRO,
        /** Weighted by the samples of each class. */
        WEIGHTED,
        /** The mean of each sample's value. */
        SAMPLES
    }

    /** What the cells of a confusion matrix are divided by. The ordinals are the library's numbers. */
    public enum Normalize {
        /** Nothing. */
        NONE,
        /** The sum of the row. */
        TRUE,
        /** The sum of the column. */
        PREDICTIONS,
        /** The sum of all. */
        ALL
    }

    private final Kind kind;

    private Metric(long handle, Kind kind) {
        super(new Ref("Metric", handle, Native::metricDestroy));
        this.kind = kind;
    }

    /**
     * What it computes; also after the close.
     *
     * @return the kind that it was built with
     */
    public Kind kind() {
        return kind;
    }

    /**
     * Start building a metric.
     *
     * @param kind what it computes
     * @return a builder with the library's defaults
     */
    public static Builder of(Kind kind) {
        return new Builder(kind);
    }

    /** Settings of a metric, the same on every rank; options that are not set have the library's defaults. */
    public static final class Builder extends MetricOptionsFields<Builder> {
        private final Kind kind;

        private Builder(Kind kind) {
            this.kind = Objects.requireNonNull(kind, "kind");
        }

        /**
         * Create the metric.
         *
         * @return a metric without samples
         * @throws TesseraInvalidArgumentException if the kind does not have an option, or not this value
         */
        public Metric build() {
            return new Metric(Native.metricCreate(kind.ordinal(), this), kind);
        }
    }

    /**
     * Add this rank's samples.
     *
     * @param predictions on the CPU; of the samples, with the last dimension for classes, labels or outputs if there are
     *     several
     * @param targets of the same samples; null for means and sums
     * @throws TesseraInvalidArgumentException if shapes or types do not fit, a number is not finite or a label is out of
     *     range; the message has its index. The update has added nothing; unless one succeeds afterwards,
     *     {@link #compute} throws this on all ranks, once; until then a merge or save of the metric throws
     *     {@link TesseraInvalidStateException}
     */
    public void update(Tensor predictions, Tensor targets) {
        update(predictions, targets, null, null);
    }

    /**
     * Add this rank's samples, with weights or without some of them.
     *
     * @param predictions as for {@link #update(Tensor, Tensor)}
     * @param targets as for {@link #update(Tensor, Tensor)}
     * @param weights of the samples, 0 or more; null: each counts once
     * @param valid U8 or BOOL of the samples: those with 0 are left out ({@link Sampler#valid}); null: all count
     * @throws TesseraInvalidArgumentException as {@link #update(Tensor, Tensor)}
     */
    public void update(Tensor predictions, Tensor targets, Tensor weights, Tensor valid) {
        final long[] p = Objects.requireNonNull(predictions, "predictions").descriptor();
        final long[] t = descriptor(targets);
        final long[] w = descriptor(weights);
        final long[] v = descriptor(valid);
        ref.runExclusive(h -> Native.metricUpdate(h, p, t, w, v));
        Reference.reachabilityFence(new Tensor[] {predictions, targets, weights, valid});
    }

    private static long[] descriptor(Tensor tensor) {
        return tensor == null ? null : tensor.descriptor();
    }

    /**
     * The metric of all samples of all ranks. Collective; ranks without samples take part. The samples stay.
     *
     * @param comm the ranks that have the samples, each sample once: in a mesh, those of the data-parallel dimension
     * @return the metric; NaN if it is not defined, and for what has arrays instead
     * @throws TesseraMismatchException if the ranks compute different metrics
     */
    public double compute(Comm comm) {
        Objects.requireNonNull(comm, "comm");
        return ref.callExclusive(h -> comm.ref.callExclusive(c -> Native.metricCompute(h, c)));
    }

    /**
     * The metric of this object's samples alone.
     *
     * @return as {@link #compute(Comm)}
     */
    public double compute() {
        return ref.callExclusive(h -> Native.metricCompute(h, 0));
    }

    /**
     * An array that the last {@link #compute} found.
     *
     * @param name "fpr", "tpr", "precision", "recall", "thresholds" or "values"; "matrix" if it is weighted or normalized. The
     *     arrays of curves of several classes have the class after their name: "fpr.0"
     * @return a copy, in row-major order
     * @throws TesseraNotFoundException if the metric has no such array; the message lists those that it has
     * @throws IllegalArgumentException if the array has counts
     */
    public double[] array(String name) {
        final byte[] text = Native.utf8(name, "name");
        return ref.callExclusive(h -> {
            final Tensor tensor = result(h, text, name, DType.F64);
            final DoubleBuffer data = tensor.bytes().asDoubleBuffer();
            final double[] values = new double[data.remaining()];
            data.get(values);
            return values;
        });
    }

    /**
     * The counts of the last {@link #compute}: "matrix" of samples without weights.
     *
     * @param name "matrix"
     * @return a copy, in row-major order
     * @throws TesseraNotFoundException if the metric has no such array; the message lists those that it has
     * @throws IllegalArgumentException if the array has no counts
     */
    public long[] counts(String name) {
        final byte[] text = Native.utf8(name, "name");
        return ref.callExclusive(h -> {
            final Tensor tensor = result(h, text, name, DType.I64);
            final LongBuffer data = tensor.bytes().asLongBuffer();
            final long[] values = new long[data.remaining()];
            data.get(values);
            return values;
        });
    }

    private static Tensor result(long handle, byte[] text, String name, DType dtype) {
        final Tensor tensor = Tensor.overNative(Native.metricResult(handle, text), null);
        if (tensor.dtype() != dtype) {
            final boolean counts = tensor.dtype() == DType.I64;
            throw new IllegalArgumentException("the array \"" + name + "\" has " + (counts ? "counts" : "numbers")
                    + "; call " + (counts ? "counts" : "array") + "(\"" + name + "\")");
        }
        return tensor;
    }

    /**
     * Add the samples of another metric of the same kind and options, which keeps them.
     *
     * @param other not this one
     * @throws TesseraInvalidArgumentException if kind or options differ
     * @throws TesseraInvalidStateException if an update of {@code other} failed and no call has reported it
     */
    public void merge(Metric other) {
        Objects.requireNonNull(other, "other");
        ref.runExclusive(h -> {
            if (other == this) {
                Native.metricMerge(h, h);
            } else {
                other.ref.runExclusive(o -> Native.metricMerge(h, o));
            }
        });
    }

    /**
     * Move the samples of all ranks to rank 0, before a save. Collective.
     *
     * @param comm as for {@link #compute(Comm)}
     */
    public void gather(Comm comm) {
        Objects.requireNonNull(comm, "comm");
        ref.runExclusive(h -> comm.ref.runExclusive(c -> Native.metricGather(h, c)));
    }

    /** Forget all samples and results. */
    public void reset() {
        ref.runExclusive(Native::metricReset);
    }

    @Override
    public String toString() {
        return "Metric(" + kind + (isClosed() ? ", closed)" : ")");
    }
}
