package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.BufferOverflowException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.ReadOnlyBufferException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.UnaryOperator;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

/** Whole units in passes, shards in between, trainings that equal those of one rank, checkpoints at other sizes. */
class FsdpTest {
    private static final int STEPS = 50;
    private static final int SAMPLES = 24;
    private static final int IN = 5;
    private static final int HIDDEN = 8;

    @TempDir
    Path root;

    // --- shards, whole parameters, gradients

    private static Tensor counted(float first, long... shape) {
        final Tensor tensor = Tensor.zeros(DType.F32, shape);
        for (int i = 0; i < tensor.numel(); ++i) {
            tensor.floats().put(i, first + i);
        }
        return tensor;
    }

    private static void fill(FloatBuffer buffer, float value) {
        for (int i = 0; i < buffer.capacity(); ++i) {
            buffer.put(i, value);
        }
    }

    /** Rows that no number of ranks divides, and fewer rows than ranks. */
    private static List<FsdpUnit> odd(float first) {
        return List.of(FsdpUnit.of("body", Params.of("module.w", counted(first, 7, 3)).and("b", counted(first + 100, 2))),
                FsdpUnit.of("head").and("h", counted(first + 200, 1)));
    }

    private static void expectRows(Fsdp fsdp, int rank, int ranks) {
        final int[] rows = {7, 2, 1};
        final int[] columns = {3, 1, 1};
        for (int i = 0; i < 3; ++i) {
            final int chunk = (rows[i] + ranks - 1) / ranks;
            final int from = Math.min(rank * chunk, rows[i]);
            final int count = Math.min(chunk, rows[i] - from);
            final Tensor shard = fsdp.shardTensor(i);
            assertEquals(count, shard.shape()[0], "rows of parameter " + i);
            assertArrayEquals(shard.shape(), fsdp.shardGradTensor(i).shape());
            for (int k = 0; k < count * columns[i]; ++k) {
                assertEquals(1f + 100 * i + from * columns[i] + k, fsdp.shard(i).get(k));
            }
            try (Layout layout = fsdp.layout(i)) {
                final List<Box> boxes = layout.boxes(rank);
                assertEquals(count == 0 ? 0 : 1, boxes.size());
                if (count > 0) {
                    assertEquals(from, boxes.get(0).offsets()[0]);
                    assertArrayEquals(shard.shape(), boxes.get(0).sizes());
                }
            }
        }
    }

    @Test
    void shardsWholeParametersAndGradientsAreRightAtEverySize() throws Exception {
        for (int size = 1; size <= 3; ++size) {
            final int ranks = size;
            Ranks.run(ranks, comm -> {
                try (Fsdp fsdp = Fsdp.create(comm, odd(comm.rank() + 1))) { // shards begin with rank 0's
                    assertEquals(2, fsdp.unitCount());
                    assertEquals("head", fsdp.unitName(1));
                    assertEquals(1, fsdp.unit("head"));
                    assertEquals(3, fsdp.size());
                    assertEquals("w", fsdp.name(0));
                    assertEquals(0, fsdp.index("w"));
                    assertEquals(0, fsdp.index("module.w"));
                    assertEquals(2, fsdp.index("h"));
                    assertEquals(0, fsdp.unitOf(1));
                    assertArrayEquals(new long[] {7, 3}, fsdp.shape(0));
                    assertTrue(fsdp.isTrained(0));
                    assertEquals(1, fsdp.unitOf(2));
                    assertSame(fsdp.shardTensor(0), fsdp.shardTensor(0));
                    assertTrue(fsdp.toString().contains("[body, head]"), fsdp.toString());
                    expectRows(fsdp, comm.rank(), ranks);
                    try (Fsdp.Pass pass = fsdp.forward("body")) {
                        assertEquals(0, pass.unit());
                        assertArrayEquals(new long[] {7, 3}, pass.paramTensor("w").shape());
                        for (int k = 0; k < 21; ++k) {
                            assertEquals(1f + k, pass.param("w").get(k));
                        }
                        assertEquals(102f, pass.param(1).get(1));
                    }
                    try (Fsdp.Pass pass = fsdp.backward(1)) {
                        assertEquals(201f, pass.param("h").get(0));
                        pass.grad("h").put(0, comm.rank());
                        pass.ready();
                    }
                    try (Fsdp.Pass pass = fsdp.backward(0)) {
                        final FloatBuffer w = pass.grad(0);
                        for (int k = 0; k < 21; ++k) {
                            w.put(k, k * (comm.rank() + 1));
                        }
                        fill(pass.grad("b"), -1);
                        pass.ready();
                    }
                    fsdp.await();
                    final int chunk = (7 + ranks - 1) / ranks;
                    final FloatBuffer grad = fsdp.shardGrad(0);
                    for (int k = 0; k < grad.capacity(); ++k) {
                        assertEquals((comm.rank() * chunk * 3 + k) * (ranks + 1) / 2f, grad.get(k), 1e-4);
                    }
                    for (int k = 0; k < fsdp.shardGrad(1).capacity(); ++k) {
                        assertEquals(-1f, fsdp.shardGrad(1).get(k), 1e-6);
                    }
                    if (comm.rank() == 0) {
                        assertEquals((ranks - 1) / 2f, fsdp.shardGrad(2).get(0), 1e-6);
                    }
                }
            });
        }
    }

