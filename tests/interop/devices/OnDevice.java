import dev.tessera.Comm;
import dev.tessera.CommOptions;
import dev.tessera.DType;
import dev.tessera.Ddp;
import dev.tessera.Device;
import dev.tessera.ErrorCode;
import dev.tessera.Fsdp;
import dev.tessera.FsdpUnit;
import dev.tessera.Mesh;
import dev.tessera.Optimizer;
import dev.tessera.Params;
import dev.tessera.Pipeline;
import dev.tessera.ReduceOp;
import dev.tessera.Saver;
import dev.tessera.State;
import dev.tessera.Tensor;
import dev.tessera.TensorParallel;
import dev.tessera.TesseraException;
import dev.tessera.Work;
import java.nio.file.Path;
import java.util.List;
import java.util.stream.IntStream;

/**
 * A rank on a simulated CUDA device, for test_devices.py: collectives over memory of the device, a checkpoint of it, what is
 * refused, and steps of DDP, of FSDP, of tensor-parallel models, of a pipeline and of optimizers.
 */
public final class OnDevice {
    private OnDevice() {}

    private static native long allocate(int device, long size);

    private static native void store(long address, float value);

    private static native float load(long address);

    private static void expect(boolean condition, String what) {
        if (!condition) {
            throw new AssertionError(what);
        }
    }

    private static void refused(ErrorCode code, String words, Runnable call) {
        try {
            call.run();
        } catch (TesseraException error) {
            expect(error.code() == code && error.getMessage().contains(words), error.toString());
            return;
        }
        throw new AssertionError(words);
    }

    private static void write(Tensor tensor, float from, float by) {
        for (long i = 0; i < tensor.numel(); ++i) {
            store(tensor.address() + 4 * i, from + i * by);
        }
    }

    private static boolean is(Tensor tensor, float from, float by) {
        for (long i = 0; i < tensor.numel(); ++i) {
            if (load(tensor.address() + 4 * i) != from + i * by) {
                return false;
            }
        }
        return true;
    }

    private static Tensor on(int device, int count, float from, float by) {
        final Tensor tensor = Tensor.ofAddress(allocate(device, 4L * count), DType.F32, Device.cuda(device), count);
        write(tensor, from, by);
        return tensor;
    }

    private static void unreachable(Runnable call) {
        try {
            call.run();
        } catch (UnsupportedOperationException error) {
            expect(error.getMessage().contains("cannot be a ByteBuffer"), error.toString());
            return;
        }
        throw new AssertionError("the host reached a device");
    }

