package dev.tessera;

import java.lang.ref.WeakReference;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;

/**
 * Data-parallel training of a registered model. The trainer writes gradients into views that this object provides and
 * marks them as ready; full buckets are averaged over the ranks in the background, and {@link #await} returns when all
 * are done. {@link #ready}, {@link #readyAll}, {@link #await} and {@link #zeroGrad} are exclusive.
 *
 * <p>Closing it closes the optimizers and states made from it. The memory of the gradients is freed as soon as no view
 * of it is reachable.
 */
public final class Ddp extends NativeObject {
    private final List<String> names; // as registered
    private final Params params; // as registered; null: the ranks of a host share them
    private final List<Tensor> tensors; // those of params
    private final Comm comm; // not closed by us; reachable while we are
    private final TensorParallel tp; // likewise; null: the parameters are whole
    private final Tensor[] grads; // cleared by close()
    private final FloatBuffer[] floats;
    private volatile Relay relay; // of the hook that is set

    /** Reduces the buckets of a model instead of the reduction that its options select; see {@link #setHook}. */
    @FunctionalInterface
    public interface Hook {
        /**
         * Write the final reduced gradients in place.
         *
         * @param bucket valid only until the method returns
         * @throws Exception fails the step on every rank
         */
        void reduce(Bucket bucket) throws Exception;
    }

    /** A bucket whose gradients are all ready. */
    public static final class Bucket {
        private final int index;
        private final int[] params;
        private final List<Tensor> grads;
        private final Comm comm;
        private final long stream;

        private Bucket(int index, int[] params, List<Tensor> grads, Comm comm, long stream) {
            this.index = index;
            this.params = params;
            this.grads = grads;
            this.comm = comm;
            this.stream = stream;
        }

        /**
         * Which bucket.
         *
         * @return 0 to {@link Ddp#stats}'s size - 1
         */
        public int index() {
            return index;
        }

        /**
         * The parameters in it.
         *
         * @return their indices
         */
        public int[] params() {
            return params.clone();
        }

        /**
         * Their gradients, to be changed in place.
         *
         * @return of one dtype
         */
        public List<Tensor> grads() {
            return grads;
        }

        /**
         * The model's ranks. Synchronous collectives run at once, asynchronous ones are refused.
         *
         * @return closed when the hook returns
         */
        public Comm comm() {
            return comm;
        }

        /**
         * Of gradients on a device: the stream on which they are written and must be reduced, with {@code
         * bucket.comm().onStream(bucket.stream())} and kernels on that stream.
         *
         * @return the address of a CUDA stream; 0 on the CPU
         */
        public long stream() {
            return stream;
        }
    }

    /** A bucket in the last reduced step. Times are in nanoseconds since the step's first ready on this rank. */
    public static final class BucketStats {
        private final long[] values;

        private BucketStats(long[] values) {
            this.values = values;
        }

        /**
         * Its size.
         *
         * @return bytes, padding included
         */
        public long sizeBytes() {
            return values[0];
        }

        /**
         * The number of its parameters.
         *
         * @return at least 1
         */
        public int params() {
            return (int) values[1];
        }

        /**
         * When its last gradient was ready.
         *
         * @return nanoseconds
         */
        public long readyNanos() {
            return values[2];
        }

        /**
         * When its reduction began.
         *
         * @return nanoseconds
         */
        public long startNanos() {
            return values[3];
        }

        /**
         * When its reduction was done.
         *
         * @return nanoseconds
         */
        public long endNanos() {
            return values[4];
        }

        /**
         * Time that {@link Ddp#await} spent waiting for it, which backward did not hide.
         *
         * @return nanoseconds
         */
        public long exposedNanos() {
            return values[5];
        }
    }

    /**
     * Called by the shims. It must not keep the model alive, because the library keeps it as long as the hook is set.
     */
    static final class Relay {
        private final WeakReference<Ddp> model;
        private final Hook hook;
        private volatile Throwable failure;

        Relay(Ddp model, Hook hook) {
            this.model = new WeakReference<>(model);
            this.hook = hook;
        }

