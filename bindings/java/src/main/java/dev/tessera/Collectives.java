package dev.tessera;

import java.lang.ref.Reference;
import java.util.List;

/**
 * The collectives of a {@link Comm}, each in a synchronous and an asynchronous form.
 *
 * <p>They are <em>exclusive</em> (one thread at a time), and every rank must call the same ones in the same order. Each
 * has an {@code …Async} variant that immediately returns a {@link Work}; operations run in the order in which they were
 * issued. A collective that fails (timeout, lost peer, mismatch, interruption) fails the communicator: later calls
 * throw {@link TesseraAbortedException} with the first error as cause.
 *
 * <p>All throw {@link TesseraTimeoutException} (naming the late ranks), {@link TesseraPeerLostException}, {@link
 * TesseraMismatchException} (operation, dtype, count or root differ between ranks), {@link TesseraAbortedException},
 * {@link TesseraInterruptedException} and {@link TesseraInvalidArgumentException}; the asynchronous ones from {@link
 * Work#await()} as well. Reducing a dtype that cannot be reduced (BOOL, I16 and the other checkpoint-only dtypes) fails
 * with {@link ErrorCode#UNSUPPORTED}.
 *
 * <p>Tensors on CUDA devices ({@link Tensor#ofAddress}) need the backend {@code "cpu:auto,cuda:nccl"}. Their collectives
 * run in the order of the device's default stream, or of the one given to {@link Comm#onStream}, and return once they are
 * on it. Messages between two ranks match in their order, whatever their tags.
 */
public abstract class Collectives extends NativeObject {
    final long stream; // of CUDA; 0: the default stream

    Collectives(Ref ref) {
        super(ref);
        this.stream = 0;
    }

    Collectives(Collectives viewed, long stream) {
        super(viewed);
        this.stream = stream;
    }

    /**
     * The number of ranks.
     *
     * @return at least 1
     */
    public abstract int worldSize();

    private void run(Operation operation) {
        try {
            ref.callLongExclusive(h -> operation.issue(h, stream, false));
        } finally {
            Reference.reachabilityFence(operation);
        }
    }

