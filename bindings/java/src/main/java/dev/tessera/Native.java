package dev.tessera;

import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Objects;

/**
 * The native methods, one for one with the shims of {@code src/main/native}, in the same order. Handles are
 * {@code long}, text is UTF-8 in {@code byte[]}, tensors are descriptors (see {@link Tensor}), options are a word of
 * bits that says which fields were set, then the fields. Loading this class loads the library.
 */
final class Native {
    static {
        Loader.load();
    }

    private Native() {}

    // version.cc
    static native int abiVersion();
    static native int headerAbiVersion();
    static native byte[] version();
    static native byte[] libraryPath();
    static native byte[] statusName(int status);
    static native int lastErrorCode();
    static native long[] headerNumbers();

    // log.cc
    static native void logSetLevel(int level);
    static native void logSetHandler(Object handler);

    // launch.cc
    static native boolean preemptRequested();
    static native void recordError(byte[] message, byte[] traceback);
    static native void recordErrorAbout(byte[] message, int code, int peer);

    // store.cc
    static native long storeOpen(
            byte[] uri, int given, int timeoutMs, boolean insecure, long epoch, byte[] token, byte[] jobId);
    static native long storeServe(
            byte[] host, int port, int given, int timeoutMs, boolean insecure, long epoch, byte[] token, byte[] jobId);
    static native int storeServerPort(long server);
    static native void storeServerDestroy(long server);
    static native void storeDestroy(long store);
    static native void storeSet(long store, byte[] key, byte[] value);
    static native byte[] storeGet(long store, byte[] key);
    static native void storeWait(long store, byte[] key, int timeoutMs);
    static native long storeAdd(long store, byte[] key, long delta);
    static native boolean storeCompareSet(long store, byte[] key, byte[] expected, byte[] desired);
    static native boolean storeDelete(long store, byte[] key);

    // comm.cc
    static native long commFromEnv(int given, int timeoutMs, int heartbeatTimeoutMs, int spinCount, byte[] backend, byte[] name);
    static native long commCreate(
            long store, int rank, int worldSize, int given, int timeoutMs, int heartbeatTimeoutMs, int spinCount, byte[] backend, byte[] name);
    static native long commSplit(
            long comm, int color, int key, boolean inherit, int given, int timeoutMs, int heartbeatTimeoutMs, int spinCount, byte[] backend,
            byte[] name);
    static native long commShrink(long comm, boolean inherit, int given, int timeoutMs, int heartbeatTimeoutMs, int spinCount, byte[] backend,
            byte[] name);
    static native void commFinalize(long comm);
    static native void commAbort(long comm, byte[] reason);
    static native void commDestroy(long comm);
    static native int commRank(long comm);
    static native int commWorldSize(long comm);
    static native byte[] commTransport(long comm);
    static native void commSetTimeout(long comm, int timeoutMs);
    static native int commTimeout(long comm);
    static native Object commError(long comm);

    static native void commWriteTrace(long comm, byte[] path);
    static native long commAllReduce(long comm, long[] tensors, int op, boolean async);
    static native long commReduceScatter(long comm, long[] input, long[] output, int op, boolean async);
    static native long commAllGather(long comm, long[] input, long[] output, boolean async);
    static native long commReduceScatterCoalesced(long comm, long[] inputs, long[] outputs, int op, boolean async);
    static native long commAllGatherCoalesced(long comm, long[] inputs, long[] outputs, boolean async);
    static native long commAllGatherV(long comm, long[] input, long[] outputs, boolean async);
    static native long commBroadcast(long comm, long[] tensors, int root, boolean async);
    static native long commReduce(long comm, long[] input, long[] output, int op, int root, boolean async);
    static native long commGather(long comm, long[] input, long[] output, int root, boolean async);
    static native long commScatter(long comm, long[] input, long[] output, int root, boolean async);
    static native long commAllToAll(long comm, long[] input, long[] output, boolean async);
    static native long commSend(long comm, long[] tensor, int peer, int tag, boolean async);
    static native long commRecv(long comm, long[] tensor, int peer, int tag, boolean async);
    static native long commBarrier(long comm, boolean async);

    // work.cc
    static native void workOnDone(long work, Object completion);
    static native long workStaged(long work);
    static native boolean workWait(long work, int timeoutMs);
    static native boolean workTest(long work);
    static native Object workError(long work);
    static native void workDestroy(long work);

    // memory.cc
    static native long bufferCreate(long comm, long size);
    static native long[] bufferData(long buffer);
    static native void bufferDestroy(long buffer);
    static native long directAddress(Object buffer);
    static native Object directBuffer(long address, long size);

    // mesh.cc
    static native long meshCreate(long comm, byte[][] names, int[] sizes);
    static native int meshNdim(long mesh);
    static native long meshDim(long mesh, byte[] name);
    static native long meshComm(long mesh, byte[] name);
    static native long meshSlice(long mesh, byte[][] names);
    static native long meshFlatten(long mesh, long comm, byte[] name);
    static native void meshDestroy(long mesh);

