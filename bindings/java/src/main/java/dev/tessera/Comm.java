package dev.tessera;

import java.lang.ref.Reference;
import java.util.List;

/**
 * The ranks of a group and their collectives. Every rank must call the same collectives in the same order. It is an object:
 * several may live in one JVM, also those of several ranks, one thread each.
 *
 * <p>Collectives are <em>exclusive</em> (one thread at a time). Each has an {@code …Async} twin that returns a {@link Work}
 * at once; operations run in the order in which they were issued. A collective that fails (timeout, lost peer, mismatch,
 * interruption) fails the communicator: later calls throw {@link TesseraAbortedException} with the first error as cause.
 *
 * <p>All collectives throw {@link TesseraTimeoutException} (naming who is late), {@link TesseraPeerLostException},
 * {@link TesseraMismatchException} (operation, dtype, count or root differ between ranks),
 * {@link TesseraAbortedException}, {@link TesseraInterruptedException} and {@link TesseraInvalidArgumentException}; the
 * asynchronous ones from {@link Work#await()} as well.
 */
public final class Comm extends NativeObject {
    private final int rank;
    private final int worldSize;
    private final Object parent; // keeps a store or mesh reachable

    private Comm(Ref ref, Object parent) {
        super(ref);
        this.parent = parent;
        rank = (int) ref.callLong(Native::commRank);
        worldSize = (int) ref.callLong(Native::commWorldSize);
    }

    private static Ref ref(long handle) {
        return new Ref("Comm", handle, Native::commDestroy)
                .wakenBy(h -> Native.commAbort(h, Native.utf8("closed while in use", "reason")));
    }

    /**
     * Join the job that the environment describes, with default options: {@code tessera run}, torchrun, mpirun or srun; with
     * none of them a communicator of one rank. Under a launcher, an exception that ends the calling thread is told to it from
     * now on; see {@link Launch#recordError(Throwable)}.
     *
     * @return the communicator
     * @throws TesseraTimeoutException if a rank never came
     * @throws TesseraPeerLostException if a rank of {@code tessera run} ended without coming
     * @throws TesseraPermissionException if the job token is missing or wrong
     */
    public static Comm fromEnv() {
        return fromEnv(new CommOptions());
    }

    /**
     * Join the job that the environment describes. Under a launcher, an exception that ends the calling thread is told to
     * it from now on; see {@link Launch#recordError(Throwable)}.
     *
     * @param options deadline, transport, name
     * @return the communicator
     * @throws TesseraTimeoutException if a rank never came
     * @throws TesseraPeerLostException if a rank of {@code tessera run} ended without coming
     * @throws TesseraPermissionException if the job token is missing or wrong
     */
    public static Comm fromEnv(CommOptions options) {
        final Comm comm = new Comm(ref(Native.commFromEnv(
                options.given, options.timeoutMs, options.spinCount, options.backend, options.name)), null);
        Launch.recordUncaught();
        return comm;
    }

    /**
     * Join {@code worldSize} ranks that use the same store, with default options.
     *
     * @param store stays open natively until the communicator is closed
     * @param rank 0 to worldSize - 1, each once
     * @param worldSize 1 to 4096
     * @return the communicator
     * @throws TesseraTimeoutException if a rank never came
     */
    public static Comm create(Store store, int rank, int worldSize) {
        return create(store, rank, worldSize, new CommOptions());
    }

    /**
     * Join {@code worldSize} ranks that use the same store.
     *
     * @param store stays open natively until the communicator is closed
     * @param rank 0 to worldSize - 1, each once
     * @param worldSize 1 to 4096
     * @param options deadline, transport, name
     * @return the communicator
     * @throws TesseraTimeoutException if a rank never came
     */
    public static Comm create(Store store, int rank, int worldSize, CommOptions options) {
        final long handle = store.ref.callLong(s -> Native.commCreate(s, rank, worldSize, options.given, options.timeoutMs,
                options.spinCount, options.backend, options.name));
        return new Comm(ref(handle).borrow(store.ref), store);
    }