    /**
     * Three steps of SGD, in which rank r's gradient is (r + 1) times the parameter; all ranks make these calls. Element i of
     * w is scale * 8 * (i + 1), of v scale * -4 * (i + 1).
     */
    private static void fsdpTrains(Comm comm) {
        final int rank = comm.rank();
        final int ranks = comm.worldSize();
        final float[] by = {8, -4};
        final int[] counts = {8, 4};
        final boolean counted = rank == 0;
        final List<FsdpUnit> units = List.of(
                FsdpUnit.of("first").and("w", on(rank, 8, counted ? by[0] : rank, counted ? by[0] : 0)),
                FsdpUnit.of("second")
                        .and("v", on(rank, 4, counted ? by[1] : rank, counted ? by[1] : 0))
                        .andDeferred("late", DType.F32, Device.cuda(rank), 3)
                        .freeze("late"));
        try (Fsdp fsdp = Fsdp.create(comm, units); Optimizer optimizer = Optimizer.sgd(fsdp).lr(0.25).build()) {
            fsdp.setStream(0);
            optimizer.setStream(0);
            final float average = (ranks + 1) / 2f;
            float scale = 1;
            for (int step = 0; step < 3; ++step) {
                try (Fsdp.Pass pass = fsdp.forward("first")) {
                    expect(pass.paramTensor("w").device().equals(Device.cuda(rank)), "the parameter is on the device");
                    expect(is(pass.paramTensor("w"), scale * by[0], scale * by[0]), "w in forward");
                    unreachable(() -> pass.param("w"));
                    refused(ErrorCode.INVALID_STATE, "is unsharded", () -> fsdp.setStream(0));
                }
                try (Fsdp.Pass pass = fsdp.forward("second")) {
                    expect(is(pass.paramTensor("v"), scale * by[1], scale * by[1]), "v in forward");
                    expect(is(pass.paramTensor("late"), 0, 0), "late in forward");
                }
                for (int p = 1; p >= 0; --p) {
                    try (Fsdp.Pass pass = fsdp.backward(p)) {
                        final Tensor grad = pass.gradTensor(p);
                        expect(is(pass.paramTensor(p), scale * by[p], scale * by[p]), "the parameter in backward");
                        write(grad, (rank + 1) * scale * by[p], (rank + 1) * scale * by[p]);
                        pass.ready();
                    }
                }
                fsdp.await();
                double squares = 0;
                for (int p = 0; p < 2; ++p) {
                    final int first = (counts[p] + ranks - 1) / ranks * rank;
                    final float each = average * scale * by[p];
                    expect(is(fsdp.shardGradTensor(p), each * (first + 1), each), "the average");
                    for (int i = 1; i <= counts[p]; ++i) {
                        squares += (double) each * each * i * i;
                    }
                }
                expect(Math.abs(optimizer.clipGradNorm(1e6) / Math.sqrt(squares) - 1) < 1e-5, "the norm");
                optimizer.step();
                scale -= 0.25f * average * scale;
            }
            try (State state = new State().with("model", fsdp).with("optim", optimizer).setStream(rank, 0);
                    Saver saver = Saver.at(comm, Path.of(System.getenv("CHECKPOINTS"), "fsdp")).open()) {
                saver.save(3, state);
                for (int p = 0; p < 3; ++p) {
                    write(fsdp.shardTensor(p), 7, 0);
                }
                expect(saver.resume(state) == 3, "the step");
            }
            for (int p = 0; p < 2; ++p) {
                final int first = (counts[p] + ranks - 1) / ranks * rank;
                expect(is(fsdp.shardTensor(p), scale * by[p] * (first + 1), scale * by[p]), "what was loaded");
            }
            unreachable(() -> fsdp.shard(0));
            fsdp.unshard(0);
            fsdp.unshard(1);
            for (int p = 0; p < 2; ++p) {
                final Fsdp.Pass pass = fsdp.whole(p);
                expect(is(pass.paramTensor(p), scale * by[p], scale * by[p]), "a parameter after the load");
            }
            fsdp.reshard(0);
            fsdp.reshard(1);
            fsdp.forward(0).close();
            fsdp.abandon();
        }
    }

    private static Tensor at(int device, DType dtype, float from, float by, long... shape) {
        final Tensor tensor = Tensor.ofAddress(allocate(device, 1024), dtype, Device.cuda(device), shape);
        write(tensor, from, by);
        return tensor;
    }

