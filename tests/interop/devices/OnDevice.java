import dev.tessera.Comm;
import dev.tessera.CommOptions;
import dev.tessera.DType;
import dev.tessera.Ddp;
import dev.tessera.Device;
import dev.tessera.ErrorCode;
import dev.tessera.Optimizer;
import dev.tessera.Params;
import dev.tessera.ReduceOp;
import dev.tessera.Saver;
import dev.tessera.State;
import dev.tessera.Tensor;
import dev.tessera.TesseraException;
import dev.tessera.Work;
import java.nio.file.Path;
import java.util.List;

/**
 * A rank on a simulated CUDA device, for test_devices.py: collectives over memory of the device, a checkpoint of it, what is
 * refused, and steps of DDP and of an optimizer.
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
