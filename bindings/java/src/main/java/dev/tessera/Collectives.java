package dev.tessera;

import java.lang.ref.Reference;
import java.util.List;

/**
 * The collectives of a {@link Comm}, each at once and in the background.
 *
 * <p>They are <em>exclusive</em> (one thread at a time), and every rank must call the same ones in the same order. Each has an
 * {@code …Async} twin that returns a {@link Work} at once; operations run in the order in which they were issued. A collective
 * that fails (timeout, lost peer, mismatch, interruption) fails the communicator: later calls throw
 * {@link TesseraAbortedException} with the first error as cause.
 *
 * <p>All throw {@link TesseraTimeoutException} (naming who is late), {@link TesseraPeerLostException},
 * {@link TesseraMismatchException} (operation, dtype, count or root differ between ranks), {@link TesseraAbortedException},
 * {@link TesseraInterruptedException} and {@link TesseraInvalidArgumentException}; the asynchronous ones from
 * {@link Work#await()} as well. To reduce a dtype that cannot be reduced (BOOL, I16, those for checkpoints) is
 * {@link ErrorCode#UNSUPPORTED}.
 */
public abstract class Collectives extends NativeObject {
    Collectives(Ref ref) {
        super(ref);
    }

    /**
     * The number of ranks.
     *
     * @return at least 1
     */
    public abstract int worldSize();

    private void run(Operation operation) {
        try {
            ref.callLongExclusive(h -> operation.issue(h, false));
        } finally {
            Reference.reachabilityFence(operation);
        }
    }

    private Work start(Operation operation) {
        final Work[] work = new Work[1];
        ref.runExclusive(h -> {
            work[0] = new Work(operation.issue(h, true), new Object[] {operation, this});
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
     * Several {@link #reduceScatter} in one operation: the ranks meet once, and small tensors travel together.
     *
     * @param inputs of one dtype; as many on every rank
     * @param outputs of inputs.get(i) this rank's part goes to outputs.get(i); apart from pairs no two share memory
     * @param op the reduction
     */
    public void reduceScatterCoalesced(List<Tensor> inputs, List<Tensor> outputs, ReduceOp op) {
        run(Operation.reduceScatterCoalesced(inputs, outputs, op));
    }

    /**
     * Several {@link #reduceScatter} in one operation. Returns at once.
     *
     * @param inputs of one dtype; as many on every rank
     * @param outputs of inputs.get(i) this rank's part goes to outputs.get(i); apart from pairs no two share memory
     * @param op the reduction
     * @return the operation in flight
     */
    public Work reduceScatterCoalescedAsync(List<Tensor> inputs, List<Tensor> outputs, ReduceOp op) {
        return start(Operation.reduceScatterCoalesced(inputs, outputs, op));
    }

    /**
     * Several {@link #allGather(Tensor, Tensor)} in one operation: the ranks meet once, and small tensors travel together.
     *
     * @param inputs of one dtype; as many on every rank
     * @param outputs inputs.get(i) of all ranks go to outputs.get(i); apart from pairs no two share memory
     */
    public void allGatherCoalesced(List<Tensor> inputs, List<Tensor> outputs) {
        run(Operation.allGatherCoalesced(inputs, outputs));
    }

    /**
     * Several {@link #allGather(Tensor, Tensor)} in one operation. Returns at once.
     *
     * @param inputs of one dtype; as many on every rank
     * @param outputs inputs.get(i) of all ranks go to outputs.get(i); apart from pairs no two share memory
     * @return the operation in flight
     */
    public Work allGatherCoalescedAsync(List<Tensor> inputs, List<Tensor> outputs) {
        return start(Operation.allGatherCoalesced(inputs, outputs));
    }

    /**
     * Gather inputs of different lengths: {@code outputs.get(r)} receives rank r's input.
     *
     * @param input this rank's part, as long as outputs.get(rank())
     * @param outputs one tensor a rank; the same lengths on every rank
     */
    public void allGather(Tensor input, List<Tensor> outputs) {
        run(Operation.allGather(input, outputs, worldSize()));
    }

    /**
     * Gather inputs of different lengths: {@code outputs.get(r)} receives rank r's input. Returns at once.
     *
     * @param input this rank's part, as long as outputs.get(rank())
     * @param outputs one tensor a rank; the same lengths on every rank
     * @return the operation in flight
     */
    public Work allGatherAsync(Tensor input, List<Tensor> outputs) {
        return start(Operation.allGather(input, outputs, worldSize()));
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
}