        /** Called on a thread of the library; must not throw. */
        int reduce(int bucket, long[] params, long comm, long stream) {
            try {
                final Ddp ddp = model.get();
                if (ddp == null) {
                    throw new IllegalStateException("the model was garbage-collected");
                }
                final int[] indices = new int[params.length];
                final List<Tensor> grads = new ArrayList<>();
                for (int i = 0; i < params.length; ++i) {
                    indices[i] = (int) params[i];
                    grads.add(ddp.gradTensor(indices[i]));
                }
                final Comm ranks = Comm.ofHook(comm);
                try {
                    hook.reduce(new Bucket(bucket, indices, List.copyOf(grads), ranks, stream));
                } finally {
                    ranks.close();
                }
                return 0;
            } catch (Throwable thrown) {
                if (failure == null) {
                    failure = thrown;
                }
                return 1;
            }
        }
    }

    private Ddp(long handle, Comm comm, Params params, DdpOptions options) {
        super(TensorParallel.under(options.tp(),
                new Ref("Ddp", handle, Native::ddpDestroy).keep(options.isShareParams() ? null : params)));
        this.comm = comm;
        tp = options.tp();
        final boolean shared = options.isShareParams();
        names = params.names();
        this.params = shared ? null : params;
        tensors = shared ? null : params.tensors();
        grads = new Tensor[params.size()];
        floats = new FloatBuffer[params.size()];
    }

    /**
     * Register a model, with default options: checks that all ranks registered the same parameters, and gives every
     * rank the values of rank 0. Collective.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param params contiguous, floating-point, all on the CPU or all on the communicator's CUDA device (see {@link
     *     #setStream}); their memory is kept reachable until this object is closed
     * @return the DDP object
     * @throws TesseraMismatchException if the ranks' parameters differ; the message names the first difference
     */
    public static Ddp create(Comm comm, Params params) {
        return create(comm, params, new DdpOptions());
    }

    /**
     * Register a model, like {@link #create(Comm, Params)}.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param params contiguous, floating-point; their memory is kept reachable until this object is closed, unless
     *     {@link DdpOptions#shareParams}
     * @param options sizes of buckets, reduction
     * @return the DDP object
     * @throws TesseraMismatchException if the ranks' parameters differ; the message names the first difference
     */
    public static Ddp create(Comm comm, Params params, DdpOptions options) {
        final byte[][] names = comm.orRefuse(Creation.MODEL, () -> {
            Objects.requireNonNull(options, "options");
            return params.nameBytes();
        });
        final long[] tensors = comm.orRefuse(Creation.MODEL, params::descriptors);
        final long handle = Comm.creating(comm, Creation.MODEL, reached -> TensorParallel.handed(options.tp(),
                options::tpHandle, () -> comm.ref.callLongExclusive(c -> {
                    reached.set(true);
                    return Native.ddpCreate(c, names, tensors, options);
                })));
        return new Ddp(handle, comm, params, options);
    }

    /**
     * The registered parameters; with {@link DdpOptions#shareParams}, those of {@link #paramTensor}.
     *
     * @return the parameters
     */
    public Params params() {
        if (params != null) {
            return params;
        }
        final java.util.Map<String, Tensor> shared = new java.util.LinkedHashMap<>();
        for (int i = 0; i < names.size(); ++i) {
            shared.put(names.get(i), paramTensor(i));
        }
        return Params.of(shared);
    }

    /**
     * The number of parameters.
     *
     * @return at least 1
     */
    public int size() {
        return (int) ref.callLong(Native::ddpParamCount);
    }

    /**
     * The name of a parameter, without a leading "module." or "_orig_mod.".
     *
     * @param index 0 to size - 1
     * @return the name in checkpoints
     */
    public String name(int index) {
        return ref.call(h -> Native.text(Native.ddpParamName(h, check(index))));
    }

    /**
     * The values of an F32 parameter: its registered memory, which {@link Optimizer#step} updates; with {@link
     * DdpOptions#shareParams} see {@link #paramTensor}.
     *
     * @param index 0 to size - 1
     * @return elements row-major, position 0
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #paramTensor}
     */
    public FloatBuffer param(int index) {
        return paramTensor(index).floats();
    }

    /**
     * A registered parameter; with {@link DdpOptions#shareParams}, a view of this host's shared parameters, which only
     * the optimizer and loads may write.
     *
     * @param index 0 to size - 1
     * @return of the parameter's dtype and shape
     */
    public Tensor paramTensor(int index) {
        return ref.call(h -> {
            check(index);
            return tensors != null ? tensors.get(index) : Views.of(ref, Native.ddpSharedParam(h, index));
        });
    }