    /** An embedding of 5 words over the ranks, and a norm's weight; all ranks make these calls. */
    private static void tensorParallelTrains(Comm comm) {
        final int rank = comm.rank();
        final int ranks = comm.worldSize();
        final Params params = Params.of("tok", at(rank, DType.F32, rank == 0 ? 0 : -1, rank == 0 ? 1 : 0, 5, 2))
                .and("norm", at(rank, DType.F32, 1, 0, 2));
        try (Mesh mesh = Mesh.over(comm).dim("tp", ranks).build();
                TensorParallel tp = TensorParallel.over(mesh).params(params)
                        .rule("tok", TensorParallel.Style.VOCABULARY)
                        .rule("norm", TensorParallel.Style.SEQUENCE).build();
                Optimizer optimizer = Optimizer.sgd(tp).lr(0.5).build()) {
            tp.setStream(0);
            final int first = (int) Math.min(5, (5 + ranks - 1) / ranks * rank);
            final int own = (int) tp.part(5);
            expect(is(tp.slice("tok"), 2 * first, 1), "the slice");
            final float total = ranks * (ranks + 1) / 2f;
            final Tensor x = at(rank, DType.F32, rank + 1, 0, 1, 2);
            final Tensor part = at(rank, DType.F32, 0, 0, 1, 2);
            final Tensor whole = at(rank, DType.F32, 0, 0, ranks, 2);
            tp.enter(x, 0, whole);
            expect(load(whole.address() + 8L * ranks - 4) == ranks, "what was entered");
            tp.leave(whole, 0, part, tp.slice("norm"));
            expect(is(part, ranks * (rank + 1) + 1, 0), "what was left");
            final Work work = tp.enterBackwardAsync(part, part);
            work.order(0);
            expect(is(part, ranks * total + ranks, 0), "the sum of the gradients");
            work.await();
            final float[] seen = {0};
            tp.enterParts(x, 0, whole, (begin, one) -> seen[0] += begin + load(one.address()));
            expect(seen[0] == ranks * ranks, "the parts");
            tp.leaveParts(ranks, 0, part, (begin, one) -> write(one, begin, 0));
            expect(is(part, ranks * rank, 0), "the sum of the parts");

            final Tensor ids = at(rank, DType.I32, 0, 0, 2);
            store(ids.address(), Float.intBitsToFloat(4));
            final Tensor rows = at(rank, DType.F32, 7, 0, 2, 2);
            tp.embed("tok", ids, rows);
            expect(load(rows.address()) == 8 && load(rows.address() + 12) == 1, "the embedding");
            tp.embedBackward("tok", ids, rows);
            for (int i = first; i < first + own; ++i) {
                final float slope = load(tp.grad("tok").address() + 8L * (i - first) + 4);
                expect(slope == (i == 0 || i == 4 ? 2 * i + 1 : 0), "the embedding's gradient");
            }
            final Tensor logits = at(rank, DType.F32, 0, 0, 2, own);
            final Tensor loss = at(rank, DType.F32, 0, 0);
            tp.crossEntropy(logits, ids, 5, loss, logits);
            expect(Math.abs(load(loss.address()) / Math.log(5) - 1) < 1e-6, "the loss");

            write(tp.grad("norm"), rank + 1, 0);
            refused(ErrorCode.INVALID_STATE, "call sum_grads", optimizer::step);
            tp.sumGrads();
            expect(is(tp.grad("norm"), total, 0), "the sum of the parts of a gradient");
            optimizer.step();
            expect(is(tp.slice("norm"), 1 - 0.5f * total, 0), "the step");
            tp.zeroGrad();
            expect(is(tp.grad("norm"), 0, 0), "no gradient");
        }
    }

    /**
     * Two steps of stages y = (stage + 2) * x, after which each stage's gradient is added to the others'; the loss is the sum
     * of the last y. All ranks make these calls.
     */
    private static void pipelineTrains(Comm comm) {
        final int rank = comm.rank();
        final int last = comm.worldSize() - 1;
        final Tensor grad = on(rank, 1, 0, 0);
        final Pipeline.Callback forward = call -> {
            final Tensor x = call.inputs().get(0);
            final Tensor y = call.output(DType.F32, x.shape());
            expect(y.device().equals(Device.cuda(rank)), "an output is on the device");
            unreachable(x::floats);
            float sum = 0;
            for (long i = 0; i < x.numel(); ++i) {
                final float made = (call.stage() + 2) * load(x.address() + 4 * i);
                store(y.address() + 4 * i, made);
                sum += made;
            }
            if (call.stage() == last) {
                call.loss(sum);
            }
        };
        final Pipeline.Callback backward = call -> {
            final Tensor x = call.inputs().get(0);
            for (long i = 0; i < x.numel(); ++i) {
                final float delta = call.stage() == last ? (float) call.weight()
                        : load(call.outputGrads().get(0).address() + 4 * i);
                store(grad.address(), load(grad.address()) + load(x.address() + 4 * i) * delta);
                if (call.stage() > 0) {
                    store(call.inputGrads().get(0).address() + 4 * i, (call.stage() + 2) * delta);
                }
            }
        };
        final Tensor batch = on(rank, 6, 1, 1); // in micro-batches of 2, 2, 1 and 1
        final float[] sums = {3, 7, 5, 6};
        float product = 1;
        for (int stage = 0; stage <= last; ++stage) {
            product *= stage + 2;
        }
        try (Pipeline pipe = Pipeline.on(comm).stage(rank, forward, backward).microbatches(4).onDevice(true).build()) {
            pipe.setStream(0);
            for (int step = 1; step <= 2; ++step) {
                final double[] losses = pipe.step(batch, null);
                for (int i = 0; i < 4; ++i) {
                    expect(losses[i] == product * sums[i], "the loss of micro-batch " + i);
                }
                expect(is(grad, 21 * product / (rank + 2) / 4 * step, 0), "the gradient");
            }
            float all = 0;
            for (int stage = 0; stage <= last; ++stage) {
                all += 21 * product / (stage + 2) / 2;
            }
            pipe.sumTied(grad, IntStream.rangeClosed(0, last).toArray());
            expect(is(grad, all, 0), "the sum of the gradients");
        }
    }