    /** The communicator of a mesh's dimension: the mesh's own, closed with it. */
    static Comm ofMesh(Mesh mesh, long handle) {
        return new Comm(new Ref("Comm", handle, h -> { })
                .wakenBy(h -> Native.commAbort(h, Native.utf8("closed while in use", "reason")))
                .mayLeak().dependOn(mesh.ref), mesh);
    }

    /**
     * Divide the ranks into groups: those of one {@code color} form one, ordered by {@code key}, then by rank. Collective,
     * exclusive. The options are this communicator's.
     *
     * @param color negative: this rank joins no group
     * @param key order inside the group
     * @return the communicator of this rank's group; null if {@code color} is negative
     */
    public Comm split(int color, int key) {
        return splitWith(color, key, true, new CommOptions());
    }

    /**
     * Divide the ranks into groups, as {@link #split(int, int)}.
     *
     * @param color negative: this rank joins no group
     * @param key order inside the group
     * @param options those of the new communicator
     * @return the communicator of this rank's group; null if {@code color} is negative
     */
    public Comm split(int color, int key, CommOptions options) {
        return splitWith(color, key, false, options);
    }

    private Comm splitWith(int color, int key, boolean inherit, CommOptions options) {
        final long handle = ref.callLongExclusive(h -> Native.commSplit(h, color, key, inherit, options.given,
                options.timeoutMs, options.spinCount, options.backend, options.name));
        return handle == 0 ? null : new Comm(ref(handle), null);
    }

    /**
     * This rank's number.
     *
     * @return 0 to worldSize - 1
     */
    public int rank() {
        return rank;
    }

    /**
     * The number of ranks.
     *
     * @return at least 1
     */
    public int worldSize() {
        return worldSize;
    }

    /**
     * The transport in use.
     *
     * @return "shm", "gloo" or "self"
     */
    public String transport() {
        return ref.call(h -> Native.text(Native.commTransport(h)));
    }

    /**
     * What failed the communicator. May be asked from any thread.
     *
     * @return the first error; null while the communicator is well
     */
    public TesseraException error() {
        return ref.call(h -> (TesseraException) Native.commError(h));
    }

    /**
     * Fail every waiting and later operation with ABORTED, here and at the peers. May be called from any thread, and again.
     *
     * @param reason told to the peers; may be null
     */
    public void abort(String reason) {
        final byte[] text = Native.optionalUtf8(reason, "reason");
        ref.run(h -> Native.commAbort(h, text));
    }

    /**
     * Wait for all ranks and all issued work; no collective may follow. Collective, exclusive. A program that ends well
     * calls it before {@link #close}.
     */
    public void finish() {
        ref.runExclusive(Native::commFinalize);
    }

    /**
     * Leave the communicator. Local: what is still running is aborted, also calls of other threads, which throw
     * {@link TesseraAbortedException}.
     */
    @Override
    public void close() {
        super.close();
    }

    private void run(Operation operation) {
        try {
            ref.callLongExclusive(h -> operation.issue(h, false));
        } finally {
            Reference.reachabilityFence(operation);
        }
    }

    private Work start(Operation operation) {
        final Work[] work = new Work[1];
        ref.runExclusive(h -> work[0] = new Work(operation.issue(h, true), new Object[] {operation, this}));
        return work[0];
    }

    /**
     * Reduce a tensor over the ranks, in place; every rank gets the same bits.
     *
     * @param tensor input and result
     * @param op the reduction
     */
    public void allReduce(Tensor tensor, ReduceOp op) {
        run(Operation.allReduce(List.of(tensor), op));
    }

    /**
     * Reduce a tensor over the ranks, in place; every rank gets the same bits. Returns at once.
     *
     * @param tensor input and result
     * @param op the reduction
     * @return the operation in flight
     */
    public Work allReduceAsync(Tensor tensor, ReduceOp op) {
        return start(Operation.allReduce(List.of(tensor), op));
    }

    /**
     * Reduce tensors over the ranks, in place, in the order given; every rank gets the same bits.
     *
     * @param tensors input and result, of one dtype; as many on every rank
     * @param op the reduction
     */
    public void allReduce(List<Tensor> tensors, ReduceOp op) {
        run(Operation.allReduce(tensors, op));
    }