    /**
     * The gradient of an F32 parameter: a view of a bucket, initially zero, the same memory in every step. Do not touch
     * it between {@link #ready} and {@link #await}.
     *
     * @param index 0 to size - 1
     * @return elements row-major; the same object at every call, which sets its position to 0
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #gradTensor}
     */
    public FloatBuffer grad(int index) {
        return ref.call(h -> {
            synchronized (floats) {
                if (floats[check(index)] == null) {
                    floats[index] = gradTensor(index).floats();
                }
                floats[index].clear();
                return floats[index];
            }
        });
    }

    /**
     * The gradient of a parameter, like {@link #grad}.
     *
     * @param index 0 to size - 1
     * @return of the parameter's dtype and shape, on its device
     */
    public Tensor gradTensor(int index) {
        return ref.call(h -> {
            synchronized (floats) {
                if (grads[check(index)] == null) {
                    grads[index] = Views.of(ref, Native.ddpGrad(h, index));
                }
                return grads[index];
            }
        });
    }

    /**
     * Mark a gradient as ready, in any order, each once per step.
     *
     * @param index 0 to size - 1
     * @throws TesseraInvalidStateException if it was already marked in this step
     */
    public void ready(int index) {
        ref.runExclusive(h -> Native.ddpReady(h, check(index)));
    }

    /**
     * Mark all remaining gradients as ready.
     *
     * @throws TesseraInvalidStateException if it was already called in this step
     */
    public void readyAll() {
        ref.runExclusive(Native::ddpReadyAll);
    }

    /**
     * End the backward pass: return when every gradient is the average (or sum) over the ranks. Collective. Without
     * synchronisation ({@link #setSync}) it returns immediately.
     *
     * @throws TesseraInvalidStateException if gradients were never marked ready; the message names them. Mark them and
     *     wait again
     * @throws TesseraException with {@link ErrorCode#USER} if a hook failed; the hook's exception is suppressed in it
     */
    public void await() {
        withHookFailure(() -> ref.runExclusive(Native::ddpWait));
    }

    private void withHookFailure(Runnable call) {
        try {
            call.run();
        } catch (TesseraException error) {
            final Relay current = relay;
            if (error.code() == ErrorCode.USER && current != null && current.failure != null) {
                error.addSuppressed(current.failure);
            }
            throw error;
        }
    }

    /**
     * Name the CUDA stream on which the trainer writes gradients and uses the reduced ones. For parameters on a device
     * everything is in its order: a gradient that is marked ready is what this stream has written by then, and what it gets
     * after {@link #await} sees the reduced gradients. No call of a step waits for the device.
     *
     * @param stream address of a stream of the parameters' device ({@code cudaStream_t}), which must exist until another one
     *     is set; 0, as at first, is its default stream. A new one continues after what the model did on the previous one
     * @throws TesseraInvalidArgumentException if it is of another device, or the parameters are on the CPU
     * @throws TesseraInvalidStateException in the middle of a step
     */
    public void setStream(long stream) {
        ref.runExclusive(h -> Native.ddpSetStream(h, stream));
    }

    /**
     * Set whether the following steps reduce. If not, {@link #ready} and {@link #await} reduce nothing, and the trainer
     * adds to the gradients in the views. The first step with synchronisation reduces the sums; a parameter that had a
     * gradient in any of these steps counts as used.
     *
     * @param sync the same on every rank; initially true
     * @throws TesseraInvalidStateException in the middle of a step
     */
    public void setSync(boolean sync) {
        ref.runExclusive(h -> Native.ddpSetSync(h, sync));
    }

    /**
     * Whether any rank used a parameter in the last reduced step. If none did, its gradient was kept.
     *
     * @param index 0 to size - 1
     * @return whether
     * @throws TesseraInvalidStateException in the middle of a step
     */
    public boolean used(int index) {
        return ref.callExclusive(h -> Native.ddpUsed(h, check(index)));
    }

    /**
     * Statistics of each bucket in the last reduced step. Times are 0 before the first step and after a step that
     * rebuilt the buckets.
     *
     * @return one entry per bucket, in the order of reduction
     */
    public List<BucketStats> stats() {
        return ref.callExclusive(h -> {
            final List<BucketStats> all = new ArrayList<>();
            for (int bucket = 0; bucket < Native.ddpBucketCount(h); ++bucket) {
                all.add(new BucketStats(Native.ddpStats(h, bucket)));
            }
            return all;
        });
    }