    public static void main(String[] arguments) {
        System.load(arguments[0]); // the simulated libcuda.so.1
        try (Comm comm = Comm.fromEnv(new CommOptions().backend("cpu:auto,cuda:nccl"))) {
            final int rank = comm.rank();
            final int ranks = comm.worldSize();
            final long memory = allocate(rank, 8);
            final Tensor x = Tensor.ofAddress(memory, DType.F32, Device.cuda(rank), 2);
            store(memory, rank + 1);
            store(memory + 4, 10);
            comm.allReduce(x, ReduceOp.SUM);
            expect(load(memory) == ranks * (ranks + 1) / 2, "the sum");
            expect(load(memory + 4) == 10 * ranks, "the sum");
            final Work work = comm.onStream(0).allReduceAsync(x, ReduceOp.MAX);
            work.order(0);
            expect(load(memory + 4) == 10 * ranks, "the maximum");
            work.await();

            final Tensor host = Tensor.zeros(DType.F32, 2);
            final Tensor wrong = Tensor.ofAddress(host.address(), DType.F32, Device.cuda(rank), 2);
            refused(ErrorCode.INVALID_ARGUMENT, "memory of the host", () -> comm.allReduce(wrong, ReduceOp.SUM));
            final Tensor elsewhere = Tensor.ofAddress(memory, DType.F32, Device.cuda(rank + 1), 2);
            refused(ErrorCode.INVALID_ARGUMENT, "communicates from CUDA device",
                    () -> comm.allReduce(elsewhere, ReduceOp.SUM));
            refused(ErrorCode.INVALID_ARGUMENT, "the tensors are on the CPU",
                    () -> comm.onStream(1).allReduce(host, ReduceOp.SUM));
            try (State state = new State().with("x", x).setStream(rank, 0);
                    Saver saver = Saver.at(comm, Path.of(System.getenv("CHECKPOINTS"))).open()) {
                refused(ErrorCode.INVALID_ARGUMENT, "memory of the host", () -> state.with("wrong", wrong));
                saver.save(1, state);
                store(memory + 4, 0);
                expect(saver.resume(state) == 1, "the step");
                expect(load(memory + 4) == 10 * ranks, "what was loaded");
            }
            comm.onStream(0).allReduce(x, ReduceOp.SUM);
            expect(load(memory + 4) == 10 * ranks * ranks, "the last sum");

            store(memory, 5 + rank);
            try (Ddp ddp = Ddp.create(comm, Params.of("w", x))) {
                expect(load(memory) == 5, "the values of rank 0");
                ddp.setStream(0);
                final Tensor grad = ddp.gradTensor(0);
                expect(grad.device().equals(Device.cuda(rank)), "the gradient is on the device");
                store(grad.address(), rank + 1);
                ddp.ready(0);
                ddp.await();
                expect(load(grad.address()) == (ranks + 1) / 2f, "the average");
            }
            fsdpTrains(comm);
            tensorParallelTrains(comm);
            pipelineTrains(comm);
            final long gradient = allocate(rank, 8);
            final Tensor grad = Tensor.ofAddress(gradient, DType.F32, Device.cuda(rank), 2);
            try (Optimizer optimizer = Optimizer.sgd(Params.of("x", x), List.of(grad)).lr(0.5).build()) {
                optimizer.setStream(0);
                store(memory, 1);
                store(gradient, 2);
                store(gradient + 4, 0);
                optimizer.step();
                expect(load(memory) == 0, "the step");
                expect(optimizer.clipGradNorm(1) == 2, "the norm");
                expect(load(gradient) < 1 && load(gradient) > 0.999, "the clipped gradient");
                optimizer.zeroGrad();
                expect(load(gradient) == 0, "no gradient");
            }
            refused(ErrorCode.INVALID_ARGUMENT, "or on another device",
                    () -> Optimizer.sgd(Params.of("x", x), List.of(host)).build());
            comm.finish();
            System.out.println("rank " + rank + ": java is well");
        }
    }
}