    /**
     * Reduce tensors over the ranks, in place, in the order given; every rank gets the same bits. Returns at once.
     *
     * @param tensors input and result, of one dtype; as many on every rank
     * @param op the reduction
     * @return the operation in flight
     */
    public Work allReduceAsync(List<Tensor> tensors, ReduceOp op) {
        return start(Operation.allReduce(tensors, op));
    }

    /**
     * Reduce {@code input} and leave the r-th of worldSize equal parts on rank r.
     *
     * @param input worldSize times the elements of output
     * @param output this rank's part; may be the r-th part of input
     * @param op the reduction
     */
    public void reduceScatter(Tensor input, Tensor output, ReduceOp op) {
        run(Operation.reduceScatter(input, output, op));
    }

    /**
     * Reduce {@code input} and leave the r-th of worldSize equal parts on rank r. Returns at once.
     *
     * @param input worldSize times the elements of output
     * @param output this rank's part; may be the r-th part of input
     * @param op the reduction
     * @return the operation in flight
     */
    public Work reduceScatterAsync(Tensor input, Tensor output, ReduceOp op) {
        return start(Operation.reduceScatter(input, output, op));
    }

    /**
     * Concatenate all ranks' {@code input} in rank order.
     *
     * @param input this rank's part; may be the r-th part of output
     * @param output worldSize times the elements of input
     */
    public void allGather(Tensor input, Tensor output) {
        run(Operation.allGather(input, output));
    }

    /**
     * Concatenate all ranks' {@code input} in rank order. Returns at once.
     *
     * @param input this rank's part; may be the r-th part of output
     * @param output worldSize times the elements of input
     * @return the operation in flight
     */
    public Work allGatherAsync(Tensor input, Tensor output) {
        return start(Operation.allGather(input, output));
    }

    /**
     * Gather inputs of different lengths: {@code outputs.get(r)} receives rank r's input.
     *
     * @param input this rank's part, as long as outputs.get(rank())
     * @param outputs one tensor a rank; the same lengths on every rank
     */
    public void allGather(Tensor input, List<Tensor> outputs) {
        run(Operation.allGather(input, outputs, worldSize));
    }

    /**
     * Gather inputs of different lengths: {@code outputs.get(r)} receives rank r's input. Returns at once.
     *
     * @param input this rank's part, as long as outputs.get(rank())
     * @param outputs one tensor a rank; the same lengths on every rank
     * @return the operation in flight
     */
    public Work allGatherAsync(Tensor input, List<Tensor> outputs) {
        return start(Operation.allGather(input, outputs, worldSize));
    }

    /**
     * Give every rank the root's tensor.
     *
     * @param tensor read on the root, written elsewhere
     * @param root a rank
     */
    public void broadcast(Tensor tensor, int root) {
        run(Operation.broadcast(List.of(tensor), root));
    }

    /**
     * Give every rank the root's tensor. Returns at once.
     *
     * @param tensor read on the root, written elsewhere
     * @param root a rank
     * @return the operation in flight
     */
    public Work broadcastAsync(Tensor tensor, int root) {
        return start(Operation.broadcast(List.of(tensor), root));
    }

    /**
     * Give every rank the root's tensors.
     *
     * @param tensors of one dtype; read on the root, written elsewhere
     * @param root a rank
     */
    public void broadcast(List<Tensor> tensors, int root) {
        run(Operation.broadcast(tensors, root));
    }

    /**
     * Give every rank the root's tensors. Returns at once.
     *
     * @param tensors of one dtype; read on the root, written elsewhere
     * @param root a rank
     * @return the operation in flight
     */
    public Work broadcastAsync(List<Tensor> tensors, int root) {
        return start(Operation.broadcast(tensors, root));
    }

    /**
     * Reduce {@code input}; the result is on the root alone.
     *
     * @param input as many elements on every rank
     * @param output written on the root, null elsewhere; may be input
     * @param op the reduction
     * @param root a rank
     */
    public void reduce(Tensor input, Tensor output, ReduceOp op, int root) {
        run(Operation.reduce(input, output, op, root));
    }

