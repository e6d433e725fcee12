package dev.tessera;

import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.TreeMap;

/**
 * Pipeline-parallel training: the model is cut into stages, each rank has one or more of them, and a batch passes
 * through them in micro-batches. Your callbacks compute. The pipeline calls them in the order of a schedule, moves
 * activations and gradients between the stages, and keeps what a backward needs:
 *
 * <pre>{@code
 * try (Pipeline pipe = Pipeline.on(comm).stage(comm.rank(), this::forward, this::backward)
 *          .microbatches(8).schedule(Pipeline.Schedule.ONE_F_ONE_B).build()) {
 *     for (...) {
 *         double[] losses = pipe.step(batch, targets);    // the same on every rank
 *         optimizer.step();
 *     }
 * }
 *
 * void forward(StageCall call) {
 *     Tensor x = call.inputs().get(0);
 *     Tensor y = call.output(DType.F64, x.shape()[0], width);
 *     ...                                                 // write y; on the last stage call.loss(mean over rows)
 * }
 *
 * void backward(StageCall call) {
 *     ...                                                 // write call.inputGrads(), add to the weights' gradients
 * }
 * }</pre>
 *
 * <p>The gradients of parameters are your own, and add up over the micro-batches.
 *
 * <p>With {@link Builder#onDevice onDevice(true)} activations and gradients stay on the communicator's CUDA device:
 * callbacks put their work on one stream ({@link #setStream}), at the addresses of the tensors, and return. No call waits
 * for the device.
 *
 * <p>An exception of a callback fails the step on every rank; on the callback's rank it is the {@linkplain
 * Throwable#getCause() cause} of the exception that the step throws. The pipeline cannot be used after any failure:
 * later calls throw {@link TesseraAbortedException}. The communicator is unharmed.
 *
 * <p>All methods are exclusive: one thread at a time. In a callback they throw {@link IllegalStateException}, except
 * {@link #close}, which takes effect when the step ends. Closing the communicator closes the pipeline. The callbacks
 * stay reachable until the pipeline is closed, so the garbage collector does not free one that its callbacks refer to.
 */
public final class Pipeline extends NativeObject {
    private final Comm comm;
    private final StageRelay relay;
    private final Collection<Integer> stages;

    /**
     * The order in which a rank computes. P is the number of ranks, m the number of micro-batches. In a loop, stage i
     * is on rank i modulo P. In a V, each rank has two stages: rank r has r and 2P - 1 - r. A split backward needs the
     * callbacks backwardInput and backwardWeight. The ordinals are the library's numbers.
     */
    public enum Schedule {
        /** One stage per rank: all forwards, then all backwards. */
        GPIPE,
        /** One stage per rank, m at least P: fewer activations. */
        ONE_F_ONE_B,
        /** Loop: GPipe with several stages per rank. */
        LOOPED_BFS,
        /** Loop, m a multiple of max(1, m / P): shorter bubbles. */
        INTERLEAVED_1F1B,
        /** The same, with a split backward. */
        INTERLEAVED_ZERO_BUBBLE,
        /** One stage per rank, split backward: twice the activations of 1F1B. */
        ZB_H2,
        /** V, split backward: no bubble, the activations of 1F1B. */
        ZBV,
        /** V, m at least 2P, partly split backward. */
        DUALPIPEV
    }

    /** Computes one stage for one micro-batch, on the thread that called {@link #step} or {@link #eval}. */
    @FunctionalInterface
    public interface Callback {
        /**
         * Compute.
         *
         * @param call what to compute with; only until this method returns
         * @throws Exception any; it fails the step on every rank
         */
        void call(StageCall call) throws Exception;
    }

    /**
     * Settings of a pipeline, the same on every rank except its stages. Options that are not set have the library's
     * defaults; the number of micro-batches has none.
     */
    public static final class Builder extends PipelineOptionsFields<Builder> {
        private final Comm comm;
        private final Map<Integer, StageRelay.Stage> stages = new TreeMap<>();
        private final List<Integer> edges = new ArrayList<>();

        private Builder(Comm comm) {
            this.comm = Objects.requireNonNull(comm, "comm");
        }

