package dev.tessera;

import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Objects;

/**
 * The native methods that are not generated: those with callbacks, several results or checks. The conventions are those
 * of {@link PlainNatives}, which loads the library.
 */
final class Native extends PlainNatives {
    static {
        Launch.recordUncaughtOfMain();
    }

    private Native() {}

    // version.cc
    static native int headerAbiVersion();
    static native int lastErrorCode();
    static native long[] headerNumbers();

    // log.cc
    static native void logSetHandler(Object handler);

    // store.cc
    static native byte[] storeGet(long store, byte[] key);

    // work.cc
    static native void workOnDone(long work, Object completion);
    static native boolean workWait(long work, int timeoutMs);

    // memory.cc
    static native long[] bufferData(long buffer);
    static native long directAddress(Object buffer);
    static native Object directBuffer(long address, long size);

    // mesh.cc
    static native long meshCreate(long comm, byte[][] names, int[] sizes);
    static native long meshDim(long mesh, byte[] name);
    static native long meshSlice(long mesh, byte[][] names);

    // layout.cc
    static native long layoutCreate(long[] shape, int[] meshSizes, int[] placements);
    static native long layoutFromBoxes(long[] shape, long[] boxes, int[] counts);
    static native long layoutGather(long comm, long[] shape, long[] boxes, int count);
    static native long[] layoutBox(long layout, int rank, int index);

    // ddp.cc
    static native byte[] ddpParamName(long ddp, int index);
    static native long[] ddpSharedParam(long ddp, int index);
    static native long[] ddpStats(long ddp, int bucket);
    static native void ddpSetHook(long ddp, Object relay);

    // fsdp.cc
    static native long fsdpCreate(
            long comm, byte[][] unitNames, Object settings, int[] counts, byte[][] names, long[] tensors, int[] trained,
            Object options);
    static native byte[] fsdpParamName(long fsdp, int index);
    static native long[] fsdpParam(long fsdp, int index);
    static native long[] fsdpShard(long fsdp, int index);

    // engine.cc
    static native long engineCreate(
            long comm, byte[][] unitNames, int[] counts, byte[][] names, long[] tensors, byte[] config, long schedule);
    static native byte[] engineParamName(long engine, long index);
    static native long[] engineCounters(long engine);
    static native long[] engineBatch(long engine);
    static native long[] lossScaleGetState(long scale);
    static native void lossScaleSetState(long scale, double value, long iteration, long lastOverflow, long hysteresis);

    // tp.cc
    static native long tpCreate(
            long mesh, byte[][] names, long[] tensors, byte[][] patterns, int[] styles, int[] dims, int[] heads,
            long[] layouts, Object options);
    static native byte[] tpParamName(long tp, int index);
    static native long[] tpParam(long tp, int index);
    static native long[] tpSlice(long tp, int index);
    static native void tpEnterParts(long tp, long[] input, int dim, long[] output, long stream, Object relay);
    static native void tpLeaveParts(
            long tp, long size, int dim, long[] bias, long[] output, long stream, Object relay);
    static native long tpCrossEntropy(
            long tp, long[] logits, long vocabulary, long[] targets, Object options, long[] classWeights, long dataRanks,
            long[] loss, long[] grad, long stream, boolean async);

    // pipeline.cc
    static native long pipelineCreate(
            long comm, int[] stages, Object relay, boolean split, int[] edges, Object options);
    static native double[] pipelineStep(long pipeline, long[] batch, long[] targets, double[] weights);
    static native double[] pipelineEval(long pipeline, long[] batch, long[] targets, double[] weights);
    static native long[] pipelineOutput(long pipeline, int dtype, long[] shape);
    static native void pipelineSumTied(long pipeline, long[] gradient, int[] stages);
    static native long[] pipelineStats(long pipeline);

    // lr_schedule.cc
    static native long lrMultiStepDecay(long[] milestones, double gamma);
    static native long lrSequential(long[] schedules, long[] milestones);
    static native long lrChained(long[] schedules);

    // data.cc
    static native long[] samplerNext(long sampler, int size);
    static native long[] samplerPosition(long sampler);
    static native void samplerValid(long sampler, long address, long size);

    // state.cc
    static native void stateAddSharded(long state, byte[] name, long layout, int dtype, long[] pieces, int rank);
    static native void stateAddSource(long state, byte[] prefix, Object calls);
    static native byte[] stateTensorName(long state, long index);
    static native long[] stateTensorShape(long state, long index);

    // checkpoint.cc
    static native long saverCreate(
            long comm, byte[] root, Object options, byte[] version, long progress, long storage);
    static native long checkpointOpenWith(byte[] path, long storage);
    static native byte[] checkpointTensorName(long checkpoint, long index);
    static native long[] checkpointTensorShape(long checkpoint, long index);
    static native byte[] checkpointLoad(
            long checkpoint, long state, Object options, Object progress, long comm, byte[][] only, byte[][] rules);
    static native void checkpointVerifyProgress(long checkpoint, boolean full, Object progress);
    static native void checkpointExport(long checkpoint, long comm, byte[] directory, Object options, Object progress);
    static native long progressKeep(Object relay);
    static native void progressDrop(long kept);

    // storage.cc
    static native long storageCreate(Object storage, int capabilities, long partBytes);

    /** UTF-8 of {@code text}, which must not be null or contain a NUL character or an unpaired surrogate. */
    static byte[] utf8(String text, String what) {
        Objects.requireNonNull(text, what);
        if (text.indexOf('\0') >= 0) {
            throw new IllegalArgumentException(what + " contains a NUL character: \"" + text.replace('\0', '?') + '"');
        }
        try {
            final ByteBuffer bytes = StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(text));
            final byte[] out = new byte[bytes.remaining()];
            bytes.get(out);
            return out;
        } catch (CharacterCodingException unpaired) { // getBytes would make the same '?' of different names
            throw new IllegalArgumentException(what + " is not valid text: an unpaired surrogate is in \"" + text + '"',
                    unpaired);
        }
    }

    /** As {@link #utf8}, but null stays null: not set. */
    static byte[] optionalUtf8(String text, String what) {
        return text == null ? null : utf8(text, what);
    }

    static String text(byte[] utf8) {
        return new String(utf8, StandardCharsets.UTF_8);
    }

    /** Milliseconds of a timeout, rounded up. */
    static int millis(Duration timeout, String what) {
        Objects.requireNonNull(timeout, what);
        if (timeout.isNegative() || timeout.compareTo(Duration.ofMillis(Integer.MAX_VALUE)) > 0) {
            throw new IllegalArgumentException(what + " is " + timeout + "; it must be 0 to 2^31-1 ms");
        }
        return (int) Math.min(Integer.MAX_VALUE, timeout.plusNanos(999_999).toMillis());
    }
}
