package dev.tessera;

import java.lang.ref.WeakReference;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;

/**
 * Data-parallel training: a model registered parameter by parameter. The trainer writes gradients into views that this
 * object hands out and says which are ready; full buckets are averaged over the ranks meanwhile, and {@link #await} returns
 * when all are. {@link #ready}, {@link #readyAll}, {@link #await} and {@link #zeroGrad} are exclusive.
 *
 * <p>Closing it closes the optimizers and states made from it. The memory of the gradients is given back at once, or, while
 * views of it are reachable, when the garbage collector finds the last one gone.
 */
public final class Ddp extends NativeObject {
    private final List<String> names; // as registered
    private final Params params; // as registered; null: the ranks of a host share them
    private final List<Tensor> tensors; // those of params
    private final Comm comm; // not closed by us; reachable while we are
    private final Tensor[] grads; // cleared by close()
    private final FloatBuffer[] floats;
    private volatile Relay relay; // of the hook that is set

    /** Reduces the buckets of a model in place of what its options say; see {@link #setHook}. */
    @FunctionalInterface
    public interface Hook {
        /**
         * Leave in the bucket's gradients what every rank shall have.
         *
         * @param bucket valid until the method returns
         * @throws Exception fails the step on every rank
         */
        void reduce(Bucket bucket) throws Exception;
    }

    /** A bucket whose gradients are all there. */
    public static final class Bucket {
        private final int index;
        private final int[] params;
        private final List<Tensor> grads;
        private final Comm comm;

        private Bucket(int index, int[] params, List<Tensor> grads, Comm comm) {
            this.index = index;
            this.params = params;
            this.grads = grads;
            this.comm = comm;
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
    }

    /** A bucket in the last step that was reduced. Times are nanoseconds since the step's first ready on this rank. */
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
         * What {@link Ddp#await} spent waiting for it: not hidden by backward.
         *
         * @return nanoseconds
         */
        public long exposedNanos() {
            return values[5];
        }
    }

    /** What the shims call. It must not keep the model: the library keeps it as long as the hook is set. */
    static final class Relay {
        private final WeakReference<Ddp> model;
        private final Hook hook;
        private volatile Throwable failure;

        Relay(Ddp model, Hook hook) {
            this.model = new WeakReference<>(model);
            this.hook = hook;
        }