        /**
         * Add a stage of this rank, for schedules that do not split the backward.
         *
         * @param stage its number; together the ranks name each stage once, where the schedule puts it
         * @param forward makes the outputs ({@link StageCall#output}), and on the last stage reports the loss
         * @param backward writes the gradients of the inputs ({@link StageCall#inputGrads}), and adds those of the
         *     weights to your own
         * @return this
         * @throws IllegalArgumentException if this rank has the stage already
         */
        public Builder stage(int stage, Callback forward, Callback backward) {
            return add(stage, new StageRelay.Stage(Objects.requireNonNull(forward, "forward"),
                    Objects.requireNonNull(backward, "backward"), null, null));
        }

        /**
         * Add a stage of this rank, for all schedules. A backward that is not split is backwardInput, then
         * backwardWeight.
         *
         * @param stage as in {@link #stage(int, Callback, Callback)}
         * @param forward as in {@link #stage(int, Callback, Callback)}
         * @param backwardInput writes the gradients of the inputs, for which the previous stage waits
         * @param backwardWeight called later: adds the gradients of the weights
         * @return this
         * @throws IllegalArgumentException if this rank has the stage already
         */
        public Builder stage(int stage, Callback forward, Callback backwardInput, Callback backwardWeight) {
            return add(stage, new StageRelay.Stage(Objects.requireNonNull(forward, "forward"), null,
                    Objects.requireNonNull(backwardInput, "backwardInput"),
                    Objects.requireNonNull(backwardWeight, "backwardWeight")));
        }

        /**
         * Add a stage of this rank, for all schedules, with a faster backward where it is not split.
         *
         * @param stage as in {@link #stage(int, Callback, Callback)}
         * @param forward as in {@link #stage(int, Callback, Callback)}
         * @param backward does the work of the next two in one call
         * @param backwardInput writes the gradients of the inputs, for which the previous stage waits
         * @param backwardWeight called later: adds the gradients of the weights
         * @return this
         * @throws IllegalArgumentException if this rank has the stage already
         */
        public Builder stage(int stage, Callback forward, Callback backward, Callback backwardInput,
                Callback backwardWeight) {
            return add(stage, new StageRelay.Stage(Objects.requireNonNull(forward, "forward"),
                    Objects.requireNonNull(backward, "backward"),
                    Objects.requireNonNull(backwardInput, "backwardInput"),
                    Objects.requireNonNull(backwardWeight, "backwardWeight")));
        }

        private Builder add(int stage, StageRelay.Stage callbacks) {
            if (stages.putIfAbsent(stage, callbacks) != null) {
                throw new IllegalArgumentException("stage " + stage + " was added twice");
            }
            return this;
        }

        /**
         * Connect two stages that do not follow each other. The output goes only along its edges; outputs without an
         * edge go to the next stage. Add an edge for each stage that takes the output, the next one included.
         *
         * @param fromStage the stage that makes it
         * @param output which of its outputs, from 0
         * @param toStage a later stage
         * @return this
         */
        public Builder edge(int fromStage, int output, int toStage) {
            edges.addAll(List.of(fromStage, output, toStage));
            return this;
        }

        /**
         * Join the stages of all ranks. Collective. The pipeline uses its own communicator, so collectives of the given
         * one may run meanwhile, in callbacks too.
         *
         * @return the pipeline
         * @throws TesseraInvalidArgumentException on every rank, if a stage is missing, named twice or on the wrong
         *     rank, if the schedule does not allow the number of micro-batches or needs a callback that a stage lacks,
         *     or if an edge is invalid
         * @throws TesseraMismatchException if the ranks' options differ; the message names the first difference
         * @throws TesseraException with {@link ErrorCode#UNSUPPORTED}, on every rank, if the pipeline is {@link #onDevice
         *     on a device} and the communicator has none
         */
        public Pipeline build() {
            final StageRelay relay = new StageRelay(stages);
            final boolean split = stages.values().stream().allMatch(StageRelay.Stage::isSplit);
            final long handle = comm.ref.callLongExclusive(
                    c -> Native.pipelineCreate(c, ints(stages.keySet()), relay, split, ints(edges), this));
            return new Pipeline(handle, comm, relay, List.copyOf(stages.keySet()));
        }
    }

    private Pipeline(long handle, Comm comm, StageRelay relay, Collection<Integer> stages) {
        super(new Ref("Pipeline", handle, Native::pipelineDestroy).dependOn(comm.ref));
        this.comm = comm;
        this.relay = relay;
        this.stages = stages;
    }