    // plan.cc
    static native long planCreate(long comm, int collective, long[] inputs, long[] outputs, int op, int root);
    static native void planRun(long plan);
    static native void planStart(long plan);
    static native void planWait(long plan, int timeoutMs);
    static native void planDestroy(long plan);

    // layout.cc
    static native long layoutCreate(long[] shape, int[] meshSizes, int[] placements);
    static native long layoutFromBoxes(long[] shape, long[] boxes, int[] counts);
    static native long layoutGather(long comm, long[] shape, long[] boxes, int count);
    static native int layoutBoxCount(long layout, int rank);
    static native long[] layoutBox(long layout, int rank, int index);
    static native void layoutDestroy(long layout);

    // ddp.cc
    static native long ddpCreate(
            long comm, byte[][] names, long[] tensors, int given, long bucketBytes, long firstBucketBytes, int op,
            double preDivide, boolean findUnused, boolean staticGraph, boolean rebuildBuckets, int reduceDtype, int hook,
            int powersgdRank, int powersgdStartStep, int join, boolean shareParams);
    static native int ddpParamCount(long ddp);
    static native byte[] ddpParamName(long ddp, int index);
    static native long[] ddpSharedParam(long ddp, int index);
    static native long[] ddpGrad(long ddp, int index);
    static native void ddpReady(long ddp, int index);
    static native void ddpReadyAll(long ddp);
    static native void ddpWait(long ddp);
    static native void ddpSetSync(long ddp, boolean sync);
    static native boolean ddpUsed(long ddp, int index);
    static native int ddpBucketCount(long ddp);
    static native long[] ddpStats(long ddp, int bucket);
    static native void ddpSetHook(long ddp, Object relay);
    static native void ddpStepInBackward(long ddp, long optimizer);
    static native void ddpRegisterBuffers(long ddp, byte[][] names, long[] tensors);
    static native void ddpBroadcastBuffers(long ddp);
    static native void ddpJoin(long ddp, boolean syncParams);
    static native long ddpSharedStep(long ddp);
    static native void ddpZeroGrad(long ddp);
    static native void ddpDestroy(long ddp);

    // fsdp.cc
    static native long fsdpCreate(
            long comm, byte[][] unitNames, int[] settings, byte[][] names, long[] tensors, int[] trained, int given,
            int shardRanks, int forwardPrefetch, int backwardPrefetch, int gradsInFlight, int paramDtype, int reduceDtype,
            int op, double preDivide, boolean syncValues);
    static native int fsdpUnitCount(long fsdp);
    static native int fsdpParamCount(long fsdp);
    static native byte[] fsdpUnitName(long fsdp, int unit);
    static native int fsdpUnitPhase(long fsdp, int unit);
    static native byte[] fsdpParamName(long fsdp, int index);
    static native long[] fsdpParam(long fsdp, int index);
    static native long[] fsdpShard(long fsdp, int index);
    static native long[] fsdpShardGrad(long fsdp, int index);
    static native long fsdpLayout(long fsdp, int index);
    static native long[] fsdpWhole(long fsdp, int index);
    static native long[] fsdpGrad(long fsdp, int index);
    static native void fsdpForward(long fsdp, int unit);
    static native void fsdpForwardDone(long fsdp, int unit);
    static native void fsdpBackward(long fsdp, int unit);
    static native void fsdpUnused(long fsdp, int index);
    static native boolean fsdpUsed(long fsdp, int index);
    static native void fsdpGradsReady(long fsdp, int unit);
    static native void fsdpWait(long fsdp);
    static native void fsdpAbandon(long fsdp);
    static native void fsdpUnshard(long fsdp, int unit);
    static native void fsdpAwait(long fsdp, int unit);
    static native void fsdpReshard(long fsdp, int unit);
    static native void fsdpSetSync(long fsdp, boolean sync);
    static native void fsdpSetAccumulate(long fsdp, boolean accumulate);
    static native void fsdpSetAllReduce(long fsdp, boolean allReduce);
    static native void fsdpSetReshardAfterBackward(long fsdp, int unit, boolean reshard);
    static native void fsdpZeroGrad(long fsdp);
    static native void fsdpDestroy(long fsdp);

    // optim.cc
    static native long ddpSgd(
            long ddp, int given, double lr, double momentum, double dampening, double weightDecay, boolean nesterov);
    static native long fsdpSgd(
            long fsdp, int given, double lr, double momentum, double dampening, double weightDecay, boolean nesterov);
    static native long sgdCreate(
            byte[][] names, long[] tensors, long[] grads, int given, double lr, double momentum, double dampening,
            double weightDecay, boolean nesterov);
    static native long ddpAdam(
            long ddp, int given, double lr, double beta1, double beta2, double eps, double weightDecay);
    static native long fsdpAdam(
            long fsdp, int given, double lr, double beta1, double beta2, double eps, double weightDecay);
    static native long adamCreate(
            byte[][] names, long[] tensors, long[] grads, int given, double lr, double beta1, double beta2, double eps,
            double weightDecay);
    static native long ddpAdamw(
            long ddp, int given, double lr, double beta1, double beta2, double eps, double weightDecay);
    static native long fsdpAdamw(
            long fsdp, int given, double lr, double beta1, double beta2, double eps, double weightDecay);
    static native long adamwCreate(
            byte[][] names, long[] tensors, long[] grads, int given, double lr, double beta1, double beta2, double eps,
            double weightDecay);
    static native void optimizerStep(long optimizer);
    static native void optimizerZeroGrad(long optimizer);
    static native double optimizerClipGradNorm(long optimizer, double maxNorm, double p);
    static native void optimizerClipGradValue(long optimizer, double most);
    static native double optimizerLr(long optimizer);
    static native void optimizerSetLr(long optimizer, double lr);
    static native long optimizerSteps(long optimizer);
    static native void optimizerDestroy(long optimizer);