    @Test
    void shardsMayBeginWithEachRanksOwn() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(10 * comm.rank()), new FsdpOptions().syncValues(false));
                    Fsdp.Pass pass = fsdp.whole("body")) {
                assertEquals(0f, pass.param("w").get(0));
                assertEquals(10f + 12, pass.param("w").get(12), "the first element of rank 1's rows");
            }
        });
    }

    @Test
    void parametersComputeAndReduceInOtherTypes() throws Exception {
        Ranks.run(2, comm -> {
            final FsdpOptions options = new FsdpOptions().paramDtype(DType.BF16).reduceDtype(DType.F64).op(ReduceOp.SUM);
            try (Fsdp fsdp = Fsdp.create(comm, odd(1), options)) {
                try (Fsdp.Pass pass = fsdp.backward("head")) {
                    assertEquals(DType.BF16, pass.paramTensor("h").dtype());
                    assertEquals((short) (Float.floatToIntBits(201f) >>> 16), pass.paramTensor("h").shorts().get(0));
                    assertThrows(IllegalArgumentException.class, () -> pass.param("h"));
                    assertThrows(IllegalArgumentException.class, () -> pass.grad("h"));
                    pass.gradTensor("h").doubles().put(0, 0.5 + comm.rank());
                    pass.ready();
                }
                try (Fsdp.Pass pass = fsdp.backward("body")) {
                    pass.unused("w");
                    pass.unused(1);
                    pass.ready();
                }
                fsdp.await();
                assertEquals(DType.F32, fsdp.shardGradTensor(2).dtype());
                if (comm.rank() == 0) {
                    assertEquals(2f, fsdp.shardGrad(2).get(0));
                }
                assertEquals(0f, fsdp.shardGrad(0).get(0));
            }
        });
    }

    @Test
    void aUnitMayHaveOtherTypesThanTheRest() throws Exception {
        Ranks.run(2, comm -> {
            final FsdpUnit own = FsdpUnit.of("own")
                    .and("w", counted(1.5f, 3))
                    .paramDtype(DType.F64)
                    .reduceDtype(DType.F32);
            final FsdpUnit rest = FsdpUnit.of("rest").and("v", counted(0.5f, 2));
            try (Fsdp fsdp = Fsdp.create(comm, List.of(own, rest), new FsdpOptions().paramDtype(DType.BF16))) {
                try (Fsdp.Pass pass = fsdp.backward("own")) {
                    assertEquals(3.5, pass.paramTensor("w").doubles().get(2));
                    fill(pass.grad("w"), 1f + comm.rank());
                    pass.ready();
                }
                try (Fsdp.Pass pass = fsdp.backward("rest")) {
                    assertEquals(DType.BF16, pass.paramTensor("v").dtype());
                    assertEquals(DType.BF16, pass.gradTensor("v").dtype());
                    pass.unused("v");
                    pass.ready();
                }
                fsdp.await();
                if (comm.rank() == 0) {
                    assertEquals(1.5f, fsdp.shardGrad(0).get(0));
                }
                assertTrue(fsdp.used(0));
                assertFalse(fsdp.used(1), "no rank had a gradient");
                assertThrows(IndexOutOfBoundsException.class, () -> fsdp.used(2));
            }
            final FsdpUnit bad = own.reduceDtype(DType.I8);
            final TesseraException told = assertThrows(TesseraException.class, () -> Fsdp.create(comm, List.of(bad)));
            assertTrue(told.getMessage().contains("unit \"own\": reduce_dtype is i8"), told.getMessage());
        });
    }

    // --- passes and their views

    @Test
    void viewsEndWithTheirPass() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1))) {
                final Fsdp.Pass pass = fsdp.forward("body");
                final Tensor w = pass.paramTensor("w");
                assertSame(w, pass.paramTensor(0));
                final Tensor part = w.slice(3, 3).reshape(1, 3);
                assertTrue(pass.param("w").isReadOnly());
                assertThrows(ReadOnlyBufferException.class, () -> part.floats().put(0, 1));
                final IllegalArgumentException refused =
                        assertThrows(IllegalArgumentException.class, () -> comm.allReduce(w, ReduceOp.SUM));
                assertTrue(refused.getMessage().contains("read-only"), refused.getMessage());
                assertThrows(TesseraInvalidStateException.class, () -> pass.grad("w"), "no backward");
                assertThrows(TesseraInvalidStateException.class, pass::ready);
                final String twice = assertThrows(IllegalStateException.class, () -> fsdp.forward("body")).getMessage();
                assertTrue(twice.contains("a pass of unit \"body\" is open"), twice);
                final String foreign = assertThrows(IllegalArgumentException.class, () -> pass.param("h")).getMessage();
                assertTrue(foreign.contains("parameter \"h\" does not belong to unit \"body\""), foreign);
                final long address = w.address();
                pass.close();
                pass.close();
                final String over = assertThrows(IllegalStateException.class, w::address).getMessage();
                assertEquals("this pass of unit \"body\" has ended", over);
                assertThrows(IllegalStateException.class, w::bytes);
                assertThrows(IllegalStateException.class, part::floats);
                assertThrows(IllegalStateException.class, () -> comm.allReduce(w, ReduceOp.SUM));
                assertThrows(IllegalStateException.class, () -> pass.param("w"));
                assertArrayEquals(new long[] {7, 3}, w.shape());

                final Fsdp.Pass looking = fsdp.whole("body");
                assertEquals(address, looking.paramTensor("w").address(), "whenever it is whole");
                fsdp.reshard("body");
                assertThrows(IllegalStateException.class, () -> looking.param("w"));
                looking.close();

                final Fsdp.Pass back = fsdp.backward("body");
                final Tensor grad = back.gradTensor("w");
                fill(back.grad("w"), 1);
                fill(back.grad("b"), 1);
                back.ready();
                assertThrows(IllegalStateException.class, grad::floats);
                assertThrows(IllegalStateException.class, back::ready);
                back.close();
                try (Fsdp.Pass head = fsdp.backward("head")) {
                    head.grad("h").put(0, 1);
                    head.ready();
                }
                final Fsdp.Pass left = fsdp.whole("head"); // gradients are on their way; the next pass may be another's
                fsdp.await();
                assertThrows(IllegalStateException.class, () -> left.param("h"), "every unit is sharded");
            }
        });
    }

    @Test
    void aUnitIsNotShardedWhileAnOperationInTheBackgroundUsesIt() throws Exception {
        final CountDownLatch refused = new CountDownLatch(1);
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1))) {
                try (Fsdp.Pass pass = fsdp.forward("body")) {
                    final Tensor all = Tensor.zeros(DType.F32, 42);
                    for (Executable read : List.<Executable>of(
                            () -> comm.allGatherAsync(pass.paramTensor("w"), all),
                            () -> comm.sendAsync(pass.paramTensor("w").slice(0, 3), 1 - comm.rank(), 0))) {
                        final String said = assertThrows(IllegalArgumentException.class, read).getMessage();
                        assertTrue(said.contains("read-only") && said.contains("use a copy"), said);
                    }
                }
                final Fsdp.Pass pass = fsdp.backward("head");
                if (comm.rank() == 1) {
                    assertTrue(refused.await(Patience.seconds(20), TimeUnit.SECONDS));
                }
                pass.grad("h").put(0, 3 + comm.rank());
                final Work sum = comm.allReduceAsync(pass.gradTensor("h"), ReduceOp.SUM);
                final String later = assertThrows(IllegalArgumentException.class, () -> Plan.of(comm,
                        Plan.Collective.ALL_REDUCE, List.of(), List.of(pass.gradTensor("h")), ReduceOp.SUM, 0)).getMessage();
                assertTrue(later.contains("in a plan"), later);
                if (comm.rank() == 0) { // rank 1 has not begun it
                    for (Executable end
                            : List.<Executable>of(pass::ready, fsdp::abandon)) {
                        final String said = assertThrows(IllegalStateException.class, end).getMessage();
                        assertTrue(said.contains("1 operations in the background still use gradients of unit \"head\""), said);
                    }
                    assertThrows(TesseraInvalidStateException.class, () -> fsdp.reshard("head"), "in its backward");
                    assertEquals(Fsdp.Phase.BACKWARD, fsdp.phase("head"));
                    refused.countDown();
                }
                sum.await();
                pass.ready();
                pass.close();
                backward(fsdp, 0, 1);
                fsdp.await();
                if (comm.rank() == 0) {
                    assertEquals(7f, fsdp.shardGrad(2).get(0));
                }
            }
        });
    }

    @Test
    void aUnitStaysWholeUntilItsBackwardIfItShall() throws Exception {
        Ranks.run(2, comm -> {
            final List<FsdpUnit> units = List.of(odd(1).get(0).keepWhole(true), odd(1).get(1));
            try (Fsdp fsdp = Fsdp.create(comm, units, new FsdpOptions().forwardPrefetch(0))) {
                fsdp.forward("head").close();
                fsdp.zeroGrad(); // it would refuse while a unit is whole
                fsdp.forward("body").close();
                final String whole = assertThrows(TesseraInvalidStateException.class, fsdp::zeroGrad).getMessage();
                assertTrue(whole.contains("unit \"body\" is unsharded"), whole);
                fsdp.reshard(0);
                fsdp.zeroGrad();
                fsdp.unshard("head");
                assertThrows(TesseraInvalidStateException.class, fsdp::zeroGrad, "on its way");
                fsdp.whole("head").close();
                fsdp.zeroGrad();
            }
        });
    }

    @Test
    void aBackwardThatThrewGoesOn() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1))) {
                try (Fsdp.Pass pass = fsdp.backward("head")) {
                    pass.unused("h");
                    pass.ready();
                }
                assertThrows(ArithmeticException.class, () -> {
                    try (Fsdp.Pass pass = fsdp.backward("body")) {
                        fill(pass.grad("w"), 1 / (pass.unit() - 0));
                        pass.ready();
                    }
                });
                final String unsaid = assertThrows(TesseraInvalidStateException.class, fsdp::await).getMessage();
                assertTrue(unsaid.contains("1 of 2 units were never marked ready: \"body\""), unsaid);
                try (Fsdp.Pass pass = fsdp.backward("body")) {
                    fill(pass.grad("w"), comm.rank());
                    final String unwritten = assertThrows(TesseraInvalidStateException.class, pass::ready).getMessage();
                    assertTrue(unwritten.contains("1 of 2 gradients of unit \"body\" were not written: \"b\""), unwritten);
                    fill(pass.grad("b"), comm.rank());
                    pass.ready();
                }
                fsdp.await();
                assertEquals(0.5f, fsdp.shardGrad(0).get(0));
            }
        });
    }

    @Test
    void memoryStaysWhileAViewIsReachable() throws Exception {
        Ranks.run(1, comm -> {
            final Fsdp fsdp = Fsdp.create(comm, odd(1));
            final Fsdp.Pass pass = fsdp.backward("body");
            FloatBuffer whole = pass.param("w");
            FloatBuffer grad = pass.grad("w");
            final Tensor tensor = pass.gradTensor("w");
            grad.put(20, 42f);
            final Ref ref = fsdp.ref;
            fsdp.close();
            assertThrows(IllegalStateException.class, () -> pass.param("w"));
            assertThrows(IllegalStateException.class, tensor::floats);
            pass.close();
            System.gc();
            assertFalse(ref.isDestroyed(), "the views would point at nothing");
            assertEquals(42f, grad.get(20));
            assertEquals(21f, whole.get(20));
            whole = null;
            grad = null;
        });
        Ranks.run(1, comm -> {
            final Ref ref = used(comm);
            Ranks.collectUntil("the memory is given back", ref::isDestroyed);
            final Fsdp unused = Fsdp.create(comm, odd(1));
            unused.close();
            assertTrue(unused.ref.isDestroyed(), "at once, without views");
        });
    }

    @Test
    void peersHearOfAModelThatIsClosedInAPass() throws Exception {
        final CountDownLatch closed = new CountDownLatch(1);
        Ranks.run(2, comm -> {
            final Fsdp fsdp = Fsdp.create(comm, odd(1), new FsdpOptions().forwardPrefetch(0));
            try (Fsdp.Pass pass = fsdp.forward("body")) {
                if (comm.rank() == 1) {
                    fsdp.close();
                    assertThrows(IllegalStateException.class, () -> pass.param("w"));
                    assertThrows(IllegalStateException.class, () -> fsdp.backward("body"));
                    closed.countDown();
                } else {
                    assertTrue(closed.await(Patience.seconds(20), TimeUnit.SECONDS));
                }
            }
            if (comm.rank() == 0) {
                final TesseraException told = assertThrows(TesseraException.class, () -> fsdp.forward("head"));
                assertTrue(Set.of(ErrorCode.PEER_LOST, ErrorCode.ABORTED).contains(told.code()), told.toString());
                assertTrue(told.getMessage().contains("rank 1"), told.getMessage());
                fsdp.close();
            }
        });
    }

    private static Ref used(Comm comm) {
        try (Fsdp fsdp = Fsdp.create(comm, odd(1)); Fsdp.Pass pass = fsdp.forward("body")) {
            assertEquals(1f, pass.param("w").get(0));
            assertEquals(1f, fsdp.shard(0).get(0));
            return fsdp.ref;
        }
    }

    @Test
    void closingAModelClosesWhatWasMadeFromIt() throws Exception {
        Ranks.run(1, comm -> {
            final Fsdp fsdp = Fsdp.create(comm, odd(1));
            final Optimizer optimizer = Optimizer.adamW(fsdp).build();
            final State state = State.of("model", fsdp).with("optim", optimizer);
            fsdp.close();
            assertTrue(optimizer.ref.isDestroyed() && state.ref.isDestroyed() && fsdp.ref.isDestroyed());
            final String message = assertThrows(IllegalStateException.class, optimizer::step).getMessage();
            assertTrue(message.contains("Fsdp that it belongs to was closed"), message);
            assertThrows(IllegalStateException.class, fsdp::await);
            assertThrows(IllegalStateException.class, () -> fsdp.forward("body"));
        });
    }

    // --- training

    /** A network with one hidden layer of tanh on a fixed regression problem, its layers two units. */
    private static final class Regression {
        final float[][] inputs = new float[SAMPLES][IN];
        final float[] targets = new float[SAMPLES];
        final Params first;
        final Params second;

        Regression(int seed) {
            final Random random = new Random(5);
            for (int s = 0; s < SAMPLES; ++s) {
                targets[s] = uniform(random);
                for (int k = 0; k < IN; ++k) {
                    inputs[s][k] = uniform(random);
                }
            }
            final Random values = new Random(seed);
            first = Params.of("w1", initial(values, HIDDEN, IN)).and("b1", initial(values, HIDDEN));
            second = Params.of("w2", initial(values, HIDDEN));
        }

        private static float uniform(Random random) {
            return 2 * random.nextFloat() - 1;
        }

        private static Tensor initial(Random random, long... shape) {
            final Tensor tensor = Tensor.zeros(DType.F32, shape);
            for (int i = 0; i < tensor.numel(); ++i) {
                tensor.floats().put(i, uniform(random) / 2);
            }
            return tensor;
        }

        List<FsdpUnit> units() {
            return List.of(FsdpUnit.of("first", first), FsdpUnit.of("second", second));
        }

        /**
         * A forward and a backward over every {@code stride}-th sample. The gradients are of the mean over {@code share}
         * samples.
         *
         * @param add to what the gradients hold
         * @return the mean loss of these samples
         */
        double step(Fsdp fsdp, int from, int stride, float share, boolean add) {
            final float[][] h = new float[SAMPLES][HIDDEN];
            final float[] d = new float[SAMPLES];
            double loss = 0;
            int count = 0;
            try (Fsdp.Pass pass = fsdp.forward("first")) {
                final float[] w1 = pass.paramTensor("w1").toFloats();
                final float[] b1 = pass.paramTensor("b1").toFloats();
                for (int s = from; s < SAMPLES; s += stride) {
                    for (int j = 0; j < HIDDEN; ++j) {
                        float sum = b1[j];
                        for (int k = 0; k < IN; ++k) {
                            sum += w1[j * IN + k] * inputs[s][k];
                        }
                        h[s][j] = (float) Math.tanh(sum);
                    }
                }
            }
            try (Fsdp.Pass pass = fsdp.forward("second")) {
                final float[] w2 = pass.paramTensor("w2").toFloats();
                for (int s = from; s < SAMPLES; s += stride) {
                    float error = -targets[s];
                    for (int j = 0; j < HIDDEN; ++j) {
                        error += w2[j] * h[s][j];
                    }
                    d[s] = 2 * error / share;
                    loss += error * error;
                    ++count;
                }
            }
            final float[][] dh = new float[SAMPLES][HIDDEN];
            try (Fsdp.Pass pass = fsdp.backward("second")) {
                final float[] sum = new float[HIDDEN];
                final float[] w2 = pass.paramTensor("w2").toFloats();
                for (int s = from; s < SAMPLES; s += stride) {
                    for (int j = 0; j < HIDDEN; ++j) {
                        sum[j] += d[s] * h[s][j];
                        dh[s][j] = d[s] * w2[j] * (1 - h[s][j] * h[s][j]);
                    }
                }
                write(pass.grad("w2"), sum, add);
                pass.ready();
            }
            try (Fsdp.Pass pass = fsdp.backward("first")) {
                final float[] w1 = new float[HIDDEN * IN];
                final float[] b1 = new float[HIDDEN];
                for (int s = from; s < SAMPLES; s += stride) {
                    for (int j = 0; j < HIDDEN; ++j) {
                        b1[j] += dh[s][j];
                        for (int k = 0; k < IN; ++k) {
                            w1[j * IN + k] += dh[s][j] * inputs[s][k];
                        }
                    }
                }
                write(pass.grad("w1"), w1, add);
                write(pass.grad("b1"), b1, add);
                pass.ready();
            }
            fsdp.await();
            return loss / count;
        }

        private static void write(FloatBuffer to, float[] values, boolean add) {
            for (int i = 0; i < values.length; ++i) {
                to.put(i, values[i] + (add ? to.get(i) : 0));
            }
        }
    }

    /** How a training differs from the plain one. */
    private static final class Way {
        FsdpOptions options = new FsdpOptions();
        UnaryOperator<FsdpUnit> unit = u -> u;
        int microSteps = 1; // parts of a rank's share of the batch, of which the last one synchronises
        double near = 1e-4; // to the losses of the plain one, relatively
    }

    /** The loss of all samples before each step, then the parameters. */
    private static List<Double> train(Comm comm, Way way) {
        final Regression problem = new Regression(comm.rank());
        final int world = comm.worldSize();
        final List<Double> result = new ArrayList<>();
        final List<FsdpUnit> units = new ArrayList<>(problem.units());
        units.replaceAll(way.unit);
        try (Fsdp fsdp = Fsdp.create(comm, units, way.options); Optimizer adamW = Optimizer.adamW(fsdp).lr(0.02).build()) {
            for (int step = 0; step < STEPS; ++step) {
                double loss = 0;
                for (int micro = 0; micro < way.microSteps; ++micro) {
                    fsdp.setSync(micro + 1 == way.microSteps);
                    loss += problem.step(fsdp, comm.rank() + world * micro, world * way.microSteps, (float) SAMPLES / world,
                            way.microSteps > 1) / way.microSteps;
                }
                final Tensor mean = Tensor.copyOf(new double[] {loss});
                comm.allReduce(mean, ReduceOp.AVG);
                result.add(mean.doubles().get(0));
                adamW.step();
            }
            fsdp.unshard("first");
            fsdp.unshard(1);
            for (int unit = 0; unit < 2; ++unit) {
                try (Fsdp.Pass pass = fsdp.whole(unit)) {
                    for (int i = 0; i < fsdp.size(); ++i) {
                        for (float value : fsdp.unitOf(i) == unit ? pass.paramTensor(i).toFloats() : new float[0]) {
                            result.add((double) value);
                        }
                    }
                }
            }
        }
        return result;
    }

    /** All ranks have the same bits. */
    private static List<Double> train(int world, Way way) throws Exception {
        final List<List<Double>> results = Collections.synchronizedList(new ArrayList<>());
        Ranks.run(world, comm -> results.add(train(comm, way)));
        assertEquals(Collections.nCopies(world, results.get(0)), results, "ranks ended with different bits");
        assertEquals(STEPS + HIDDEN * IN + 2 * HIDDEN, results.get(0).size());
        return results.get(0);
    }

    private static void expectWorldSizeDoesNotMatter(Way way, int... worlds) throws Exception {
        final List<Double> alone = train(1, new Way());
        assertTrue(alone.get(STEPS - 1) < 0.5 * alone.get(0), "it learns something");
        for (int world : worlds) {
            final List<Double> together = train(world, way);
            for (int step = 0; step < STEPS; ++step) {
                assertEquals(alone.get(step), together.get(step), way.near * alone.get(step), world + " ranks, step " + step);
            }
            assertEquals(together, train(world, way), "a second run gave other bits");
        }
    }

    @Test
    void ranksWithAShareOfTheBatchEqualOneRankWithAllOfIt() throws Exception {
        expectWorldSizeDoesNotMatter(new Way(), 2, 3);
    }

    @Test
    void ranksThatComputeInBf16AndReduceInF32LearnTheSame() throws Exception {
        final Way mixed = new Way();
        mixed.options = new FsdpOptions().paramDtype(DType.BF16).reduceDtype(DType.F32);
        mixed.near = 2e-2;
        expectWorldSizeDoesNotMatter(mixed, 2, 3);
    }

    @Test
    void whatIsOnItsWayDoesNotMatter() throws Exception {
        final Way inTurn = new Way();
        inTurn.options = new FsdpOptions().forwardPrefetch(0).backwardPrefetch(0).gradsInFlight(1).preDivide(2);
        expectWorldSizeDoesNotMatter(inTurn, 2);
        final Way kept = new Way();
        kept.options = new FsdpOptions().forwardPrefetch(2);
        kept.unit = unit -> unit.keepWhole(unit.name().equals("first"));
        expectWorldSizeDoesNotMatter(kept, 3);
    }

    @Test
    void aUnitKeptAmongSomeRanksStaysWholeOnTheirHost() throws Exception {
        Ranks.run(4, comm -> {
            final FsdpUnit unit = FsdpUnit.of("u").and("w", Tensor.zeros(DType.F32, 8));
            try (Fsdp fsdp = Fsdp.create(comm, List.of(unit.keepAmong(2)))) {
                fsdp.forward(0).close();
                assertEquals(Fsdp.Phase.WHOLE, fsdp.phase(0));
            }
        });
    }

    @Test
    void unitsCutInBlocksOfRowsOrAnywhereTrainAlike() throws Exception {
        final Way blocks = new Way();
        blocks.unit = unit -> unit.rowBlock(3);
        expectWorldSizeDoesNotMatter(blocks, 3);
        final Way flat = new Way();
        flat.unit = unit -> unit.flat(true);
        expectWorldSizeDoesNotMatter(flat, 3);
    }

    @Test
    void flatUnitsHavePartsOfParameters() throws Exception {
        Ranks.run(2, comm -> {
            final Tensor scale = Tensor.copyOf(new float[] {2}).reshape();
            final FsdpUnit all = FsdpUnit.of("all").and("scale", scale).and("w", Tensor.zeros(DType.F32, 3, 30)).flat(true);
            final FsdpUnit blocks = FsdpUnit.of("blocks").and("rows", Tensor.zeros(DType.F32, 8)).rowBlock(5);
            try (Fsdp fsdp = Fsdp.create(comm, List.of(all, blocks))) {
                final boolean first = comm.rank() == 0;
                assertArrayEquals(new long[] {first ? 1 : 0}, fsdp.shardTensor(0).shape());
                assertArrayEquals(new long[] {first ? 32 : 58}, fsdp.shardTensor(1).shape());
                assertArrayEquals(new long[] {first ? 5 : 3}, fsdp.shardTensor(2).shape());
            }
        });
    }

    @Test
    void aGradientOfAnotherShapeOrTypeIsRefused() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1), new FsdpOptions().reduceDtype(DType.F64))) {
                try (Fsdp.Pass pass = fsdp.backward("head")) {
                    final String said = assertThrows(IllegalArgumentException.class, () -> pass.grad("h")).getMessage();
                    assertTrue(said.contains("F64"), said);
                    pass.gradTensor("h").doubles().put(0, comm.rank());
                    pass.ready();
                }
                try (Fsdp.Pass pass = fsdp.backward("body")) {
                    final Tensor w = pass.gradTensor("w");
                    assertArrayEquals(new long[] {7, 3}, w.shape());
                    assertThrows(BufferOverflowException.class, () -> w.doubles().put(new double[22]));
                    assertThrows(IndexOutOfBoundsException.class, () -> w.doubles().put(21, 1));
                    assertThrows(IndexOutOfBoundsException.class, () -> w.slice(1, 21));
                    assertThrows(IllegalArgumentException.class, () -> w.reshape(7, 4));
                    assertThrows(IllegalArgumentException.class, w::floats);
                    assertThrows(TesseraInvalidArgumentException.class, () -> comm.allGather(Tensor.zeros(DType.F64, 20), w));
                    pass.unused("b");
                    w.doubles().put(new double[20]); // a shorter one; the rest would be another unit's
                    final String told = assertThrows(TesseraInvalidStateException.class, pass::ready).getMessage();
                    assertTrue(told.contains("1 of 2 gradients of unit \"body\" were not written: \"w\""), told);
                    w.doubles().put(new double[21]);
                    pass.ready();
                }
                fsdp.await();
                if (comm.rank() == 0) {
                    assertEquals(0.5f, fsdp.shardGrad(2).get(0));
                }
            }
        });
    }

    @Test
    void nanInAGradientStaysAndEveryRankIsToldAnInfiniteNorm() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1)); Optimizer sgd = Optimizer.sgd(fsdp).build()) {
                backward(fsdp, 1, comm.rank() == 1 ? Float.NaN : 1);
                backward(fsdp, 0, 1);
                fsdp.await();
                assertEquals(Double.POSITIVE_INFINITY, sgd.clipGradNorm(1));
                assertEquals(1f, fsdp.shardGrad(0).get(0));
                if (comm.rank() == 0) {
                    assertEquals(Float.NaN, fsdp.shardGrad(2).get(0));
                }
            }
        });
    }

    @Test
    void replicasEqualOneRank() throws Exception {
        final Way replicas = new Way();
        replicas.options = new FsdpOptions().shardRanks(2);
        expectWorldSizeDoesNotMatter(replicas, 4);
    }

    @Test
    void gradientsAddedUpWithoutSynchronisationEqualOneRank() throws Exception {
        final Way micro = new Way();
        micro.microSteps = 3;
        expectWorldSizeDoesNotMatter(micro, 2);
    }

    private static void backward(Fsdp fsdp, int unit, float value) {
        try (Fsdp.Pass pass = fsdp.backward(unit)) {
            for (int i = 0; i < fsdp.size(); ++i) {
                if (fsdp.unitOf(i) == unit) {
                    fill(pass.grad(i), value);
                }
            }
            pass.ready();
        }
    }

    @Test
    void reducedGradientsAddUpAndAreSetToZero() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1))) {
                fsdp.setAccumulate(true);
                for (int micro = 1; micro <= 2; ++micro) {
                    backward(fsdp, 1, micro * comm.rank());
                    assertThrows(TesseraInvalidStateException.class, () -> fsdp.setAccumulate(false));
                    assertThrows(TesseraInvalidStateException.class, () -> fsdp.setSync(false));
                    assertThrows(TesseraInvalidStateException.class, () -> fsdp.setAllReduce(false));
                    assertThrows(TesseraInvalidStateException.class, fsdp::zeroGrad);
                    backward(fsdp, 0, micro);
                    fsdp.await();
                }
                assertEquals(3f, fsdp.shardGrad(0).get(0));
                if (comm.rank() == 0) {
                    assertEquals(1.5f, fsdp.shardGrad(2).get(0));
                }
                fsdp.zeroGrad();
                assertEquals(0f, fsdp.shardGrad(0).get(0));
                fsdp.setAccumulate(false);
                backward(fsdp, 1, 1);
                backward(fsdp, 0, 1);
                fsdp.await();
                assertEquals(1f, fsdp.shardGrad(0).get(0));
            }
        });
    }

    @Test
    void gradientsAreBoundedByTheNormOfAllShards() throws Exception {
        for (int ranks = 1; ranks <= 3; ++ranks) {
            Ranks.run(ranks, comm -> {
                try (Fsdp fsdp = Fsdp.create(comm, odd(1)); Optimizer sgd = Optimizer.sgd(fsdp).build()) {
                    backward(fsdp, 1, 2);
                    assertThrows(TesseraInvalidStateException.class, () -> sgd.clipGradNorm(1));
                    backward(fsdp, 0, 2);
                    fsdp.await();
                    assertEquals(2 * Math.sqrt(24), sgd.clipGradNorm(100), 1e-6);
                    assertEquals(48, sgd.clipGradNorm(100, 1), 1e-6);
                    assertEquals(2, sgd.clipGradNorm(1, Double.POSITIVE_INFINITY), 1e-6);
                    assertEquals(1, fsdp.shardGrad(0).get(0), 1e-5);
                    sgd.clipGradValue(0.5);
                    assertEquals(0.5f, fsdp.shardGrad(0).get(0));
                }
            });
        }
    }

    @Test
    void aStepIsAbandonedAnywhere() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1))) {
                for (int calls = 0; calls <= 3; ++calls) {
                    Fsdp.Pass pass = null;
                    if (calls > 0) {
                        pass = fsdp.forward("body");
                        assertEquals(Fsdp.Phase.WHOLE, fsdp.phase("body"));
                        assertEquals(Fsdp.Phase.ON_ITS_WAY, fsdp.phase(1));
                    }
                    if (calls > 1) {
                        pass = fsdp.backward("head");
                        fill(pass.grad("h"), 5);
                        assertEquals(Fsdp.Phase.BACKWARD, fsdp.phase("head"));
                    }
                    if (calls > 2) {
                        pass.ready();
                        assertEquals(Fsdp.Phase.REDUCING, fsdp.phase("head"));
                    }
                    fsdp.abandon();
                    if (pass != null) {
                        assertThrows(IllegalStateException.class, pass::ready);
                    }
                    for (int unit = 0; unit < 2; ++unit) {
                        assertEquals(Fsdp.Phase.SHARDED, fsdp.phase(unit));
                    }
                    assertEquals(0f, fsdp.shardGrad(0).get(0));
                    backward(fsdp, 1, 1);
                    backward(fsdp, 0, comm.rank());
                    fsdp.await();
                    assertEquals(0.5f, fsdp.shardGrad(0).get(0));
                }
            }
        });
    }

    @Test
    void nothingIsLoadedWhileAUnitIsWhole() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1)); Saver saver = Saver.at(comm, root).open()) {
                final State state = State.of("model", fsdp);
                saver.save(1, state);
                fsdp.forward("body");
                final String said =
                        assertThrows(TesseraInvalidStateException.class, () -> saver.resume(state)).getMessage();
                assertTrue(said.contains("unit \"body\" is unsharded"), said);
                fsdp.abandon();
                assertEquals(1, saver.resume(state));
            }
        });
    }

    @Test
    void whatWasInterruptedGoesOn() throws Exception {
        final CountDownLatch interrupted = new CountDownLatch(1);
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1))) {
                if (comm.rank() == 1) {
                    assertTrue(interrupted.await(Patience.seconds(20), TimeUnit.SECONDS));
                    backward(fsdp, 1, 3);
                    backward(fsdp, 0, 3);
                    fsdp.await();
                } else {
                    Thread.currentThread().interrupt();
                    assertThrows(TesseraInterruptedException.class, () -> fsdp.backward(1));
                    Thread.interrupted();
                    interrupted.countDown();
                    backward(fsdp, 1, 1);
                    backward(fsdp, 0, 1);
                    fsdp.await();
                }
                assertEquals(2f, fsdp.shardGrad(0).get(0));
            }
        });
    }

    @Test
    void memoryThatIsLeftToAUnitHasWhatShardsHave() throws Exception {
        Ranks.run(2, comm -> {
            final List<FsdpUnit> units = List.of(FsdpUnit.of("u", Params.of("w", Tensor.zeros(DType.F32, 4))));
            try (Fsdp fsdp = Fsdp.create(comm, units)) {
                fsdp.setReshardAfterBackward("u", false);
                assertThrows(IndexOutOfBoundsException.class, () -> fsdp.setReshardAfterBackward(1, false));
                for (int step = 0; step < 3; ++step) {
                    final float value = step == 0 ? 0 : 5 * (step - 1);
                    try (Fsdp.Pass pass = fsdp.forward(0)) {
                        assertEquals(value, pass.param(0).get(3));
                    }
                    backward(fsdp, 0, 1);
                    assertThrows(TesseraInvalidStateException.class, () -> fsdp.setReshardAfterBackward(0, true));
                    fsdp.await();
                    assertEquals(Fsdp.Phase.SHARDED, fsdp.phase(0));
                    fsdp.shard(0).put(0, 5f * step).put(1, 5f * step);
                }
            }
        });
    }

    @Test
    void theReductionOverReplicasMayWait() throws Exception {
        Ranks.run(4, comm -> {
            final List<FsdpUnit> units = List.of(FsdpUnit.of("u", Params.of("w", Tensor.zeros(DType.F32, 4))));
            try (Fsdp fsdp = Fsdp.create(comm, units, new FsdpOptions().shardRanks(2))) {
                assertEquals(2, fsdp.shard(0).capacity());
                fsdp.setAllReduce(false);
                backward(fsdp, 0, 2 * comm.rank());
                fsdp.await();
                assertEquals(0f, fsdp.shardGrad(0).get(0));
                fsdp.setAllReduce(true);
                backward(fsdp, 0, 4 * comm.rank());
                fsdp.await();
                assertEquals(9f, fsdp.shardGrad(0).get(0));
            }
        });
    }

    @Test
    void theOtherOptimizersUpdateShards() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1));
                    Optimizer sgd = Optimizer.sgd(fsdp).lr(0.5).build();
                    Optimizer adagrad = Optimizer.adagrad(fsdp).lr(0.25).build();
                    Optimizer lion = Optimizer.lion(fsdp).lr(0.25).build();
                    Optimizer lamb = Optimizer.lamb(fsdp).lr(0.25).maxCoeff(1).minCoeff(1).build();
                    Optimizer adam = Optimizer.adam(fsdp).lr(0.25).build()) {
                final float first = fsdp.shard(0).get(0);
                backward(fsdp, 1, comm.rank());
                final String early = assertThrows(TesseraInvalidStateException.class, sgd::step).getMessage();
                assertTrue(early.contains("end the step first"), early);
                backward(fsdp, 0, 2 * comm.rank());
                fsdp.await();
                sgd.step();
                assertEquals(first - 0.5f, fsdp.shard(0).get(0), 1e-6);
                final String again = assertThrows(TesseraInvalidStateException.class, sgd::step).getMessage();
                assertTrue(again.contains("no gradients were reduced since its last step"), again);
                adam.step();
                assertEquals(first - 0.75f, fsdp.shard(0).get(0), 1e-5);
                adagrad.step();
                assertEquals(first - 1, fsdp.shard(0).get(0), 1e-5);
                lion.step();
                assertEquals(first - 1.25f, fsdp.shard(0).get(0), 1e-5);
                lamb.step();
                assertEquals(first - 1.5f, fsdp.shard(0).get(0), 1e-5);
                try (Fsdp.Pass pass = fsdp.whole("body")) {
                    assertEquals(1 - 1.5f, pass.param("w").get(0), 1e-5);
                    assertEquals(21 - 1.5f, pass.param("w").get(20), 1e-5);
                }
            }
        });
    }

    @Test
    void frozenParametersHaveNoGradient() throws Exception {
        Ranks.run(2, comm -> {
            final List<FsdpUnit> units = List.of(odd(1).get(0).freeze("module.w"), odd(1).get(1).freeze("h"));
            try (Fsdp fsdp = Fsdp.create(comm, units); Optimizer sgd = Optimizer.sgd(fsdp).lr(1).build()) {
                assertThrows(TesseraInvalidStateException.class, () -> fsdp.shardGrad(0));
                try (Fsdp.Pass pass = fsdp.backward("body")) {
                    final String frozen =
                            assertThrows(TesseraInvalidStateException.class, () -> pass.gradTensor("w")).getMessage();
                    assertTrue(frozen.contains("\"w\" is not trained"), frozen);
                    if (comm.rank() == 0) {
                        fill(pass.grad("b"), 8);
                    } else {
                        pass.unused("b");
                    }
                    pass.ready();
                }
                fsdp.await(); // nothing of "head" is trained
                assertEquals(4f, fsdp.shardGrad(1).get(0));
                final float w = fsdp.shard(0).get(0);
                final float b = fsdp.shard(1).get(0);
                sgd.step();
                assertEquals(w, fsdp.shard(0).get(0));
                assertEquals(b - 4, fsdp.shard(1).get(0));
            }
        });
    }

    @Test
    void theCpuHasNoStreams() throws Exception {
        Ranks.run(1, comm -> {
            final FsdpUnit unit = FsdpUnit.of("u");
            try (Fsdp fsdp = Fsdp.create(comm, List.of(unit.andDeferred("w", DType.F32, 4)))) {
                fsdp.setStream(0);
                assertThrows(TesseraInvalidArgumentException.class, () -> fsdp.setStream(1));
                try (Fsdp.Pass pass = fsdp.forward("u")) {
                    assertThrows(TesseraInvalidStateException.class, () -> fsdp.setStream(0));
                }
            }
            final FsdpUnit elsewhere = unit.andDeferred("w", DType.F32, Device.cuda(3), 4);
            final TesseraException refused = assertThrows(TesseraException.class,
                    () -> Fsdp.create(comm, List.of(elsewhere)));
            assertEquals(ErrorCode.UNSUPPORTED, refused.code());
            assertTrue(refused.getMessage().contains("is on CUDA device 3"), refused.getMessage());
        });
    }

    @Test
    void valuesMayComeLater() throws Exception {
        Ranks.run(3, comm -> {
            final List<FsdpUnit> units = List.of(FsdpUnit.of("u").andDeferred("w", DType.F32, 8, 5)
                    .and("b", counted(1, 2)).andDeferred("d", DType.F64, 3));
            try (Fsdp fsdp = Fsdp.create(comm, units); Layout layout = fsdp.layout(0)) {
                assertEquals(3 * comm.rank(), layout.boxes(comm.rank()).get(0).offsets()[0]);
                for (int k = 0; k < fsdp.shard(0).capacity(); ++k) {
                    assertEquals(0f, fsdp.shard(0).get(k));
                    fsdp.shard(0).put(k, 15 * comm.rank() + k);
                }
                try (Fsdp.Pass pass = fsdp.whole("u")) {
                    for (int k = 0; k < 40; ++k) {
                        assertEquals(k, pass.param("w").get(k));
                    }
                    assertEquals(2f, pass.param("b").get(1));
                    assertEquals(0, pass.paramTensor("d").doubles().get(2));
                }
            }
        });
    }

    // --- checkpoints

    /** With the optimizer, the losses go on as if nothing had been. */
    @Test
    void aModelIsSavedAndLoadedAtAnotherSize() throws Exception {
        final List<Double> losses = new ArrayList<>();
        for (int part = 0; part < 3; ++part) {
            final int until = 5 * (part + 1);
            final double[][] of = new double[4][5];
            final int world = List.of(3, 2, 4).get(part);
            Ranks.run(world, comm -> {
                final Regression problem = new Regression(comm.rank());
                try (Fsdp fsdp = Fsdp.create(comm, problem.units());
                        Optimizer adamW = Optimizer.adamW(fsdp).lr(0.02).build();
                        Saver saver = Saver.at(comm, root).open()) {
                    final State state = State.of("model", fsdp).with("optim", adamW);
                    final long begin = saver.resume(state);
                    assertEquals(until - 5, begin);
                    for (long step = begin; step < until; ++step) {
                        of[comm.rank()][(int) (step - begin)] =
                                problem.step(fsdp, comm.rank(), world, (float) SAMPLES / world, false);
                        adamW.step();
                    }
                    assertEquals(until, adamW.steps());
                    saver.save(until, state);
                }
            });
            for (int step = 0; step < 5; ++step) {
                double sum = 0;
                for (int rank = 0; rank < world; ++rank) {
                    sum += of[rank][step] / world;
                }
                losses.add(sum);
            }
        }
        final List<Double> alone = train(1, new Way());
        for (int step = 0; step < losses.size(); ++step) {
            assertEquals(alone.get(step), losses.get(step), 1e-4 * alone.get(step), "step " + step);
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            assertArrayEquals(new long[] {8, 5}, checkpoint.read("model.w1").shape());
            assertArrayEquals(new long[] {8, 5}, checkpoint.read("optim.state.w1.exp_avg").shape());
        }
    }

    @Test
    void deferredParametersAreLoadedAtAnotherSize() throws Exception {
        final List<List<Float>> saved = Collections.synchronizedList(new ArrayList<>());
        final List<List<Float>> loaded = Collections.synchronizedList(new ArrayList<>());
        Ranks.run(2, comm -> {
            final Regression problem = new Regression(comm.rank());
            try (Fsdp fsdp = Fsdp.create(comm, problem.units()); Optimizer adamW = Optimizer.adamW(fsdp).build();
                    Saver saver = Saver.at(comm, root).open()) {
                problem.step(fsdp, comm.rank(), 2, SAMPLES / 2f, false);
                adamW.step();
                saver.save(1, State.of("model", fsdp).with("optim", adamW));
                saved.add(wholeValues(fsdp));
            }
        });
        Ranks.run(3, comm -> {
            final List<FsdpUnit> units = List.of(
                    FsdpUnit.of("first").andDeferred("w1", DType.F32, HIDDEN, IN).andDeferred("b1", DType.F32, HIDDEN),
                    FsdpUnit.of("second").andDeferred("w2", DType.F32, HIDDEN));
            try (Fsdp fsdp = Fsdp.create(comm, units); Optimizer adamW = Optimizer.adamW(fsdp).build();
                    Saver saver = Saver.at(comm, root).open()) {
                assertEquals(1, saver.resume(State.of("model", fsdp).with("optim", adamW)));
                assertEquals(1, adamW.steps());
                loaded.add(wholeValues(fsdp));
            }
        });
        assertEquals(Collections.nCopies(2, saved.get(0)), saved);
        assertEquals(Collections.nCopies(3, saved.get(0)), loaded);
    }

    private static List<Float> wholeValues(Fsdp fsdp) {
        final List<Float> values = new ArrayList<>();
        for (int i = 0; i < fsdp.size(); ++i) {
            try (Fsdp.Pass pass = fsdp.whole(fsdp.unitOf(i))) {
                for (float value : pass.paramTensor(i).toFloats()) {
                    values.add(value);
                }
            }
        }
        return values;
    }

    @Test
    void fullStatesAreGatheredTensorByTensor() throws Exception {
        Ranks.run(3, comm -> {
            final FsdpUnit unit = FsdpUnit.of("u").and("w", Tensor.copyOf(new float[] {1, 2, 3, 4, 5, 6, 7, 8}, 4, 2));
            try (Fsdp fsdp = Fsdp.create(comm, List.of(unit)); Optimizer adamW = Optimizer.adamW(fsdp).build();
                    State state = State.of("model", fsdp).with("optim", adamW)) {
                assertEquals(List.of("model.w", "optim.state.w.exp_avg", "optim.state.w.exp_avg_sq", "optim.state.w.step"),
                        state.tensors().stream().map(Checkpoint.Entry::name).collect(Collectors.toList()));
                for (int root : new int[] {-1, 2}) {
                    final Tensor whole = state.gather(comm, "model.w", root);
                    assertEquals(root == -1 || root == comm.rank(), whole != null);
                    for (int k = 0; whole != null && k < 8; ++k) {
                        assertEquals(k + 1, whole.floats().get(k));
                    }
                }
                assertThrows(TesseraInvalidArgumentException.class, () -> state.gather(comm, "model.w", 3));
                if (comm.rank() == 1) {
                    assertThrows(TesseraNotFoundException.class, () -> state.gather(comm, "model.v", -1));
                } else {
                    assertThrows(TesseraMismatchException.class, () -> state.gather(comm, "model.w", -1));
                }
            }
        });
    }

    // --- mistakes

    @Test
    void badOptionsAreRefused() throws Exception {
        final Map<FsdpOptions, String> bad = new LinkedHashMap<>();
        bad.put(new FsdpOptions().shardRanks(3), "not divisible by shard_ranks 3");
        bad.put(new FsdpOptions().shardRanks(-1), "shard_ranks is -1");
        bad.put(new FsdpOptions().forwardPrefetch(-1), "forward_prefetch is -1");
        bad.put(new FsdpOptions().backwardPrefetch(-2), "backward_prefetch is -2");
        bad.put(new FsdpOptions().gradsInFlight(0), "grads_in_flight is 0");
        bad.put(new FsdpOptions().paramDtype(DType.I32), "param_dtype");
        bad.put(new FsdpOptions().reduceDtype(DType.U8), "reduce_dtype");
        bad.put(new FsdpOptions().op(ReduceOp.MAX), "op must be AVG or SUM");
        bad.put(new FsdpOptions().preDivide(0), "pre_divide is 0");
        bad.put(new FsdpOptions().preDivide(Double.NaN), "pre_divide is nan");
        Ranks.run(2, comm -> bad.forEach((options, said) -> {
            final String message = assertThrows(TesseraInvalidArgumentException.class,
                    () -> Fsdp.create(comm, odd(1), options), said).getMessage();
            assertTrue(message.contains(said), message);
        }));
    }

    @Test
    void badModelsAreRefused() throws Exception {
        final Tensor three = Tensor.zeros(DType.F32, 3);
        final Map<String, List<FsdpUnit>> bad = new LinkedHashMap<>();
        bad.put("the model has no units", List.of());
        bad.put("\"u\" has no parameters", List.of(FsdpUnit.of("u")));
        bad.put("reshard_after_forward is 3", List.of(FsdpUnit.of("u").and("w", three).keepAmong(3)));
        bad.put("row_block is -1", List.of(FsdpUnit.of("u").and("w", three).rowBlock(-1)));
        bad.put("\"u\" is flat", List.of(FsdpUnit.of("u").and("w", three).rowBlock(2).flat(true)));
        bad.put("give it the shape [1]", List.of(FsdpUnit.of("u", Params.of("w", three.slice(0, 1).reshape()))));
        bad.put("floating-point", List.of(FsdpUnit.of("u").andDeferred("w", DType.I32, 3)));
        bad.put("two parameters are named",
                List.of(FsdpUnit.of("u", Params.of("w", three)), FsdpUnit.of("v", Params.of("module.w", three))));
        Ranks.run(2, comm -> {
            bad.forEach((said, units) -> {
                final String message =
                        assertThrows(TesseraInvalidArgumentException.class, () -> Fsdp.create(comm, units), said).getMessage();
                assertTrue(message.contains(said), message);
            });
            Fsdp.create(comm, odd(1)).close(); // nothing is out of use
            final FsdpUnit unit = FsdpUnit.of("u", Params.of("w", three));
            assertThrows(IllegalArgumentException.class, () -> Fsdp.create(comm, List.of(unit, FsdpUnit.of("u"))));
            assertThrows(IllegalArgumentException.class, () -> unit.and("w", three));
            final String frozen = assertThrows(IllegalArgumentException.class, () -> unit.freeze("w9")).getMessage();
            assertTrue(frozen.contains("\"w9\""), frozen);
            assertThrows(IllegalArgumentException.class, () -> unit.andDeferred("d", DType.F32, -1));
            assertThrows(NullPointerException.class, () -> Fsdp.create(comm, null));
            assertThrows(NullPointerException.class, () -> FsdpUnit.of("u", null));
            assertEquals("FsdpUnit(u, [w])", unit.toString());
        });
        for (Map.Entry<String, List<FsdpUnit>> of1 : bad.entrySet()) { // of one rank alone: an error of all
            Ranks.run(2, comm -> {
                if (comm.rank() == 1) {
                    final String message = assertThrows(TesseraInvalidArgumentException.class,
                            () -> Fsdp.create(comm, of1.getValue())).getMessage();
                    assertTrue(message.contains(of1.getKey()), message);
                    return;
                }
                final TesseraException told = assertThrows(TesseraException.class, () -> Fsdp.create(comm, odd(1)));
                assertNotEquals(ErrorCode.TIMEOUT, told.code(), told.getMessage());
                assertTrue(told.getMessage().contains("rank 1"), told.getMessage());
            });
        }
    }

    private static void refusedByName(String message, Executable... calls) {
        for (Executable call : calls) {
            final String said = assertThrows(IllegalArgumentException.class, call).getMessage();
            assertTrue(said.startsWith("parameter \"w\": " + message), said);
        }
    }

    /** Tensors have no strides; what comes nearest is a part of a buffer, and a buffer that the library cannot reach. */
    @Test
    void aParameterIsWhatABufferHasBetweenPositionAndLimit() throws Exception {
        Ranks.run(2, comm -> {
            final FloatBuffer all = ByteBuffer.allocateDirect(4 * 12).order(ByteOrder.nativeOrder()).asFloatBuffer();
            for (int i = 0; i < 12; ++i) {
                all.put(i, i);
            }
            final FloatBuffer part = all.duplicate();
            part.position(3).limit(9);
            final FloatBuffer onHeap = FloatBuffer.allocate(6);
            final FloatBuffer foreign = ByteBuffer.allocateDirect(24).order(
                    ByteOrder.nativeOrder() == ByteOrder.LITTLE_ENDIAN ? ByteOrder.BIG_ENDIAN : ByteOrder.LITTLE_ENDIAN)
                    .asFloatBuffer();
            final Params one = Params.of("v", part);
            refusedByName("the shape [2, 4] has 8 elements, got 6", () -> Params.of("w", part, 2, 4),
                    () -> one.and("w", part, 2, 4));
            refusedByName("the FloatBuffer is on the heap; use a direct buffer", () -> Params.of("w", onHeap, 2, 3),
                    () -> one.and("w", onHeap, 2, 3));
            refusedByName("the DoubleBuffer is on the heap; use a direct buffer",
                    () -> Params.of("w", DoubleBuffer.allocate(1)), () -> one.and("w", DoubleBuffer.allocate(1)));
            refusedByName("the buffer's byte order is", () -> Params.of("w", foreign, 2, 3),
                    () -> one.and("w", foreign, 2, 3));
            refusedByName("the shape [-1] has a negative size", () -> FsdpUnit.of("u").andDeferred("w", DType.F32, -1));
            final List<FsdpUnit> units = List.of(FsdpUnit.of("u", Params.of("w", part, 2, 3))
                    .and("v", Tensor.of(all, 4, 3).slice(9, 3).reshape(1, 3)));
            try (Fsdp fsdp = Fsdp.create(comm, units); Fsdp.Pass pass = fsdp.whole("u")) {
                for (int k = 0; k < 6; ++k) {
                    assertEquals(3f + k, pass.param("w").get(k));
                }
                for (int k = 0; k < 3; ++k) {
                    assertEquals(9f + k, pass.param("v").get(k));
                }
            }
        });
    }

    @Test
    void ranksWithoutRowsTrainAndSaveWithTheOthers() throws Exception {
        for (int part = 0; part < 2; ++part) {
            final int done = part;
            Ranks.run(4 - part, comm -> {
                final List<FsdpUnit> units = List.of(FsdpUnit.of("u", Params.of("w", counted(8, 2, 1))));
                try (Fsdp fsdp = Fsdp.create(comm, units); Optimizer sgd = Optimizer.sgd(fsdp).lr(1).build();
                        Saver saver = Saver.at(comm, root).open()) {
                    final State state = State.of("model", fsdp).with("optim", sgd);
                    assertEquals(done, saver.resume(state));
                    final boolean has = comm.rank() < 2;
                    assertArrayEquals(new long[] {has ? 1 : 0, 1}, fsdp.shardTensor(0).shape());
                    backward(fsdp, 0, 3f * comm.rank() / (comm.worldSize() - 1));
                    fsdp.await();
                    assertEquals(1.5 * Math.sqrt(2), sgd.clipGradNorm(10), 1e-6);
                    sgd.step();
                    if (has) {
                        assertEquals(8 + comm.rank() - 1.5f * (done + 1), fsdp.shard(0).get(0));
                    }
                    saver.save(done + 1, state);
                }
            });
        }
    }

    @Test
    void mistakesAreToldByName() throws Exception {
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1))) {
                final String unit = assertThrows(IllegalArgumentException.class, () -> fsdp.forward("third")).getMessage();
                assertTrue(unit.contains("no unit \"third\"") && unit.contains("[body, head]"), unit);
                final String param = assertThrows(IllegalArgumentException.class, () -> fsdp.index("w9")).getMessage();
                assertTrue(param.contains("no parameter \"w9\"") && param.contains("[w, b, h]"), param);
                assertThrows(IndexOutOfBoundsException.class, () -> fsdp.backward(2));
                assertThrows(IndexOutOfBoundsException.class, () -> fsdp.shard(-1));
                assertThrows(IndexOutOfBoundsException.class, () -> fsdp.unitOf(3));
                final String wait = assertThrows(TesseraInvalidStateException.class, fsdp::await).getMessage();
                assertTrue(wait.contains("2 of 2 units were never marked ready: \"body\", \"head\""), wait);
                try (Fsdp.Pass pass = fsdp.backward("head")) {
                    final String twice =
                            assertThrows(TesseraInvalidStateException.class, () -> fsdp.forward("body")).getMessage();
                    assertTrue(twice.contains("cannot begin during a backward pass"), twice);
                    assertThrows(TesseraInvalidStateException.class, () -> fsdp.reshard(pass.unit()));
                    pass.unused("h");
                    pass.ready();
                }
                try (Fsdp.Pass again = fsdp.backward("head")) { // of another use in the same step
                    again.unused("h");
                    again.ready();
                }
                assertThrows(TesseraInvalidArgumentException.class, () -> fsdp.layout(0).boxes(2));
                comm.barrier();
            }
        });
    }

    private static List<FsdpUnit> two(FsdpUnit first, FsdpUnit second) {
        return List.of(first, second);
    }

    @Test
    void modelsThatDifferAreRefusedByName() throws Exception {
        final FsdpUnit u = FsdpUnit.of("u").andDeferred("w", DType.F32, 2, 4).andDeferred("b", DType.F32, 2);
        final FsdpUnit v = FsdpUnit.of("v").andDeferred("x", DType.F32, 8);
        final Map<List<FsdpUnit>, List<String>> of1 = new LinkedHashMap<>(); // with what is said of rank 1 and of rank 0
        of1.put(two(u, FsdpUnit.of("other").andDeferred("x", DType.F32, 8)), List.of("unit \"other\"", "unit \"v\""));
        of1.put(List.of(u, v, FsdpUnit.of("y").andDeferred("y", DType.F32, 1)), List.of("unit \"y\"", "nothing"));
        of1.put(List.of(u), List.of("nothing", "unit \"v\""));
        of1.put(two(v, u), List.of("unit \"v\"", "unit \"u\""));
        of1.put(two(FsdpUnit.of("u").andDeferred("w", DType.F32, 2, 4),
                FsdpUnit.of("v").andDeferred("b", DType.F32, 2).andDeferred("x", DType.F32, 8)),
                List.of("unit \"u\" of 1 parameters", "unit \"u\" of 2 parameters"));
        of1.put(two(u, FsdpUnit.of("v").andDeferred("z", DType.F32, 8)),
                List.of("parameter 0 \"z\"", "parameter 0 \"x\""));
        of1.put(two(FsdpUnit.of("u").andDeferred("b", DType.F32, 2).andDeferred("w", DType.F32, 2, 4), v),
                List.of("parameter 0 \"b\"", "parameter 0 \"w\""));
        of1.put(two(u, FsdpUnit.of("v").andDeferred("x", DType.F32, 2, 4)), List.of("[2, 4]", "[8]"));
        of1.put(two(u, FsdpUnit.of("v").andDeferred("x", DType.F64, 8)), List.of("\"x\" f64", "\"x\" f32"));
        of1.put(two(u, v.freeze("x")), List.of("parameter \"x\" is not trained", "nothing"));
        of1.put(two(u, v.flat(true)), List.of("unit \"v\" with flat 1", "unit \"v\" with flat 0"));
        for (Map.Entry<List<FsdpUnit>, List<String>> entry : of1.entrySet()) {
            expectMismatch(comm -> Fsdp.create(comm, comm.rank() == 0 ? two(u, v) : entry.getKey()), entry.getValue());
        }
        expectMismatch(comm -> Fsdp.create(comm, two(u, v), new FsdpOptions().preDivide(1 + comm.rank())),
                List.of("the option pre_divide 2", "the option pre_divide 1"));
    }

    private static void expectMismatch(Ranks.Body body, List<String> said) throws Exception {
        final CountDownLatch failed = new CountDownLatch(2); // a rank that leaves early would be the other's error
        Ranks.run(2, comm -> {
            final String message = assertThrows(TesseraMismatchException.class, () -> body.run(comm)).getMessage();
            final String[] sides = message.split(", rank 0 has ");
            assertEquals(2, sides.length, message);
            assertTrue(sides[0].contains(said.get(0)) && sides[1].contains(said.get(1)), message);
            failed.countDown();
            assertTrue(failed.await(Patience.seconds(20), TimeUnit.SECONDS));
        });
    }

    @Test
    void ranksThatEnterDifferentUnitsAreTold() throws Exception {
        final List<String> told = Collections.synchronizedList(new ArrayList<>());
        final CountDownLatch failed = new CountDownLatch(2);
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1), new FsdpOptions().forwardPrefetch(0))) {
                final TesseraException error = assertThrows(TesseraException.class, () -> fsdp.forward(comm.rank()));
                failed.countDown();
                assertTrue(failed.await(Patience.seconds(20), TimeUnit.SECONDS));
                if (error instanceof TesseraMismatchException) {
                    told.add(error.getMessage());
                } else {
                    assertEquals(ErrorCode.ABORTED, error.code(), error.getMessage());
                }
            }
        });
        assertFalse(told.isEmpty());
        for (String message : told) {
            assertTrue(message.contains("\"body\"") && message.contains("\"head\""), message);
        }
    }

    @Test
    void afterAFailedCollectiveEveryCallSaysWhyAndShardsAreAsTheyWere() throws Exception {
        final CountDownLatch failed = new CountDownLatch(2);
        Ranks.run(2, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, odd(1), new FsdpOptions().forwardPrefetch(0));
                    Optimizer sgd = Optimizer.sgd(fsdp).lr(1).build()) {
                backward(fsdp, 1, 1);
                backward(fsdp, 0, 1);
                fsdp.await();
                assertThrows(TesseraException.class, () -> fsdp.forward(comm.rank()));
                failed.countDown();
                assertTrue(failed.await(Patience.seconds(20), TimeUnit.SECONDS));
                final Map<String, Executable> calls = new LinkedHashMap<>();
                calls.put("forward", () -> fsdp.forward(0));
                calls.put("backward", () -> fsdp.backward(0));
                calls.put("whole", () -> fsdp.whole(0));
                calls.put("unshard", () -> fsdp.unshard(0));
                calls.put("reshard", () -> fsdp.reshard(0));
                calls.put("await", fsdp::await);
                calls.put("abandon", fsdp::abandon);
                calls.put("zeroGrad", fsdp::zeroGrad);
                calls.put("step", sgd::step);
                calls.put("clipGradNorm", () -> sgd.clipGradNorm(1));
                calls.put("clipGradValue", () -> sgd.clipGradValue(1));
                calls.forEach((name, call) -> {
                    final TesseraException after = assertThrows(TesseraAbortedException.class, call, name);
                    assertTrue(after.getMessage().contains("unshards unit \""), name + ": " + after.getMessage());
                    assertNotNull(after.getCause(), name);
                });
                assertEquals(0, sgd.steps());
                expectRows(fsdp, comm.rank(), 2);
            }
        });
    }
}