    /**
     * Start building a pipeline.
     *
     * @param comm the ranks, in exclusive use during {@link Builder#build}; must stay open
     * @return a builder with the library's defaults
     */
    public static Builder on(Comm comm) {
        return new Builder(comm);
    }

    /**
     * The number of micro-batches of a step, m.
     *
     * @return at least 1
     */
    public int microbatches() {
        return (int) ref.callLong(Native::pipelineMicrobatches);
    }

    /**
     * The number of stages of all ranks together.
     *
     * @return at least 1
     */
    public int stageCount() {
        return (int) ref.callLong(Native::pipelineStages);
    }

    /**
     * Train on one batch: forward and backward of all micro-batches. Collective. Batch and targets are cut along their
     * first dimension into m parts, like torch.tensor_split: m need not divide the rows.
     *
     * @param batch {@code [rows, ...]}, for the rank of stage 0; others ignore it; null for none, if the callbacks
     *     bring their own data. It may be on the pipeline's device, where it must stay until the stream has done what
     *     callbacks put there
     * @param targets {@code [rows, ...]}, for the rank of the last stage; likewise
     * @return the loss of each micro-batch, not scaled, as the last stage reported it, the same on every rank; NaN if
     *     it reported none
     * @throws TesseraInvalidArgumentException if there are fewer rows than micro-batches
     * @throws TesseraTimeoutException if a rank is late; the message names the stage that did not send
     * @throws TesseraAbortedException if another rank failed, or this pipeline did before
     * @throws TesseraInterruptedException if the thread was interrupted, which fails the step
     * @throws TesseraException with {@link ErrorCode#USER}, or the code of a Tessera or I/O exception, if a callback
     *     threw: its exception is the cause
     */
    public double[] step(Tensor batch, Tensor targets) {
        return step(optional(batch), optional(targets), null);
    }

    /**
     * Train on one batch of several tensors, like {@link #step(Tensor, Tensor)}.
     *
     * @param batch with the same number of rows; may be empty
     * @param targets with the same number of rows; may be empty
     * @return the losses
     */
    public double[] step(List<Tensor> batch, List<Tensor> targets) {
        return step(batch, targets, null);
    }

    /**
     * Train on one batch, like {@link #step(Tensor, Tensor)}, with weights.
     *
     * @param batch with the same number of rows; may be empty
     * @param targets with the same number of rows; may be empty
     * @param weights m factors of the micro-batches' losses ({@link StageCall#weight}), for the rank of the last stage;
     *     null: each micro-batch's share of the rows of the targets, or 1 / m without targets, so that a loss which is
     *     a mean over rows stays one
     * @return the losses, not scaled
     * @throws TesseraInvalidArgumentException on every rank, if the rank of the last stage does not have m weights
     */
    public double[] step(List<Tensor> batch, List<Tensor> targets, double[] weights) {
        return relay.run(ref, Native::pipelineStep, batch, targets, weights);
    }

    /**
     * Evaluate one batch: the forwards of a step, in the same order. Collective. Ranks that are ahead do not wait, so
     * up to m activations may be in memory in front of a slow stage.
     *
     * @param batch as in {@link #step(Tensor, Tensor)}
     * @param targets as in {@link #step(Tensor, Tensor)}
     * @return the losses, as in {@link #step(Tensor, Tensor)}, which also lists the errors
     */
    public double[] eval(Tensor batch, Tensor targets) {
        return eval(optional(batch), optional(targets), null);
    }

    /**
     * Evaluate one batch of several tensors, like {@link #eval(Tensor, Tensor)}.
     *
     * @param batch with the same number of rows; may be empty
     * @param targets with the same number of rows; may be empty
     * @return the losses
     */
    public double[] eval(List<Tensor> batch, List<Tensor> targets) {
        return eval(batch, targets, null);
    }

    /**
     * Evaluate one batch, like {@link #eval(Tensor, Tensor)}, with weights for {@link StageCall#weight}.
     *
     * @param batch with the same number of rows; may be empty
     * @param targets with the same number of rows; may be empty
     * @param weights as in {@link #step(List, List, double[])}
     * @return the losses, not scaled
     * @throws TesseraInvalidArgumentException on every rank, if the rank of the last stage does not have m weights
     */
    public double[] eval(List<Tensor> batch, List<Tensor> targets, double[] weights) {
        return relay.run(ref, Native::pipelineEval, batch, targets, weights);
    }