    /**
     * Let a hook reduce the buckets of the following steps. It does its own averaging, with collectives that are the
     * same on every rank. It runs on a thread of the library, one bucket after another; on a rank that has joined, with
     * zero gradients.
     *
     * @param hook null restores the reduction that the options select
     * @throws TesseraInvalidStateException in the middle of a step
     */
    public void setHook(Hook hook) {
        final Relay next = hook == null ? null : new Relay(this, hook);
        ref.runExclusive(h -> Native.ddpSetHook(h, next));
        relay = next;
    }

    /**
     * Let an optimizer of this model update the parameters of each bucket in the background, once it is reduced. After
     * {@link #await} all parameters are updated, with the same bits as {@link Optimizer#step} would give, which is
     * refused from now on. Do not use a parameter between the {@link #ready} of its gradient and the end of {@link
     * #await}.
     *
     * @param optimizer made over this model
     * @throws TesseraInvalidArgumentException if it was not
     * @throws TesseraInvalidStateException in the middle of a step, or if another optimizer already steps in backward
     */
    public void stepInBackward(Optimizer optimizer) {
        ref.runExclusive(h -> optimizer.ref.runExclusive(o -> Native.ddpStepInBackward(h, o)));
    }

    /**
     * Register the model's buffers, such as running means and counters: every rank gets the values of rank 0.
     * Collective; may be called once.
     *
     * @param buffers the same on every rank; their memory is kept reachable until this object is closed
     * @throws TesseraMismatchException if the ranks' buffers differ; the message names the first difference
     */
    public void registerBuffers(Params buffers) {
        Objects.requireNonNull(buffers, "buffers");
        ref.runExclusive(h -> {
            Native.ddpRegisterBuffers(h, buffers.nameBytes(), buffers.descriptors());
            ref.keep(params == null ? buffers : List.of(params, buffers));
        });
    }

    /** Broadcast the buffers of rank 0, or of the lowest rank that has not joined, in one operation. Collective. */
    public void broadcastBuffers() {
        ref.runExclusive(Native::ddpBroadcastBuffers);
    }

    /**
     * Join the steps of the other ranks with zero gradients until all ranks have joined. Every rank calls it when it
     * has no data left; a new round of steps may begin afterwards. Gradients are then zero.
     *
     * @param syncParams if ranks made different numbers of steps, all get the parameters and buffers of the lowest rank
     *     that made the most steps
     * @throws TesseraInvalidStateException if the model was created without {@link DdpOptions#join}, or in the middle of a
     *     step
     * @throws TesseraTimeoutException if a rank is late, even between two of its steps; the message names it
     */
    public void join(boolean syncParams) {
        withHookFailure(() -> ref.runExclusive(h -> Native.ddpJoin(h, syncParams)));
    }

    /**
     * The step, counted from the model's creation, of this host's shared parameters if they are consistent. For the
     * survivors of a rank's death: all of them call it once they have formed a new communicator. If the parameters are
     * consistent and of the same step on all hosts, they may be saved or registered again; otherwise discard them and
     * load the last checkpoint.
     *
     * @return the number of steps
     * @throws TesseraCorruptException if slices are of different steps; the message names them
     * @throws TesseraInvalidStateException without {@link DdpOptions#shareParams}, or in the middle of a step
     */
    public long sharedStep() {
        return ref.callLongExclusive(Native::ddpSharedStep);
    }

    /** Set every gradient to zero. */
    public void zeroGrad() {
        ref.runExclusive(Native::ddpZeroGrad);
    }

    @Override
    public void close() {
        synchronized (floats) {
            java.util.Arrays.fill(grads, null);
            java.util.Arrays.fill(floats, null);
        }
        super.close();
    }

    private int check(int index) {
        if (index < 0 || index >= names.size()) {
            throw new IndexOutOfBoundsException("parameter " + index + " does not exist; the model has " + names.size());
        }
        return index;
    }

    /** The names of the parameters. */
    @Override
    public String toString() {
        return "Ddp(" + comm + ", " + names + ")";
    }
}