    // data.cc
    static native long gradScalerCreate(
            int given, double initScale, double growthFactor, double backoffFactor, long growthInterval);
    static native double gradScalerScale(long scaler);
    static native void gradScalerUnscale(long scaler, long optimizer);
    static native boolean gradScalerStep(long scaler, long optimizer);
    static native void gradScalerUpdate(long scaler);
    static native void gradScalerDestroy(long scaler);
    static native long samplerCreate(
            long comm, long length, int given, long seed, boolean shuffle, boolean dropLast);
    static native long[] samplerNext(long sampler, int size);
    static native long[] samplerPosition(long sampler);
    static native void samplerSetEpoch(long sampler, long epoch);
    static native void samplerDestroy(long sampler);

    // state.cc
    static native long stateCreate();
    static native void stateAddTensor(long state, byte[] name, long[] tensor);
    static native void stateAddSharded(long state, byte[] name, long layout, int dtype, long[] pieces, int rank);
    static native void stateAddDdp(long state, byte[] prefix, long ddp);
    static native void stateAddFsdp(long state, byte[] prefix, long fsdp);
    static native void stateAddOptimizer(long state, byte[] prefix, long optimizer);
    static native void stateAddGradScaler(long state, byte[] prefix, long scaler);
    static native void stateAddSampler(long state, byte[] prefix, long sampler);
    static native void stateAddSource(long state, byte[] prefix, Object calls);
    static native void stateSetLong(long state, byte[] name, long value);
    static native long stateGetLong(long state, byte[] name);
    static native void stateSetDouble(long state, byte[] name, double value);
    static native double stateGetDouble(long state, byte[] name);
    static native void stateSetValue(long state, byte[] name, byte[] json);
    static native byte[] stateGetValue(long state, byte[] name);
    static native long stateTensorCount(long state);
    static native byte[] stateTensorName(long state, long index);
    static native long[] stateTensorShape(long state, long index);
    static native void stateGather(long state, long comm, byte[] name, int root, long[] whole);
    static native void stateSetMetric(long state, byte[] name, double value);
    static native void stateDestroy(long state);

    // checkpoint.cc
    static native long saverCreate(long comm, byte[] root, int given, long[] numbers, byte[] version, byte[] format,
            byte[] bestMetric, long progress, long storage);
    static native void saverSave(long saver, long step, long state);
    static native long saverSaveAsync(long saver, long step, long state);
    static native void saverWait(long saver);
    static native long saverResume(long saver, long state);
    static native boolean saverShouldStop(long saver, long step, boolean told);
    static native void saverTrim(long saver);
    static native void saverDestroy(long saver);
    static native long checkpointOpen(byte[] path);
    static native long checkpointOpenWith(byte[] path, long storage);
    static native byte[] checkpointPath(long checkpoint);
    static native byte[] checkpointManifest(long checkpoint);
    static native long checkpointStep(long checkpoint);
    static native long checkpointTensorCount(long checkpoint);
    static native byte[] checkpointTensorName(long checkpoint, long index);
    static native long[] checkpointTensorShape(long checkpoint, long index);
    static native void checkpointRead(long checkpoint, byte[] name, long[] tensor);
    static native byte[] checkpointLoad(
            long checkpoint, long state, int given, int values, Object progress, long comm, byte[][] only,
            byte[][] rules);
    static native void checkpointVerify(long checkpoint, boolean full);
    static native void checkpointVerifyProgress(long checkpoint, boolean full, Object progress);
    static native void checkpointExport(
            long checkpoint, long comm, byte[] directory, byte[] format, long maxFileBytes, byte[] under, int timeoutMs,
            Object progress);
    static native void checkpointDestroy(long checkpoint);
    static native long progressKeep(Object relay);
    static native void progressDrop(long kept);

    // storage.cc
    static native long storageCreate(Object storage, int capabilities, long partBytes);
    static native void storageDestroy(long storage);

    /** UTF-8 of {@code text}, which must not be null nor contain a NUL character or half a surrogate pair. */
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
            throw new IllegalArgumentException(what + " is no text: half of a surrogate pair is missing in \"" + text + '"',
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
            throw new IllegalArgumentException(what + " is " + timeout + "; 0 to 2^31-1 ms are possible");
        }
        return (int) Math.min(Integer.MAX_VALUE, timeout.plusNanos(999_999).toMillis());
    }
}