        /** Called on a thread of the library; lets nothing be thrown. */
        int reduce(int bucket, long[] params, long comm) {
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
                    hook.reduce(new Bucket(bucket, indices, List.copyOf(grads), ranks));
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

    private Ddp(long handle, Comm comm, Params params, boolean shared) {
        super(new Ref("Ddp", handle, Native::ddpDestroy).keep(shared ? null : params));
        this.comm = comm;
        names = params.names();
        this.params = shared ? null : params;
        tensors = shared ? null : params.tensors();
        grads = new Tensor[params.size()];
        floats = new FloatBuffer[params.size()];
    }

    /**
     * Register a model, with default options: check that all ranks registered the same parameters, and give every rank the
     * values of rank 0. Collective.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param params contiguous, floating-point; their memory is kept reachable until this object is closed
     * @return the DDP object
     * @throws TesseraMismatchException if the ranks' parameters differ; names the first difference
     */
    public static Ddp create(Comm comm, Params params) {
        return create(comm, params, new DdpOptions());
    }

    /**
     * Register a model, as {@link #create(Comm, Params)}.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param params contiguous, floating-point; their memory is kept reachable until this object is closed, unless
     *     {@link DdpOptions#shareParams}
     * @param options sizes of buckets, reduction
     * @return the DDP object
     * @throws TesseraMismatchException if the ranks' parameters differ; names the first difference
     */
    public static Ddp create(Comm comm, Params params, DdpOptions options) {
        Objects.requireNonNull(options, "options");
        final byte[][] names = params.nameBytes();
        final long handle = comm.ref.callLongExclusive(c -> Native.ddpCreate(c, names, params.descriptors(), options));
        return new Ddp(handle, comm, params, options.isShareParams());
    }

    /**
     * The parameters, as they were registered; with {@link DdpOptions#shareParams}, as {@link #paramTensor} gives them.
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
     * @return the name that checkpoints have
     */
    public String name(int index) {
        return ref.call(h -> Native.text(Native.ddpParamName(h, check(index))));
    }

    /**
     * The values of a parameter of F32: the memory that it was registered with, which {@link Optimizer#step} updates, or
     * with {@link DdpOptions#shareParams} what {@link #paramTensor} tells.
     *
     * @param index 0 to size - 1
     * @return elements row-major, position 0
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #paramTensor}
     */
    public FloatBuffer param(int index) {
        return paramTensor(index).floats();
    }

    /**
     * A parameter, as it was registered; with {@link DdpOptions#shareParams}, a view into the copy of this host's ranks,
     * which the optimizer and loads alone write.
     *
     * @param index 0 to size - 1
     * @return of the parameter's dtype and shape
     */
    public Tensor paramTensor(int index) {
        return ref.call(h -> {
            check(index);
            return tensors != null ? tensors.get(index) : viewOf(Native.ddpSharedParam(h, index));
        });
    }

    /**
     * The gradient of a parameter of F32: a view into a bucket, zero at first, the same memory at every step. It must not be
     * touched between {@link #ready} and {@link #await}.
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
     * The gradient of a parameter, as {@link #grad}.
     *
     * @param index 0 to size - 1
     * @return of the parameter's dtype and shape
     */
    public Tensor gradTensor(int index) {
        return ref.call(h -> {
            synchronized (floats) {
                if (grads[check(index)] == null) {
                    grads[index] = viewOf(Native.ddpGrad(h, index));
                }
                return grads[index];
            }
        });
    }

    // Of memory of this object.
    private Tensor viewOf(long[] descriptor) {
        final Tensor bare = Tensor.overNative(descriptor, null);
        final Views.View view = new Views.View(ref, bare.address(), bare.sizeBytes());
        return Tensor.overNative(descriptor, view.owner());
    }

    /**
     * Say that a gradient is written. In any order; each once a step.
     *
     * @param index 0 to size - 1
     * @throws TesseraInvalidStateException if it was said before in this step
     */
    public void ready(int index) {
        ref.runExclusive(h -> Native.ddpReady(h, check(index)));
    }

    /**
     * Say that every gradient not yet said is written.
     *
     * @throws TesseraInvalidStateException if it was called in this step before
     */
    public void readyAll() {
        ref.runExclusive(Native::ddpReadyAll);
    }

    /**
     * The end of backward: returns when every gradient is the average (or sum) over the ranks. Collective. Without
     * synchronisation ({@link #setSync}) it returns at once.
     *
     * @throws TesseraInvalidStateException if parameters were never said ready (names them); the step may be completed and
     *     waited for again
     * @throws TesseraException with {@link ErrorCode#USER} if a hook failed; what it threw is suppressed in it
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
     * Whether the following steps reduce. Without, {@link #ready} and {@link #await} reduce nothing: the trainer adds to
     * the gradients in the views. The first step with synchronisation reduces the sums; a parameter that had a gradient in
     * any of these steps counts as used.
     *
     * @param sync the same on every rank; true at first
     * @throws TesseraInvalidStateException in the middle of a step
     */
    public void setSync(boolean sync) {
        ref.runExclusive(h -> Native.ddpSetSync(h, sync));
    }

    /**
     * Whether any rank used a parameter in the last step that was reduced. If none did, its gradient was left alone.
     *
     * @param index 0 to size - 1
     * @return whether
     * @throws TesseraInvalidStateException in the middle of a step
     */
    public boolean used(int index) {
        return ref.callExclusive(h -> Native.ddpUsed(h, check(index)));
    }

    /**
     * What became of each bucket in the last step that was reduced. Times are 0 before the first step, and after one that
     * rebuilt the buckets.
     *
     * @return a bucket each, in the order of reduction
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
     * Let a hook reduce the buckets of the following steps in place of what the options say. It averages itself, by
     * collectives that are the same on every rank; it runs on a thread of the library, bucket after bucket, and on a rank
     * that has joined with gradients of zero.
     *
     * @param hook null: as the options say
     * @throws TesseraInvalidStateException in the middle of a step
     */
    public void setHook(Hook hook) {
        final Relay next = hook == null ? null : new Relay(this, hook);
        ref.runExclusive(h -> Native.ddpSetHook(h, next));
        relay = next;
    }

    /**
     * Let an optimizer of this model update the parameters of a bucket as soon as it is reduced, in the background. After
     * {@link #await} all are updated, to the same bits as by {@link Optimizer#step} afterwards, which is refused from now
     * on. A parameter must not be used between the {@link #ready} of its gradient and the end of {@link #await}.
     *
     * @param optimizer made over this model
     * @throws TesseraInvalidArgumentException if it was not
     * @throws TesseraInvalidStateException in the middle of a step, or another one steps already
     */
    public void stepInBackward(Optimizer optimizer) {
        ref.runExclusive(h -> optimizer.ref.runExclusive(o -> Native.ddpStepInBackward(h, o)));
    }

    /**
     * Register what the model has besides parameters (running means, counters): every rank gets the values of rank 0. Once.
     * Collective.
     *
     * @param buffers the same on every rank; their memory is kept reachable until this object is closed
     * @throws TesseraMismatchException if the ranks' buffers differ; names the first difference
     */
    public void registerBuffers(Params buffers) {
        Objects.requireNonNull(buffers, "buffers");
        ref.runExclusive(h -> {
            Native.ddpRegisterBuffers(h, buffers.nameBytes(), buffers.descriptors());
            ref.keep(params == null ? buffers : List.of(params, buffers));
        });
    }

    /** Give every rank the buffers of rank 0 (of the lowest rank that has not joined), in one broadcast. Collective. */
    public void broadcastBuffers() {
        ref.runExclusive(Native::ddpBroadcastBuffers);
    }

    /**
     * This rank has no data left: take part in the steps of the others, adding zeros, until all ranks have joined. Every
     * rank calls it once it has no data; then a new round of steps may begin. Gradients are zero afterwards.
     *
     * @param syncParams if ranks made different numbers of steps, all get the parameters and buffers of the lowest rank that
     *     made most
     * @throws TesseraInvalidStateException if the model was created without {@link DdpOptions#join}, or in the middle of a
     *     step
     * @throws TesseraTimeoutException if a rank is late, also between two of its steps; names it
     */
    public void join(boolean syncParams) {
        withHookFailure(() -> ref.runExclusive(h -> Native.ddpJoin(h, syncParams)));
    }

    /**
     * The step, counted from the model's creation, that the copy of this host's ranks is of as a whole. For the survivors of
     * a rank's death, who ask once they have met again, all of them: if it is whole and of one step on all hosts it may be
     * saved, or registered anew; otherwise it is discarded and the last checkpoint loaded.
     *
     * @return the number of steps
     * @throws TesseraCorruptException if slices are of different steps, which the message tells
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
