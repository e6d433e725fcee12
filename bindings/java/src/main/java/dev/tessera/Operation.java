package dev.tessera;

import java.util.ArrayList;
import java.util.List;

/**
 * A collective or a message, ready to be issued, with the tensors whose memory it uses. They stay reachable as long as
 * this object, even if the caller changes its list. Each may be issued synchronously or in the background.
 */
final class Operation {
    /** The call of a shim. */
    interface Shim {
        /**
         * The handle of the work, or 0 if it is not {@code async}: then it is done on return.
         *
         * @param handle of the communicator or model
         * @param stream of CUDA; 0 for the default stream
         */
        long issue(long handle, long stream, boolean async);
    }

    private final Shim shim;
    private final List<Tensor> memory; // an absent tensor is null

    Operation(Shim shim, Tensor... memory) {
        this(shim, java.util.Arrays.asList(memory));
    }

    /** The list is not changed by anybody. */
    private Operation(Shim shim, List<Tensor> memory) {
        this.shim = shim;
        this.memory = memory;
    }

    private static List<Tensor> with(List<Tensor> list, Tensor one) {
        final List<Tensor> all = new ArrayList<>(list);
        all.add(one);
        return all;
    }

    long issue(long handle, long stream, boolean async) {
        return shim.issue(handle, stream, async);
    }

    /** Whether its tensors are on a CUDA device. */
    boolean isOnDevice() {
        return !memory.isEmpty() && !memory.get(0).device().equals(Device.cpu());
    }

    /** Lent memory is not taken back before. */
    void isDoneBy(Work.Completion work) {
        for (Tensor tensor : memory) {
            if (tensor != null) {
                tensor.usedBy(work);
            }
        }
    }

    static Operation allReduce(List<Tensor> tensors, ReduceOp op) {
        final List<Tensor> own = List.copyOf(tensors);
        final long[] all = Tensor.descriptors(own);
        final int number = op.number();
        return new Operation((h, stream, async) -> Native.commAllReduce(h, all, number, stream, async), own);
    }

    static Operation reduceScatter(Tensor input, Tensor output, ReduceOp op) {
        final long[] in = input.descriptor();
        final long[] out = output.descriptor();
        final int number = op.number();
        return new Operation((h, stream, async) -> Native.commReduceScatter(h, in, out, number, stream, async), input, output);
    }

    static Operation allGather(Tensor input, Tensor output) {
        final long[] in = input.descriptor();
        final long[] out = output.descriptor();
        return new Operation((h, stream, async) -> Native.commAllGather(h, in, out, stream, async), input, output);
    }

    static Operation reduceScatterCoalesced(List<Tensor> inputs, List<Tensor> outputs, ReduceOp op) {
        final List<Tensor> own = pairs(inputs, outputs);
        final long[] in = Tensor.descriptors(own.subList(0, own.size() / 2));
        final long[] out = Tensor.descriptors(own.subList(own.size() / 2, own.size()));
        final int number = op.number();
        return new Operation((h, stream, async) -> Native.commReduceScatterCoalesced(h, in, out, number, stream, async), own);
    }

    static Operation allGatherCoalesced(List<Tensor> inputs, List<Tensor> outputs) {
        final List<Tensor> own = pairs(inputs, outputs);
        final long[] in = Tensor.descriptors(own.subList(0, own.size() / 2));
        final long[] out = Tensor.descriptors(own.subList(own.size() / 2, own.size()));
        return new Operation((h, stream, async) -> Native.commAllGatherCoalesced(h, in, out, stream, async), own);
    }

    /** Both lists, one after the other; the library takes it for granted that they are as long as each other. */
    private static List<Tensor> pairs(List<Tensor> inputs, List<Tensor> outputs) {
        final List<Tensor> own = new ArrayList<>(List.copyOf(inputs));
        if (own.size() != outputs.size()) {
            throw new IllegalArgumentException("got " + own.size() + " inputs and " + outputs.size()
                    + " outputs; pass them in pairs");
        }
        own.addAll(List.copyOf(outputs));
        return own;
    }

    static Operation allGather(Tensor input, List<Tensor> outputs, int worldSize) {
        final List<Tensor> own = List.copyOf(outputs);
        if (own.size() != worldSize) { // the library takes their number for granted
            throw new IllegalArgumentException("got " + own.size() + " outputs for " + worldSize + " ranks; pass one per rank");
        }
        final long[] in = input.descriptor();
        final long[] out = Tensor.descriptors(own);
        return new Operation((h, stream, async) -> Native.commAllGatherV(h, in, out, stream, async), with(own, input));
    }

    static Operation broadcast(List<Tensor> tensors, int root) {
        final List<Tensor> own = List.copyOf(tensors);
        final long[] all = Tensor.descriptors(own);
        return new Operation((h, stream, async) -> Native.commBroadcast(h, all, root, stream, async), own);
    }

    static Operation reduce(Tensor input, Tensor output, ReduceOp op, int root) {
        final long[] in = input.descriptor();
        final long[] out = Tensor.optionalDescriptor(output);
        final int number = op.number();
        return new Operation((h, stream, async) -> Native.commReduce(h, in, out, number, root, stream, async), input, output);
    }

    static Operation gather(Tensor input, Tensor output, int root) {
        final long[] in = input.descriptor();
        final long[] out = Tensor.optionalDescriptor(output);
        return new Operation((h, stream, async) -> Native.commGather(h, in, out, root, stream, async), input, output);
    }

    static Operation scatter(Tensor input, Tensor output, int root) {
        final long[] in = Tensor.optionalDescriptor(input);
        final long[] out = output.descriptor();
        return new Operation((h, stream, async) -> Native.commScatter(h, in, out, root, stream, async), input, output);
    }

    static Operation allToAll(Tensor input, Tensor output) {
        final long[] in = input.descriptor();
        final long[] out = output.descriptor();
        return new Operation((h, stream, async) -> Native.commAllToAll(h, in, out, stream, async), input, output);
    }

    static Operation send(Tensor tensor, int peer, int tag) {
        final long[] one = tensor.descriptor();
        return new Operation((h, stream, async) -> Native.commSend(h, one, peer, tag, stream, async), tensor);
    }

    static Operation receive(Tensor tensor, int peer, int tag) {
        final long[] one = tensor.descriptor();
        return new Operation((h, stream, async) -> Native.commRecv(h, one, peer, tag, stream, async), tensor);
    }

    static Operation barrier() {
        return new Operation((h, stream, async) -> Native.commBarrier(h, async));
    }
}
