package dev.tessera;

import java.util.Arrays;
import java.util.List;

/**
 * What a callback of a {@link Pipeline} computes with: one stage and one micro-batch.
 *
 * <p>The tensors of {@link #inputs}, {@link #targets}, {@link #outputs}, {@link #outputGrads} and {@link #output} last
 * until the micro-batch's backward or backwardWeight has returned; in an evaluation, until its forward has. Those of
 * {@link #inputGrads} last for this call. Afterwards they throw {@link IllegalStateException}. Their buffers cannot:
 * the memory is used again or freed, so get buffers again in each call and never keep them, or the JVM may crash.
 *
 * <p>Of a pipeline on a device they are there: use them at their {@link Tensor#address}, on the pipeline's stream. They have
 * no buffers.
 *
 * <p>Write only into {@link #inputGrads} and, during the forward, into {@link #output}. The other tensors are
 * read-only, because other stages may share them: their buffers are read-only, and operations, which write in place,
 * refuse them. An operation in the background over a tensor of this call must end before the callback returns.
 */
public final class StageCall {
    private final StageRelay relay;
    private final Thread thread = Thread.currentThread();
    private final int stage;
    private final int microbatch;
    private final int microbatches;
    private final boolean training;
    private final boolean lastBackward;
    private final double weight;
    final List<Tensor> inputs;
    final List<Tensor> targets;
    final List<Tensor> outputs;
    final List<Tensor> outputGrads;
    final List<Tensor> inputGrads;
    private boolean over;

    /** Reads the words that pipeline.cc writes. */
    StageCall(StageRelay relay, StageRelay.Words words) {
        this.relay = relay;
        stage = words.number(1);
        microbatch = words.number(2);
        microbatches = words.number(3);
        training = words.number(4) != 0;
        lastBackward = words.number(5) != 0;
        weight = Double.longBitsToDouble(words.word(6));
        inputs = words.tensors(7, false);
        targets = words.tensors(8, false);
        outputs = words.tensors(9, false);
        outputGrads = words.tensors(10, true);
        inputGrads = words.tensors(11, true);
    }

    /**
     * The stage that computes.
     *
     * @return one of this rank's stages
     */
    public int stage() {
        return stage;
    }

    /**
     * The micro-batch.
     *
     * @return 0 to microbatches - 1
     */
    public int microbatch() {
        return microbatch;
    }

    /**
     * The number of micro-batches in a step.
     *
     * @return at least 1
     */
    public int microbatches() {
        return microbatches;
    }

    /**
     * Whether a backward follows.
     *
     * @return true in {@link Pipeline#step}, false in {@link Pipeline#eval}
     */
    public boolean isTraining() {
        return training;
    }

    /**
     * Whether the gradients of this stage's weights are complete for this step after this call. With a {@link Ddp} or
     * {@link Fsdp} inside the stage, turn its synchronisation on in this call and leave it off before.
     *
     * @return true in one call per stage and step
     */
    public boolean isLastBackward() {
        return lastBackward;
    }

    /**
     * The factor of this micro-batch's loss, on the last stage. Scale the loss by it before its backward; never scale
     * gradients afterwards, so that they may add up over several steps.
     *
     * @return by default the micro-batch's share of the rows; 0 on other stages
     */
    public double weight() {
        return weight;
    }

    /**
     * The inputs. On stage 0, this micro-batch's rows of the batch: for a tensor of {@code [rows, ...]}, {@code [part
     * of the rows, ...]}. On other stages, what the previous stage sent, then what came along each edge that ends here,
     * in the order of the edges.
     *
     * @return read-only tensors; empty on stage 0 if the batch is
     */
    public List<Tensor> inputs() {
        return inputs;
    }

    /**
     * This micro-batch's rows of the targets, on the last stage.
     *
     * @return read-only tensors; empty on other stages
     */
    public List<Tensor> targets() {
        return targets;
    }

    /**
     * In a backward: what the forward made with {@link #output}.
     *
     * @return read-only tensors; empty in a forward
     */
    public List<Tensor> outputs() {
        return outputs;
    }

    /**
     * In a backward: the gradients of the outputs that went to the next stage, then of those that went along each edge
     * that begins here. Each has the shape and dtype of its output.
     *
     * @return read-only tensors; null for outputs that are not floating-point; empty in a forward and on the last stage
     */
    public List<Tensor> outputGrads() {
        return outputGrads;
    }

    /**
     * In a backward, other than backwardWeight: the gradients of the inputs, to be written. They are zero, and have the
     * shapes and dtypes of the inputs.
     *
     * @return writable tensors; null for inputs that are not floating-point; empty on stage 0
     */
    public List<Tensor> inputGrads() {
        return inputGrads;
    }

    /**
     * In a forward: memory for the next output of the stage. The first call makes output 0, the second output 1. Write
     * all of it; its content is undefined. Number, dtypes and shapes may differ from micro-batch to micro-batch.
     *
     * @param dtype the element type
     * @param shape sizes of the dimensions; none for a 0-d tensor
     * @return aligned to 4096 bytes; writable until the forward returns, then read-only
     * @throws TesseraInvalidArgumentException if it is larger than {@link Pipeline.Builder#maxMessageBytes}, or has a
     *     negative size or too many dimensions
     * @throws TesseraInvalidStateException in a backward
     * @throws IllegalStateException after this call, or on another thread
     */
    public Tensor output(DType dtype, long... shape) {
        requireInside();
        return relay.made(Native.pipelineOutput(relay.pipeline(), dtype.number(), shape));
    }

    /**
     * On the last stage: report the loss of the micro-batch, without its {@link #weight}. The last value counts. The
     * step returns it on every rank.
     *
     * @param loss any number
     * @throws TesseraInvalidStateException on other stages
     * @throws IllegalStateException after this call, or on another thread
     */
    public void loss(double loss) {
        requireInside();
        Native.pipelineLoss(relay.pipeline(), loss);
    }

    private void requireInside() {
        if (over) {
            throw new IllegalStateException("this call of " + where() + " has ended");
        }
        if (Thread.currentThread() != thread) {
            throw new IllegalStateException("this call of " + where() + " is on " + thread + "; use it on that thread");
        }
    }

    void end() {
        over = true;
    }

    String where() {
        return "stage " + stage + ", micro-batch " + microbatch;
    }

    /** The stage, the micro-batch and the shapes. */
    @Override
    public String toString() {
        return "StageCall(" + where() + ", inputs " + shapes(inputs) + ", outputs " + shapes(outputs) + ")";
    }

    private static String shapes(List<Tensor> tensors) {
        final StringBuilder text = new StringBuilder();
        tensors.forEach(tensor -> text.append(tensor.dtype()).append(Arrays.toString(tensor.shape())));
        return "[" + text + "]";
    }
}
