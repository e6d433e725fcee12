package dev.tessera;

import java.nio.FloatBuffer;
import java.util.List;

/**
 * Data-parallel training: a model registered parameter by parameter. The trainer writes gradients into views that this
 * object hands out and says which are ready; full buckets are averaged over the ranks meanwhile, and {@link #await} returns
 * when all are. {@link #ready}, {@link #readyAll}, {@link #await} and {@link #zeroGrad} are exclusive.
 *
 * <p>Closing it closes the optimizers and states made from it. The memory of the gradients is given back at once, or, while
 * views of it are reachable, when the garbage collector finds the last one gone.
 */
public final class Ddp extends NativeObject {
    private final Params params;
    private final List<Tensor> tensors; // those of params
    private final Comm comm; // not closed by us; reachable while we are
    private final Tensor[] grads; // cleared by close()
    private final FloatBuffer[] floats;

    private Ddp(long handle, Comm comm, Params params) {
        super(new Ref("Ddp", handle, Native::ddpDestroy).keep(params));
        this.comm = comm;
        this.params = params;
        tensors = params.tensors();
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
     * @param params contiguous, floating-point; their memory is kept reachable until this object is closed
     * @param options sizes of buckets, reduction
     * @return the DDP object
     * @throws TesseraMismatchException if the ranks' parameters differ; names the first difference
     */
    public static Ddp create(Comm comm, Params params, DdpOptions options) {
        final byte[][] names = params.nameBytes();
        final long handle = comm.ref.callLongExclusive(c -> Native.ddpCreate(c, names, params.descriptors(), options.given,
                options.bucketBytes, options.firstBucketBytes, options.op));
        return new Ddp(handle, comm, params);
    }

    /**
     * The parameters, as they were registered.
     *
     * @return the parameters
     */
    public Params params() {
        return params;
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
     * The values of a parameter of F32: the memory that it was registered with, which {@link Optimizer#step} updates.
     *
     * @param index 0 to size - 1
     * @return elements row-major, position 0
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #paramTensor}
     */
    public FloatBuffer param(int index) {
        return paramTensor(index).floats();
    }

    /**
     * A parameter, as it was registered.
     *
     * @param index 0 to size - 1
     * @return of the parameter's dtype and shape
     */
    public Tensor paramTensor(int index) {
        return ref.call(h -> tensors.get(check(index)));
    }

    /**
     * The gradient of a parameter of F32: a view into a bucket, zero at first, the same memory at every step. It must not be
     * touched between {@link #ready} and {@link #await}.
     *
     * @param index 0 to size - 1
     * @return elements row-major, position 0; the same object at every call
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #gradTensor}
     */
    public FloatBuffer grad(int index) {
        return ref.call(h -> {
            synchronized (floats) {
                if (floats[check(index)] == null) {
                    floats[index] = gradTensor(index).floats();
                }
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
                    final long[] descriptor = Native.ddpGrad(h, index);
                    final Tensor bare = Tensor.overNative(descriptor, null);
                    final Views.View view = new Views.View(ref, bare.address(), bare.sizeBytes());
                    grads[index] = Tensor.overNative(descriptor, view.owner());
                }
                return grads[index];
            }
        });
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

    /** Say that every gradient not yet said is written. */
    public void readyAll() {
        ref.runExclusive(Native::ddpReadyAll);
    }

    /**
     * The end of backward: returns when every gradient is the average (or sum) over the ranks. Collective.
     *
     * @throws TesseraInvalidStateException if parameters were never said ready (names them); the step may be completed and
     *     waited for again
     */
    public void await() {
        ref.runExclusive(Native::ddpWait);
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
        if (index < 0 || index >= params.size()) {
            throw new IndexOutOfBoundsException("parameter " + index + " of " + params.size());
        }
        return index;
    }

    /** The names of the parameters. */
    @Override
    public String toString() {
        final List<String> names = params.names();
        return "Ddp(" + comm + ", " + names + ")";
    }
}
