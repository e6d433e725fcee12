package dev.tessera;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * The callbacks of a {@link Pipeline}, which pipeline.cc calls, and the passes that lead to these calls. The library
 * keeps it until the pipeline is destroyed, so it does not refer to the pipeline.
 *
 * <p>Exclusive, like the pipeline: all that changes does so inside a pass, on its thread.
 */
final class StageRelay {
    /** What a call computes, in the order of the library's numbers, which begin with 1. */
    enum Kind { FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT }

    /** A native method. */
    interface Pass {
        double[] run(long pipeline, long[] batch, long[] targets, double[] weights);
    }

    /** The callbacks of one stage. Without {@code backward}, the other two together replace it. */
    static final class Stage {
        private final Pipeline.Callback forward;
        private final Pipeline.Callback backward;
        private final Pipeline.Callback backwardInput;
        private final Pipeline.Callback backwardWeight;

        Stage(Pipeline.Callback forward, Pipeline.Callback backward, Pipeline.Callback backwardInput,
                Pipeline.Callback backwardWeight) {
            this.forward = forward;
            this.backward = backward;
            this.backwardInput = backwardInput;
            this.backwardWeight = backwardWeight;
        }

        boolean isSplit() {
            return backwardInput != null;
        }

        private void run(Kind kind, StageCall call) throws Exception {
            switch (kind) {
                case FORWARD:
                    forward.call(call);
                    break;
                case BACKWARD_INPUT:
                    backwardInput.call(call);
                    break;
                case BACKWARD_WEIGHT:
                    backwardWeight.call(call);
                    break;
                default:
                    if (backward != null) {
                        backward.call(call);
                    } else {
                        backwardInput.call(call);
                        backwardWeight.call(call);
                    }
            }
        }
    }

    /** The memory of a stage's micro-batch, from its forward to the end of its backward. */
    private static final class Cell {
        private final Tensor.Lease reading;
        private final Tensor.Lease made; // by the forward

        Cell(String where, Tensor.Uses uses) {
            final String ending = "the time of " + where + " has ended; its tensors cannot be used any longer";
            reading = new Tensor.Lease(Tensor.Lender.STAGE_CALL, true, ending, uses);
            made = new Tensor.Lease(Tensor.Lender.STAGE_CALL, false, ending, uses);
        }

        void end() {
            reading.end();
            made.end();
        }
    }

    /** What crosses for one call: numbers, the lengths of the lists of tensors, descriptors. */
    final class Words {
        private static final int NUMBERS = 12;
        private static final int INPUTS = 7;
        private static final int TARGETS = 8;
        private static final int INPUT_GRADS = 11;
        private static final int NDIM = 4; // of a descriptor

        private final long[] words;
        private final Tensor.Lease reading;
        private final Tensor.Lease writing;
        private int at = NUMBERS;

        private Words(long[] words, Tensor.Lease reading, Tensor.Lease writing) {
            this.words = words;
            this.reading = reading;
            this.writing = writing;
        }

        long word(int place) {
            return words[place];
        }

        int number(int place) {
            return (int) words[place];
        }

        /** The next list, whose length is at {@code place}. */
        List<Tensor> tensors(int place, boolean gradients) {
            final List<Tensor> list = new ArrayList<>();
            for (int i = 0; i < number(place); ++i) {
                final int end = at + NDIM + 1 + number(at + NDIM);
                final Tensor tensor = Tensor.overNative(Arrays.copyOfRange(words, at, end), ownerOf(place, i));
                list.add(gradients && !isFloating(tensor.dtype()) ? null
                        : tensor.leased(place == INPUT_GRADS ? writing : reading));
                at = end;
            }
            return Collections.unmodifiableList(list);
        }

        /** Rows of the batch and of the targets are in the program's memory. */
        private Object ownerOf(int place, int index) {
            final List<Tensor> own = place == TARGETS ? targets : place == INPUTS && number(1) == 0 ? batch : List.of();
            return index < own.size() ? own.get(index).owner() : null;
        }
    }

    private final Map<Integer, Stage> stages;
    private final Map<List<Integer>, Cell> cells = new HashMap<>(); // by stage and micro-batch
    private final Tensor.Uses uses = new Tensor.Uses();

    // Of the pass that goes on.
    private long pipeline;
    private List<Tensor> batch = List.of();
    private List<Tensor> targets = List.of();
    private Cell cell; // of the call that goes on
    private Throwable thrown;

    StageRelay(Map<Integer, Stage> stages) {
        this.stages = Map.copyOf(stages);
    }

    /** A pass of the pipeline of {@code ref}. */
    double[] run(Ref ref, Pass pass, List<Tensor> inputs, List<Tensor> goals, double[] factors) {
        final List<Tensor> own = List.copyOf(inputs);
        final List<Tensor> ownGoals = List.copyOf(goals);
        final long[] in = Tensor.descriptors(own);
        final long[] out = Tensor.descriptors(ownGoals);
        return ref.callExclusive(h -> {
            pipeline = h;
            batch = own;
            targets = ownGoals;
            thrown = null;
            try {
                return pass.run(h, in, out, factors);
            } catch (TesseraException failed) {
                throw withCause(failed);
            } finally {
                cells.values().forEach(Cell::end);
                cells.clear();
                cell = null;
                uses.hold(ref); // after an exception there may be some
                batch = List.of();
                targets = List.of();
                thrown = null;
            }
        });
    }

    private TesseraException withCause(TesseraException failed) {
        if (thrown != null && failed.getCause() == null) {
            failed.initCause(thrown);
        } else if (thrown != null) {
            failed.addSuppressed(thrown);
        }
        return failed;
    }

    /** Called by the shims; a status, and on failure a message. */
    int call(long[] words, ByteBuffer message) {
        try {
            final Kind kind = Kind.values()[(int) words[0] - 1];
            final int stage = (int) words[1];
            final int microbatch = (int) words[2];
            final String where = "stage " + stage + ", micro-batch " + microbatch;
            final List<Integer> key = List.of(stage, microbatch);
            cell = cells.computeIfAbsent(key, at -> new Cell(where, uses));
            final Tensor.Lease writing = new Tensor.Lease(
                    Tensor.Lender.STAGE_CALL, false, "this call of " + where + " has ended", uses);
            final StageCall call = new StageCall(this, new Words(words, cell.reading, writing));
            try {
                stages.get(stage).run(kind, call);
                uses.requireNone("tensors of " + where);
            } finally {
                call.end();
                writing.end();
                cell.made.freeze();
            }
            final boolean isLast = call.isTraining() ? kind == Kind.BACKWARD || kind == Kind.BACKWARD_WEIGHT : true;
            if (isLast) {
                cell.end();
                cells.remove(key);
            }
            return 0;
        } catch (Throwable error) {
            thrown = error;
            return Failures.failed(error, message);
        }
    }

    /** The handle, in a call. */
    long pipeline() {
        return pipeline;
    }

    /** An output that the forward in progress made. */
    Tensor made(long[] descriptor) {
        return Tensor.overNative(descriptor, null).leased(cell.made);
    }

    private static boolean isFloating(DType dtype) {
        return dtype == DType.F16 || dtype == DType.BF16 || dtype == DType.F32 || dtype == DType.F64;
    }
}