    /**
     * Reduce {@code input}; the result is on the root alone. Returns at once.
     *
     * @param input as many elements on every rank
     * @param output written on the root, null elsewhere; may be input
     * @param op the reduction
     * @param root a rank
     * @return the operation in flight
     */
    public Work reduceAsync(Tensor input, Tensor output, ReduceOp op, int root) {
        return start(Operation.reduce(input, output, op, root));
    }

    /**
     * Concatenate all ranks' {@code input} on the root.
     *
     * @param input as many elements on every rank
     * @param output on the root worldSize times the elements of input, null elsewhere
     * @param root a rank
     */
    public void gather(Tensor input, Tensor output, int root) {
        run(Operation.gather(input, output, root));
    }

    /**
     * Concatenate all ranks' {@code input} on the root. Returns at once.
     *
     * @param input as many elements on every rank
     * @param output on the root worldSize times the elements of input, null elsewhere
     * @param root a rank
     * @return the operation in flight
     */
    public Work gatherAsync(Tensor input, Tensor output, int root) {
        return start(Operation.gather(input, output, root));
    }

    /**
     * Give rank r the r-th of worldSize equal parts of the root's {@code input}.
     *
     * @param input on the root worldSize times the elements of output, null elsewhere
     * @param output this rank's part
     * @param root a rank
     */
    public void scatter(Tensor input, Tensor output, int root) {
        run(Operation.scatter(input, output, root));
    }

    /**
     * Give rank r the r-th of worldSize equal parts of the root's {@code input}. Returns at once.
     *
     * @param input on the root worldSize times the elements of output, null elsewhere
     * @param output this rank's part
     * @param root a rank
     * @return the operation in flight
     */
    public Work scatterAsync(Tensor input, Tensor output, int root) {
        return start(Operation.scatter(input, output, root));
    }

    /**
     * Send the r-th of worldSize equal parts of {@code input} to rank r; parts arrive in rank order.
     *
     * @param input a multiple of worldSize elements
     * @param output as many elements as input
     */
    public void allToAll(Tensor input, Tensor output) {
        run(Operation.allToAll(input, output));
    }

    /**
     * Send the r-th of worldSize equal parts of {@code input} to rank r; parts arrive in rank order. Returns at once.
     *
     * @param input a multiple of worldSize elements
     * @param output as many elements as input
     * @return the operation in flight
     */
    public Work allToAllAsync(Tensor input, Tensor output) {
        return start(Operation.allToAll(input, output));
    }

    /**
     * Send a tensor to {@code peer}, which receives it with the same tag. Not collective.
     *
     * @param tensor what is sent
     * @param peer a rank other than this one
     * @param tag not negative
     */
    public void send(Tensor tensor, int peer, int tag) {
        run(Operation.send(tensor, peer, tag));
    }

    /**
     * Send a tensor to {@code peer}, which receives it with the same tag. Not collective. Returns at once.
     *
     * @param tensor what is sent
     * @param peer a rank other than this one
     * @param tag not negative
     * @return the operation in flight
     */
    public Work sendAsync(Tensor tensor, int peer, int tag) {
        return start(Operation.send(tensor, peer, tag));
    }

    /**
     * Receive a tensor from {@code peer}. Not collective.
     *
     * @param tensor of the dtype and number of elements that were sent
     * @param peer a rank other than this one
     * @param tag not negative
     */
    public void receive(Tensor tensor, int peer, int tag) {
        run(Operation.receive(tensor, peer, tag));
    }

    /**
     * Receive a tensor from {@code peer}. Not collective. Returns at once.
     *
     * @param tensor of the dtype and number of elements that were sent
     * @param peer a rank other than this one
     * @param tag not negative
     * @return the operation in flight
     */
    public Work receiveAsync(Tensor tensor, int peer, int tag) {
        return start(Operation.receive(tensor, peer, tag));
    }

    /** Return when every rank has called it. */
    public void barrier() {
        run(Operation.barrier());
    }

    /**
     * A barrier that does not wait here: the work is done when every rank has issued it.
     *
     * @return the operation in flight
     */
    public Work barrierAsync() {
        return start(Operation.barrier());
    }

    /** Rank, world size and, while open, the transport. */
    @Override
    public String toString() {
        return "Comm(rank " + rank + " of " + worldSize + (isClosed() ? ", closed)" : ")");
    }
}
