import dev.tessera.Comm;
import dev.tessera.DType;
import dev.tessera.Plan;
import dev.tessera.ReduceOp;
import dev.tessera.Tensor;
import java.util.List;
import java.util.Locale;

/** What a call takes through the Java binding: call.cc, in Java. The first batches are those that get compiled. */
final class Call {
    private static final int CALLS = 200_000;
    private static final int BATCHES = 15;

    private Call() {
    }

    public static void main(String[] arguments) {
        double planned = 1e9;
        double plain = 1e9;
        try (Comm comm = Comm.fromEnv()) {
            final Tensor values = Tensor.zeros(DType.F32, 2);
            final Plan plan =
                    Plan.of(comm, Plan.Collective.ALL_REDUCE, List.of(), List.of(values), ReduceOp.SUM, 0);
            for (int batch = 0; batch < BATCHES; ++batch) {
                planned = Math.min(planned, nanoseconds(plan::run));
                plain = Math.min(plain, nanoseconds(() -> comm.allReduce(values, ReduceOp.SUM)));
            }
            plan.close();
        }
        System.out.printf(Locale.ROOT, "{\"plan\": %.2f, \"all_reduce\": %.2f}%n", planned, plain);
    }

    private static double nanoseconds(Runnable call) {
        final long begin = System.nanoTime();
        for (int i = 0; i < CALLS; ++i) {
            call.run();
        }
        return (double) (System.nanoTime() - begin) / CALLS;
    }
}