    /**
     * After a step: sum the gradient of a parameter that several stages share, such as an embedding that is also the
     * output layer. Collective over the ranks that have one of {@code tied}: each calls it once for each such
     * parameter, in the same order; no other rank does. A rank that has several of the stages has one gradient for
     * them. Any failure ends the pipeline, as one of a step does.
     *
     * @param gradient floating-point, the same dtype and number of elements on every rank; becomes the sum over these
     *     ranks, added in the order of the stages. One on a device is summed on the host: the call waits for the stream
     * @param tied stages in ascending order, the same on every rank
     * @throws TesseraInvalidArgumentException if a stage does not exist, or none is on this rank
     * @throws TesseraMismatchException if the ranks' gradients differ in dtype or number of elements
     */
    public void sumTied(Tensor gradient, int... tied) {
        Objects.requireNonNull(tied, "tied");
        final long[] descriptor = gradient.descriptor();
        ref.runExclusive(h -> Native.pipelineSumTied(h, descriptor, tied));
        java.lang.ref.Reference.reachabilityFence(gradient);
    }

    /**
     * Name the CUDA stream on which callbacks compute, for a pipeline that is {@link Builder#onDevice on a device}.
     *
     * @param stream address of a stream of the communicator's device ({@code cudaStream_t}), which must exist until another
     *     one is set; 0, as at first, is its default stream. A new one continues after what the previous one had
     * @throws TesseraInvalidArgumentException if it is of another device, or the pipeline is on the CPU
     */
    public void setStream(long stream) {
        ref.runExclusive(h -> Native.pipelineSetStream(h, stream));
    }

    /**
     * Statistics of the last step or evaluation on this rank.
     *
     * @return zeros and -1 before the first
     */
    public Stats stats() {
        return new Stats(ref.callExclusive(Native::pipelineStats));
    }

    /** Statistics of a step or evaluation on one rank. */
    public static final class Stats {
        private final long[] values;

        private Stats(long[] values) {
            this.values = values;
        }

        /**
         * How long it took.
         *
         * @return nanoseconds
         */
        public long wallNanos() {
            return values[0];
        }

        /**
         * The time in callbacks.
         *
         * @return nanoseconds
         */
        public long busyNanos() {
            return values[1];
        }

        /**
         * The time in which this rank waited for messages and, at the end, for the other ranks.
         *
         * @return nanoseconds
         */
        public long waitedNanos() {
            return values[2];
        }

        /**
         * Of that, the time for the stage whose messages this rank awaited longest.
         *
         * @return nanoseconds
         */
        public long longestNanos() {
            return values[3];
        }

        /**
         * The stage whose messages this rank awaited longest.
         *
         * @return its number; -1 if this rank awaited none
         */
        public int longestStage() {
            return (int) values[4];
        }

        /**
         * The rank of {@link #longestStage}.
         *
         * @return a rank; -1 if this rank awaited none
         */
        public int longestRank() {
            return (int) values[5];
        }

        /**
         * The most micro-batches of a stage that were between their forward and backward.
         *
         * @return a number of activations
         */
        public long peakActivations() {
            return values[6];
        }

        /**
         * The most memory of the library that tensors were in.
         *
         * @return bytes
         */
        public long peakBytes() {
            return values[7];
        }

        /** The times in milliseconds, and the peaks. */
        @Override
        public String toString() {
            return String.format(java.util.Locale.ROOT,
                    "wall %.3f ms, busy %.3f ms, waited %.3f ms, peak %d activations, %d bytes",
                    wallNanos() / 1e6, busyNanos() / 1e6, waitedNanos() / 1e6, peakActivations(), peakBytes());
        }
    }

    private static List<Tensor> optional(Tensor tensor) {
        return tensor == null ? List.of() : List.of(tensor);
    }

    private static int[] ints(Collection<Integer> numbers) {
        return numbers.stream().mapToInt(number -> number).toArray();
    }

    /**
     * Close the pipeline. Ranks that still wait for this one fail. In a callback, it takes effect when the step ends.
     */
    @Override
    public void close() {
        super.close();
    }

    /** The communicator and this rank's stages. */
    @Override
    public String toString() {
        return "Pipeline(" + comm + ", stages " + stages + ")";
    }
}