    private Work start(Operation operation) {
        final Work[] work = new Work[1];
        ref.runExclusive(h -> {
            work[0] = new Work(operation.issue(h, stream, true), new Object[] {operation, this});
            operation.isDoneBy(work[0].completion());
        });
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
     * Reduce a tensor over the ranks, in place; every rank gets the same bits. Returns immediately.
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
     * @param tensors input and result, of one dtype; the same number on every rank
     * @param op the reduction
     */
    public void allReduce(List<Tensor> tensors, ReduceOp op) {
        run(Operation.allReduce(tensors, op));
    }

    /**
     * Reduce tensors over the ranks, in place, in the order given; every rank gets the same bits. Returns immediately.
     *
     * @param tensors input and result, of one dtype; the same number on every rank
     * @param op the reduction
     * @return the operation in flight
     */
    public Work allReduceAsync(List<Tensor> tensors, ReduceOp op) {
        return start(Operation.allReduce(tensors, op));
    }

    /**
     * Reduce {@code input}; rank r gets the r-th of worldSize equal parts of the result.
     *
     * @param input worldSize times the elements of output
     * @param output this rank's part; may be the r-th part of input
     * @param op the reduction
     */
    public void reduceScatter(Tensor input, Tensor output, ReduceOp op) {
        run(Operation.reduceScatter(input, output, op));
    }

    /**
     * Reduce {@code input}; rank r gets the r-th of worldSize equal parts of the result. Returns immediately.
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
     * Concatenate all ranks' {@code input} in rank order. Returns immediately.
     *
     * @param input this rank's part; may be the r-th part of output
     * @param output worldSize times the elements of input
     * @return the operation in flight
     */
    public Work allGatherAsync(Tensor input, Tensor output) {
        return start(Operation.allGather(input, output));
    }

    /**
     * Several {@link #reduceScatter} in one operation: the ranks synchronise once, and small tensors are sent together.
     *
     * @param inputs of one dtype; the same number on every rank
     * @param outputs outputs.get(i) receives this rank's part of inputs.get(i); only the tensors of a pair may share
     *     memory
     * @param op the reduction
     */
    public void reduceScatterCoalesced(List<Tensor> inputs, List<Tensor> outputs, ReduceOp op) {
        run(Operation.reduceScatterCoalesced(inputs, outputs, op));
    }

    /**
     * Several {@link #reduceScatter} in one operation. Returns immediately.
     *
     * @param inputs of one dtype; the same number on every rank
     * @param outputs outputs.get(i) receives this rank's part of inputs.get(i); only the tensors of a pair may share
     *     memory
     * @param op the reduction
     * @return the operation in flight
     */
    public Work reduceScatterCoalescedAsync(List<Tensor> inputs, List<Tensor> outputs, ReduceOp op) {
        return start(Operation.reduceScatterCoalesced(inputs, outputs, op));
    }

    /**
     * Several {@link #allGather(Tensor, Tensor)} in one operation: the ranks synchronise once, and small tensors are
     * sent together.
     *
     * @param inputs of one dtype; the same number on every rank
     * @param outputs outputs.get(i) receives inputs.get(i) of all ranks; only the tensors of a pair may share memory
     */
    public void allGatherCoalesced(List<Tensor> inputs, List<Tensor> outputs) {
        run(Operation.allGatherCoalesced(inputs, outputs));
    }

    /**
     * Several {@link #allGather(Tensor, Tensor)} in one operation. Returns immediately.
     *
     * @param inputs of one dtype; the same number on every rank
     * @param outputs outputs.get(i) receives inputs.get(i) of all ranks; only the tensors of a pair may share memory
     * @return the operation in flight
     */
    public Work allGatherCoalescedAsync(List<Tensor> inputs, List<Tensor> outputs) {
        return start(Operation.allGatherCoalesced(inputs, outputs));
    }

    /**
     * Gather inputs of different lengths: {@code outputs.get(r)} receives rank r's input.
     *
     * @param input this rank's part, of the same length as outputs.get(rank())
     * @param outputs one tensor per rank; the same lengths on every rank
     */
    public void allGather(Tensor input, List<Tensor> outputs) {
        run(Operation.allGather(input, outputs, worldSize()));
    }

    /**
     * Gather inputs of different lengths: {@code outputs.get(r)} receives rank r's input. Returns immediately.
     *
     * @param input this rank's part, of the same length as outputs.get(rank())
     * @param outputs one tensor per rank; the same lengths on every rank
     * @return the operation in flight
     */
    public Work allGatherAsync(Tensor input, List<Tensor> outputs) {
        return start(Operation.allGather(input, outputs, worldSize()));
    }

    /**
     * Broadcast the root's tensor to every rank.
     *
     * @param tensor read on the root, written elsewhere
     * @param root a rank
     */
    public void broadcast(Tensor tensor, int root) {
        run(Operation.broadcast(List.of(tensor), root));
    }

    /**
     * Broadcast the root's tensor to every rank. Returns immediately.
     *
     * @param tensor read on the root, written elsewhere
     * @param root a rank
     * @return the operation in flight
     */
    public Work broadcastAsync(Tensor tensor, int root) {
        return start(Operation.broadcast(List.of(tensor), root));
    }

    /**
     * Broadcast the root's tensors to every rank.
     *
     * @param tensors of one dtype; read on the root, written elsewhere
     * @param root a rank
     */
    public void broadcast(List<Tensor> tensors, int root) {
        run(Operation.broadcast(tensors, root));
    }

    /**
     * Broadcast the root's tensors to every rank. Returns immediately.
     *
     * @param tensors of one dtype; read on the root, written elsewhere
     * @param root a rank
     * @return the operation in flight
     */
    public Work broadcastAsync(List<Tensor> tensors, int root) {
        return start(Operation.broadcast(tensors, root));
    }

    /**
     * Reduce {@code input}; only the root gets the result.
     *
     * @param input the same number of elements on every rank
     * @param output written on the root, null elsewhere; may be input
     * @param op the reduction
     * @param root a rank
     */
    public void reduce(Tensor input, Tensor output, ReduceOp op, int root) {
        run(Operation.reduce(input, output, op, root));
    }

    /**
     * Reduce {@code input}; only the root gets the result. Returns immediately.
     *
     * @param input the same number of elements on every rank
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
     * @param input the same number of elements on every rank
     * @param output on the root worldSize times the elements of input, null elsewhere
     * @param root a rank
     */
    public void gather(Tensor input, Tensor output, int root) {
        run(Operation.gather(input, output, root));
    }

    /**
     * Concatenate all ranks' {@code input} on the root. Returns immediately.
     *
     * @param input the same number of elements on every rank
     * @param output on the root worldSize times the elements of input, null elsewhere
     * @param root a rank
     * @return the operation in flight
     */
    public Work gatherAsync(Tensor input, Tensor output, int root) {
        return start(Operation.gather(input, output, root));
    }

    /**
     * Send rank r the r-th of worldSize equal parts of the root's {@code input}.
     *
     * @param input on the root worldSize times the elements of output, null elsewhere
     * @param output this rank's part
     * @param root a rank
     */
    public void scatter(Tensor input, Tensor output, int root) {
        run(Operation.scatter(input, output, root));
    }

    /**
     * Send rank r the r-th of worldSize equal parts of the root's {@code input}. Returns immediately.
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
     * @param output the same number of elements as input
     */
    public void allToAll(Tensor input, Tensor output) {
        run(Operation.allToAll(input, output));
    }

    /**
     * Send the r-th of worldSize equal parts of {@code input} to rank r; parts arrive in rank order. Returns
     * immediately.
     *
     * @param input a multiple of worldSize elements
     * @param output the same number of elements as input
     * @return the operation in flight
     */
    public Work allToAllAsync(Tensor input, Tensor output) {
        return start(Operation.allToAll(input, output));
    }

    /**
     * Send a tensor to {@code peer}, which receives it with the same tag. Not collective.
     *
     * @param tensor the data to send
     * @param peer a rank other than this one
     * @param tag not negative
     */
    public void send(Tensor tensor, int peer, int tag) {
        run(Operation.send(tensor, peer, tag));
    }

    /**
     * Send a tensor to {@code peer}, which receives it with the same tag. Not collective. Returns immediately.
     *
     * @param tensor the data to send
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
     * @param tensor with the dtype and number of elements that the peer sends
     * @param peer a rank other than this one
     * @param tag not negative
     */
    public void receive(Tensor tensor, int peer, int tag) {
        run(Operation.receive(tensor, peer, tag));
    }

    /**
     * Receive a tensor from {@code peer}. Not collective. Returns immediately.
     *
     * @param tensor with the dtype and number of elements that the peer sends
     * @param peer a rank other than this one
     * @param tag not negative
     * @return the operation in flight
     */
    public Work receiveAsync(Tensor tensor, int peer, int tag) {
        return start(Operation.receive(tensor, peer, tag));
    }

    /** Return once every rank has called it. */
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
}
