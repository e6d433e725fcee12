package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.tessera.Pipeline.Schedule;
import java.io.IOException;
import java.nio.DoubleBuffer;
import java.nio.ReadOnlyBufferException;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class PipelineTest {
    private static final double EPS = 1e-12;
    private static final double RATE = 0.5;

    /** Numbers between -1 and 1 that differ from place to place. */
    private static double[] numbers(int count, int seed) {
        final double[] values = new double[count];
        for (int i = 0; i < count; ++i) {
            values[i] = Math.sin(i * 7 + 1 + seed * 1.7);
        }
        return values;
    }

    private static double[] values(Tensor tensor) {
        final double[] copy = new double[(int) tensor.numel()];
        tensor.doubles().get(copy);
        return copy;
    }

    /** x -> tanh(x W + b). Stages have different widths, so that no shape fits by chance. */
    private static final class Layer {
        final int in;
        final int out;
        final double[] w;
        final double[] b;
        final double[] dw;
        final double[] db;

        Layer(int stage) {
            in = width(stage);
            out = width(stage + 1);
            w = numbers(in * out, stage);
            b = numbers(out, stage + 100);
            dw = new double[w.length];
            db = new double[b.length];
        }

        static int width(int stage) {
            return 2 + stage % 3;
        }

        double[] forward(double[] x) {
            final double[] y = new double[x.length / in * out];
            for (int at = 0; at < y.length; ++at) {
                double z = b[at % out];
                for (int i = 0; i < in; ++i) {
                    z += x[at / out * in + i] * w[i * out + at % out];
                }
                y[at] = Math.tanh(z);
            }
            return y;
        }

        double[] inputGrad(double[] y, double[] dy) {
            final double[] dx = new double[y.length / out * in];
            for (int at = 0; at < y.length; ++at) {
                for (int i = 0; i < in; ++i) {
                    dx[at / out * in + i] += dy[at] * (1 - y[at] * y[at]) * w[i * out + at % out];
                }
            }
            return dx;
        }

        void addWeightGrad(double[] x, double[] y, double[] dy) {
            for (int at = 0; at < y.length; ++at) {
                final double dz = dy[at] * (1 - y[at] * y[at]);
                db[at % out] += dz;
                for (int i = 0; i < in; ++i) {
                    dw[i * out + at % out] += x[at / out * in + i] * dz;
                }
            }
        }

        void step() {
            for (int i = 0; i < w.length; ++i) {
                w[i] -= RATE * dw[i];
            }
            for (int i = 0; i < b.length; ++i) {
                b[i] -= RATE * db[i];
            }
            Arrays.fill(dw, 0);
            Arrays.fill(db, 0);
        }
    }

    /** Half the squared distance, a mean over rows. */
    private static double loss(double[] y, double[] targets, int rows) {
        double sum = 0;
        for (int i = 0; i < y.length; ++i) {
            sum += (y[i] - targets[i]) * (y[i] - targets[i]) / 2;
        }
        return sum / rows;
    }

    private static double[] lossGrad(double[] y, double[] targets, int rows, double weight) {
        final double[] dy = new double[y.length];
        for (int i = 0; i < y.length; ++i) {
            dy[i] = weight * (y[i] - targets[i]) / rows;
        }
        return dy;
    }

    /** What a rank computes with. */
    private static final class Trainer {
        final Map<Integer, Layer> layers = new TreeMap<>();
        final List<String> calls = new ArrayList<>();
        Pipeline.Callback before = call -> {};

        Pipeline.Builder join(Comm comm, int... stages) {
            final Pipeline.Builder builder = Pipeline.on(comm);
            for (int stage : stages) {
                layers.put(stage, new Layer(stage));
                builder.stage(stage, this::forward, this::backward, this::backwardInput, this::backwardWeight);
            }
            return builder;
        }

        private void called(String kind, StageCall call) throws Exception {
            calls.add(call.stage() + kind + call.microbatch() + (call.isLastBackward() ? "!" : ""));
            before.call(call);
        }

        void forward(StageCall call) throws Exception {
            called("F", call);
            final Layer layer = layers.get(call.stage());
            final long rows = call.inputs().get(0).shape()[0];
            final double[] y = layer.forward(values(call.inputs().get(0)));
            call.output(DType.F64, rows, layer.out).doubles().put(y);
            if (!call.targets().isEmpty()) {
                call.loss(loss(y, values(call.targets().get(0)), (int) rows));
            }
        }

        void backward(StageCall call) throws Exception {
            called("B", call);
            writeInputGrad(call);
            addWeightGrad(call);
        }

        void backwardInput(StageCall call) throws Exception {
            called("I", call);
            writeInputGrad(call);
        }

        void backwardWeight(StageCall call) throws Exception {
            called("W", call);
            addWeightGrad(call);
        }

        private static double[] outputGrad(StageCall call) {
            if (call.targets().isEmpty()) {
                return values(call.outputGrads().get(0));
            }
            return lossGrad(values(call.outputs().get(0)), values(call.targets().get(0)),
                    (int) call.outputs().get(0).shape()[0], call.weight());
        }

        private void writeInputGrad(StageCall call) {
            if (call.stage() > 0) {
                call.inputGrads().get(0).doubles().put(
                        layers.get(call.stage()).inputGrad(values(call.outputs().get(0)), outputGrad(call)));
            }
        }

        private void addWeightGrad(StageCall call) {
            layers.get(call.stage()).addWeightGrad(
                    values(call.inputs().get(0)), values(call.outputs().get(0)), outputGrad(call));
        }
    }

    /** A batch for stage 0, and targets for the last of {@code stages}. */
    private static final class Data {
        final int rows;
        final double[] x;
        final double[] y;
        final Tensor inputs;
        final Tensor targets;

        Data(int rows, int stages) {
            this.rows = rows;
            x = numbers(rows * Layer.width(0), 50);
            y = numbers(rows * Layer.width(stages), 51);
            inputs = Tensor.copyOf(x, rows, Layer.width(0));
            targets = Tensor.copyOf(y, rows, Layer.width(stages));
        }

        /** The same step without a pipeline; like torch.tensor_split, the first parts have one row more. */
        double[] stepAlone(List<Layer> layers, int m) {
            final double[] losses = new double[m];
            for (int i = 0, from = 0; i < m; ++i) {
                final int part = rows / m + (i < rows % m ? 1 : 0);
                final List<double[]> values = new ArrayList<>();
                values.add(Arrays.copyOfRange(x, from * Layer.width(0), (from + part) * Layer.width(0)));
                for (Layer layer : layers) {
                    values.add(layer.forward(values.get(values.size() - 1)));
                }
                final int width = Layer.width(layers.size());
                final double[] goal = Arrays.copyOfRange(y, from * width, (from + part) * width);
                final double[] last = values.get(layers.size());
                losses[i] = loss(last, goal, part);
                double[] dy = lossGrad(last, goal, part, (double) part / rows);
                for (int stage = layers.size() - 1; stage >= 0; --stage) {
                    final Layer layer = layers.get(stage);
                    layer.addWeightGrad(values.get(stage), values.get(stage + 1), dy);
                    dy = layer.inputGrad(values.get(stage + 1), dy);
                }
                from += part;
            }
            return losses;
        }
    }

    private static int stagesPerRank(Schedule schedule) {
        switch (schedule) {
            case GPIPE:
            case ONE_F_ONE_B:
            case ZB_H2:
                return 1;
            default:
                return 2;
        }
    }

    private static int[] stagesOf(Schedule schedule, int rank, int ranks) {
        if (stagesPerRank(schedule) == 1) {
            return new int[] {rank};
        }
        final boolean isV = schedule == Schedule.ZBV || schedule == Schedule.DUALPIPEV;
        return new int[] {isV ? 2 * ranks - 1 - rank : ranks + rank, rank};
    }

    private static List<Layer> chain(int stages) {
        final List<Layer> layers = new ArrayList<>();
        for (int stage = 0; stage < stages; ++stage) {
            layers.add(new Layer(stage));
        }
        return layers;
    }

    private static void trainsLikeOneRank(Comm comm, Schedule schedule, int m, int rows) {
        final int stages = comm.worldSize() * stagesPerRank(schedule);
        final Data data = new Data(rows, stages);
        final List<Layer> alone = chain(stages);
        final Trainer trainer = new Trainer();
        final String what = schedule + " on " + comm.worldSize() + " ranks";
        try (Pipeline pipe = trainer.join(comm, stagesOf(schedule, comm.rank(), comm.worldSize()))
                .schedule(schedule).microbatches(m).build()) {
            for (int step = 0; step < 3; ++step) {
                assertArrayEquals(data.stepAlone(alone, m), pipe.step(data.inputs, data.targets), EPS, what);
                for (Map.Entry<Integer, Layer> own : trainer.layers.entrySet()) {
                    assertArrayEquals(alone.get(own.getKey()).dw, own.getValue().dw, EPS, what);
                    assertArrayEquals(alone.get(own.getKey()).db, own.getValue().db, EPS, what);
                }
                alone.forEach(Layer::step);
                trainer.layers.values().forEach(Layer::step);
            }
        }
        final long lasts = trainer.calls.stream().filter(call -> call.endsWith("!")).count();
        assertEquals(3 * stagesPerRank(schedule), lasts, what);
    }

    @Test
    void oneRankTrainsByEverySchedule() throws Exception {
        Ranks.run(1, comm -> {
            for (Schedule schedule : Schedule.values()) {
                trainsLikeOneRank(comm, schedule, 4, 8);
            }
        });
    }

    @Test
    void twoRanksTrainLikeOne() throws Exception {
        Ranks.run(2, comm -> {
            for (Schedule schedule : Schedule.values()) {
                trainsLikeOneRank(comm, schedule, 4, 8);
            }
        });
    }

    @Test
    void fourRanksTrainLikeOne() throws Exception {
        Ranks.run(4, comm -> {
            for (Schedule schedule : List.of(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_ZERO_BUBBLE, Schedule.ZBV,
                    Schedule.DUALPIPEV)) {
                trainsLikeOneRank(comm, schedule, 8, 16);
            }
        });
    }

    @Test
    void aBatchIsCutWhereverItsRowsAllow() throws Exception {
        Ranks.run(2, comm -> {
            trainsLikeOneRank(comm, Schedule.ONE_F_ONE_B, 4, 11);
            trainsLikeOneRank(comm, Schedule.ZBV, 4, 5);
            final Trainer trainer = new Trainer();
            try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(3).build()) {
                final Data data = new Data(2, 2);
                final TesseraException error =
                        assertThrows(TesseraException.class, () -> pipe.step(data.inputs, data.targets));
                assertTrue(error instanceof TesseraInvalidArgumentException || error instanceof TesseraAbortedException,
                        error.toString());
            }
        });
    }

    @Test
    void aBackwardMayBeMadeOfItsParts() throws Exception {
        Ranks.run(1, comm -> {
            final Trainer trainer = new Trainer();
            trainer.layers.put(0, new Layer(0));
            final Data data = new Data(2, 1);
            try (Pipeline pipe = Pipeline.on(comm).stage(0, trainer::forward, trainer::backwardInput,
                    trainer::backwardWeight).microbatches(2).build()) {
                pipe.step(data.inputs, data.targets);
            }
            assertEquals(List.of("0F0", "0I0", "0W0", "0F1", "0I1!", "0W1!"), trainer.calls);
        });
    }

    @Test
    void evaluatesWithoutBackwards() throws Exception {
        Ranks.run(2, comm -> {
            final Trainer trainer = new Trainer();
            final List<Tensor> kept = new ArrayList<>();
            final Data data = new Data(5, 2);
            try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(2).build()) {
                trainer.before = call -> {
                    assertFalse(call.isTraining());
                    assertEquals(2, call.microbatches());
                    kept.add(call.inputs().get(0));
                };
                final boolean first = comm.rank() == 0;
                final double[] losses = pipe.eval(first ? data.inputs : null, first ? null : data.targets);
                assertArrayEquals(data.stepAlone(chain(2), 2), losses, EPS);
                assertEquals(List.of(comm.rank() + "F0", comm.rank() + "F1"), trainer.calls);
                kept.forEach(tensor -> assertThrows(IllegalStateException.class, tensor::bytes));
                final Pipeline.Stats stats = pipe.stats();
                assertTrue(stats.wallNanos() >= stats.busyNanos() + stats.waitedNanos(), stats.toString());
                assertEquals(first ? -1 : 0, stats.longestStage());
                assertEquals(stats.longestStage(), stats.longestRank());
                assertTrue(stats.longestNanos() <= stats.waitedNanos());
                assertTrue(stats.peakBytes() >= 4096 && stats.peakActivations() >= 1, stats.toString());
                // After it, a step is as ever.
                trainer.before = call -> assertTrue(call.isTraining());
                assertArrayEquals(losses, pipe.step(data.inputs, data.targets), EPS);
            }
        });
    }

    @Test
    void weightsScaleTheLossesGradientsAlone() throws Exception {
        Ranks.run(2, comm -> {
            final Data data = new Data(4, 2);
            final List<Double> seen = new ArrayList<>();
            final Trainer trainer = new Trainer();
            trainer.before = call -> seen.add(call.weight());
            try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(2).schedule(Schedule.GPIPE).build()) {
                final double[] losses = pipe.step(List.of(data.inputs), List.of(data.targets), new double[] {3, 5});
                assertArrayEquals(data.stepAlone(chain(2), 2), losses, EPS);
                assertEquals(comm.rank() == 1 ? List.of(3.0, 5.0, 3.0, 5.0) : List.of(0.0, 0.0, 0.0, 0.0), seen);
                assertArrayEquals(losses, pipe.eval(List.of(data.inputs), List.of(data.targets)), EPS);
            }
            for (final int wrong : new int[] {0, 1, 3}) {
                try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(2).schedule(Schedule.GPIPE).build()) {
                    final TesseraException error = assertThrows(TesseraException.class,
                            () -> pipe.step(List.of(data.inputs), List.of(data.targets), new double[wrong]));
                    assertEquals(comm.rank() == 1 ? ErrorCode.INVALID_ARGUMENT : ErrorCode.ABORTED, error.code());
                    assertTrue(error.getMessage().contains("there are " + wrong + " weights for 2 micro-batches"),
                            error.toString());
                }
            }
        });
    }

    @Test
    void anOutputMaySkipStages() throws Exception {
        Ranks.run(3, comm -> {
            final double[] grads = new double[3];
            final Pipeline.Callback forward = call -> {
                final DoubleBuffer x = call.inputs().get(0).doubles();
                if (call.stage() < 2) {
                    call.output(DType.F64, 2).doubles().put(0, 5 * x.get(0)).put(1, 5 * x.get(1));
                }
                if (call.stage() == 0) {
                    call.output(DType.F64, 2).doubles().put(0, 3 * x.get(0)).put(1, 3 * x.get(1));
                    call.output(DType.I64).longs().put(0, 42 + call.microbatch());
                } else if (call.stage() == 2) {
                    assertEquals(3, call.inputs().size());
                    assertEquals(42 + call.microbatch(), call.inputs().get(2).longs().get(0));
                    assertEquals(0, call.inputs().get(2).shape().length);
                    final DoubleBuffer skipped = call.inputs().get(1).doubles();
                    call.loss(x.get(0) + x.get(1) + skipped.get(0) + skipped.get(1));
                }
            };
            final Pipeline.Callback backward = call -> {
                for (int i = 0; i < 2; ++i) {
                    if (call.stage() == 2) {
                        call.inputGrads().get(0).doubles().put(i, 1);
                        call.inputGrads().get(1).doubles().put(i, 10);
                        assertNull(call.inputGrads().get(2), "an integer has no gradient");
                    } else if (call.stage() == 1) {
                        assertEquals(1, call.outputGrads().size());
                        call.inputGrads().get(0).doubles().put(i, 5 * call.outputGrads().get(0).doubles().get(i));
                    } else {
                        assertNull(call.outputGrads().get(2));
                        grads[0] += call.outputGrads().get(0).doubles().get(i);
                        grads[1] += call.outputGrads().get(1).doubles().get(i);
                    }
                }
            };
            try (Pipeline pipe = Pipeline.on(comm).stage(comm.rank(), forward, backward).microbatches(3)
                    .edge(0, 1, 2).edge(0, 2, 2).schedule(Schedule.GPIPE).build()) {
                final double[] losses = pipe.step(Tensor.copyOf(new double[] {1, 2, 3, 4, 5, 6}), null);
                assertArrayEquals(new double[] {28 * 3, 28 * 7, 28 * 11}, losses, EPS);
                assertArrayEquals(comm.rank() == 0 ? new double[] {30, 60, 0} : new double[3], grads, EPS);
            }
        });
    }

    @Test
    void tiedGradientsAreSummed() throws Exception {
        Ranks.run(3, comm -> {
            final Trainer trainer = new Trainer();
            final Data data = new Data(3, 3);
            try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(3).build()) {
                pipe.step(data.inputs, data.targets);
                final Tensor gradient = Tensor.copyOf(new double[] {comm.rank() + 1, 10});
                if (comm.rank() != 1) {
                    pipe.sumTied(gradient, 0, 2);
                    assertArrayEquals(new double[] {4, 20}, values(gradient));
                }
                pipe.step(data.inputs, data.targets);
                assertThrows(NullPointerException.class, () -> pipe.sumTied(null, 0));
                assertThrows(NullPointerException.class, () -> pipe.sumTied(gradient, (int[]) null));
            }
        });
    }

    @Test
    void aScheduleMayBeACsv() throws Exception {
        Ranks.run(2, comm -> {
            final Trainer trainer = new Trainer();
            final Data data = new Data(4, 2);
            final Pipeline.Builder builder = trainer.join(comm, comm.rank())
                    .scheduleCsv("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n").maxMessageBytes(1 << 20);
            try (Pipeline pipe = builder.build()) {
                assertEquals(2, pipe.eval(data.inputs, data.targets).length);
                trainer.calls.clear();
                final double[] losses = pipe.step(List.of(data.inputs), List.of(data.targets), new double[] {1, 1});
                assertArrayEquals(data.stepAlone(chain(2), 2), losses, EPS);
                final String stage = String.valueOf(comm.rank());
                assertEquals(List.of(stage + "F0", stage + "F1", stage + "B1", stage + "B0!"), trainer.calls);
                assertEquals(2, pipe.microbatches());
                assertEquals(2, pipe.stageCount());
            }
            final String message = refused(() -> trainer.join(comm, comm.rank()).scheduleCsv("0F0,0X0").build());
            assertTrue(message.contains("line 1, cell 2: '0X0' has an unknown action"), message);
        });
    }

    @Test
    void aCsvThatIsTooLargeIsRefused() throws Exception {
        Ranks.run(1, comm -> {
            final Pipeline.Builder builder =
                    new Trainer().join(comm, 0).scheduleCsv(",".repeat((256 << 20) + 1));
            final String message = refused(builder::build);
            assertTrue(message.contains("a schedule of 268435457 bytes; at most 268435456 are allowed"), message);
        });
    }

    @Test
    void anExceptionFailsTheStepOnEveryRank() throws Exception {
        Ranks.run(3, comm -> {
            final RuntimeException wrong = new RuntimeException("the tokens are wrong");
            final Data data = new Data(4, 3);
            final Trainer trainer = new Trainer();
            trainer.before = call -> {
                if (call.stage() == 1 && call.microbatch() == 2) {
                    throw wrong;
                }
            };
            try (Pipeline pipe = trainer.join(comm, comm.rank()).schedule(Schedule.GPIPE).microbatches(4).build()) {
                TesseraException error =
                        assertThrows(TesseraException.class, () -> pipe.step(data.inputs, data.targets));
                final String where = "stage 1, micro-batch 2, forward: the callback failed: "
                        + "RuntimeException: the tokens are wrong";
                assertTrue(error.getMessage().contains(where), error.getMessage());
                if (comm.rank() == 1) {
                    assertEquals(ErrorCode.USER, error.code());
                    assertSame(wrong, error.getCause());
                } else {
                    assertEquals(ErrorCode.ABORTED, error.code(), error.toString());
                }
                for (int again = 0; again < 2; ++again) {
                    error = assertThrows(TesseraAbortedException.class, () -> pipe.eval(data.inputs, data.targets));
                    assertTrue(error.getMessage().contains(where), error.getMessage());
                }
            }
            comm.barrier(); // unharmed
            trainer.before = call -> {};
            try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(4).build()) {
                assertEquals(4, pipe.step(data.inputs, data.targets).length);
            }
        });
    }

    @Test
    void aLateCallbackIsNamedOnEveryRank() throws Exception {
        final CountDownLatch failed = new CountDownLatch(2);
        final AtomicInteger timeouts = new AtomicInteger();
        Ranks.run(3, comm -> {
            final Data data = new Data(3, 3);
            final Trainer trainer = new Trainer();
            // The other ranks wait for nobody but the late one, which goes on when they have failed.
            trainer.before = call -> assertTrue(
                    call.stage() != 1 || failed.await(Patience.seconds(20), TimeUnit.SECONDS), "the others have failed");
            try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(3).build()) {
                if (comm.rank() != 1) {
                    comm.setTimeout(Duration.ofMillis(300));
                }
                final TesseraException error =
                        assertThrows(TesseraException.class, () -> pipe.step(data.inputs, data.targets));
                final String where = "(?s).*stage [02] waited for the (activation|gradient) of micro-batch 0 from "
                        + "stage 1 on rank 1, in vain for 0.3 s; check the log of rank 1.*";
                assertTrue(error.getMessage().matches(where), error.getMessage());
                if (comm.rank() != 1 && error instanceof TesseraTimeoutException) {
                    assertEquals(1, error.peer());
                    timeouts.incrementAndGet();
                } else {
                    assertEquals(ErrorCode.ABORTED, error.code(), error.toString());
                }
            } finally {
                if (comm.rank() != 1) {
                    failed.countDown();
                }
            }
        });
        assertTrue(timeouts.get() >= 1);
    }

    @Test
    void aShapeThatAStageDoesNotExpectIsNamedOnEveryRank() throws Exception {
        Ranks.run(3, comm -> {
            final Data data = new Data(5, 3); // in parts of 2, 2 and 1 rows
            final Trainer trainer = new Trainer();
            trainer.before = call -> {
                final String shape = Arrays.toString(call.inputs().get(0).shape());
                if (call.stage() == 1 && !shape.equals("[2, 3]")) {
                    throw new IllegalArgumentException("the input is " + shape + ", expected was [2, 3]");
                }
            };
            try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(3).build()) {
                final TesseraException error =
                        assertThrows(TesseraException.class, () -> pipe.step(data.inputs, data.targets));
                assertTrue(error.getMessage().contains("stage 1, micro-batch 2, forward: the callback failed: "
                        + "IllegalArgumentException: the input is [1, 3], expected was [2, 3]"), error.getMessage());
                assertEquals(comm.rank() == 1 ? ErrorCode.USER : ErrorCode.ABORTED, error.code(), error.toString());
            }
        });
    }

    @Test
    void anExceptionKeepsItsKind() throws Exception {
        Ranks.run(1, comm -> {
            final Data data = new Data(1, 1);
            final Exception lost = new IOException("the disk is gone");
            final Trainer trainer = new Trainer();
            final TesseraException io = failure(comm, trainer, data, call -> {
                throw lost;
            });
            assertEquals(ErrorCode.IO, io.code());
            assertSame(lost, io.getCause());
            final TesseraException negative = failure(comm, trainer, data, call -> call.output(DType.F32, -1));
            assertEquals(ErrorCode.INVALID_ARGUMENT, negative.code());
            assertTrue(negative.getCause() instanceof TesseraInvalidArgumentException, negative.toString());
            assertTrue(negative.getMessage().contains("has a negative size"), negative.getMessage());
            final TesseraException deep = failure(comm, trainer, data, call -> {
                throw new StackOverflowError();
            });
            assertTrue(deep.getCause() instanceof StackOverflowError, deep.toString());
            final TesseraException stopped = failure(comm, trainer, data, call -> {
                throw new InterruptedException();
            });
            assertTrue(Thread.interrupted());
            assertEquals(ErrorCode.INTERRUPTED, stopped.code());
            final TesseraException large = failure(comm, trainer, data, call -> call.output(DType.F64, 1L << 40));
            assertTrue(large.getMessage().contains("max_message_bytes"), large.getMessage());
        });
    }

    private static TesseraException failure(Comm comm, Trainer trainer, Data data, Pipeline.Callback before) {
        trainer.before = before;
        try (Pipeline pipe = trainer.join(comm, 0).microbatches(1).build()) {
            return assertThrows(TesseraException.class, () -> pipe.step(data.inputs, data.targets));
        }
    }

    @Test
    void tensorsLastAsLongAsTheirMemory() throws Exception {
        Ranks.run(1, comm -> {
            final List<StageCall> calls = new ArrayList<>();
            final List<Tensor> ofTheCall = new ArrayList<>();
            final List<Tensor> outputs = new ArrayList<>();
            final Pipeline.Callback forward = call -> {
                final Tensor x = call.inputs().get(0);
                assertThrows(ReadOnlyBufferException.class, () -> x.doubles().put(0, 1));
                assertThrows(IllegalArgumentException.class, () -> comm.allReduce(x, ReduceOp.SUM));
                final Tensor y = call.output(DType.F64, 1);
                assertThrows(IllegalArgumentException.class, () -> Plan.of(comm, Plan.Collective.ALL_REDUCE, List.of(),
                        List.of(y), ReduceOp.SUM, 0));
                y.doubles().put(0, x.doubles().get(0));
                comm.allReduce(y, ReduceOp.SUM);
                outputs.add(y);
                calls.add(call);
                if (call.stage() == 0) {
                    assertThrows(TesseraInvalidStateException.class, () -> call.loss(1));
                }
                final List<Throwable> elsewhere = new ArrayList<>();
                final Thread other = new Thread(() -> elsewhere.add(
                        assertThrows(IllegalStateException.class, () -> call.output(DType.F64, 1))));
                other.start();
                other.join();
                assertEquals(1, elsewhere.size());
            };
            final Pipeline.Callback backward = call -> {
                final StageCall before = calls.get(call.stage());
                before.inputs().get(0).doubles().get(0);
                assertEquals(1, outputs.get(call.stage()).doubles().get(0));
                assertThrows(ReadOnlyBufferException.class, () -> outputs.get(call.stage()).doubles().put(0, 1));
                assertThrows(IllegalStateException.class, () -> before.output(DType.F64, 1));
                assertThrows(IllegalStateException.class, () -> before.loss(1));
                assertThrows(TesseraInvalidStateException.class, () -> call.output(DType.F64, 1));
                if (call.stage() == 1) {
                    assertEquals(0, call.inputGrads().get(0).doubles().get(0), "they begin with zeros");
                    ofTheCall.add(call.inputGrads().get(0));
                }
            };
            final Pipeline.Callback backwardWeight = call -> {
                assertEquals(List.of(), call.inputGrads());
                ofTheCall.forEach(tensor -> assertThrows(IllegalStateException.class, tensor::address));
                call.inputs().get(0).bytes();
            };
            try (Pipeline pipe = Pipeline.on(comm).stage(0, forward, backward, backwardWeight)
                    .stage(1, forward, backward, backwardWeight).schedule(Schedule.ZBV).microbatches(1).build()) {
                final double[] losses = pipe.step(Tensor.copyOf(new double[] {1}), null);
                assertTrue(Double.isNaN(losses[0]), "none was reported");
                assertEquals(1, ofTheCall.size());
                for (StageCall call : calls) {
                    assertThrows(IllegalStateException.class, () -> call.inputs().get(0).doubles());
                    assertTrue(call.toString().contains("stage " + call.stage()), call.toString());
                }
                outputs.forEach(tensor -> assertThrows(IllegalStateException.class, tensor::doubles));
            }
        });
    }

    @Test
    void anOperationInTheBackgroundMustEndInItsCall() throws Exception {
        final CountDownLatch seen = new CountDownLatch(1);
        Ranks.run(2, comm -> {
            final Data data = new Data(1, 2);
            final List<Work> works = new ArrayList<>();
            final Trainer trainer = new Trainer();
            trainer.before = call -> {
                if (call.stage() == 0) {
                    works.add(comm.allReduceAsync(call.output(DType.F64, 4), ReduceOp.SUM));
                }
            };
            final Pipeline pipe =
                    trainer.join(comm, comm.rank()).schedule(Schedule.GPIPE).microbatches(1).build();
            final TesseraException error =
                    assertThrows(TesseraException.class, () -> pipe.step(data.inputs, data.targets));
            assertTrue(error.getMessage().contains("operations in the background still use tensors of stage 0"),
                    error.getMessage());
            pipe.close();
            if (comm.rank() == 0) {
                assertFalse(pipe.ref.isDestroyed(), "the operation still has its memory");
                seen.countDown();
                works.get(0).await();
                Ranks.eventually("it is destroyed", pipe.ref::isDestroyed);
            } else {
                assertTrue(seen.await(Patience.seconds(20), TimeUnit.SECONDS));
                comm.allReduce(Tensor.zeros(DType.F64, 4), ReduceOp.SUM);
            }
        });
    }

    @Test
    void stagesThatAreMissingOrMisplacedAreNamed() throws Exception {
        Ranks.run(2, comm -> {
            final Trainer trainer = new Trainer();
            String message = refused(() -> trainer.join(comm, 0).microbatches(2).build());
            assertTrue(message.contains("stage 1 is missing; it belongs to rank 1"), message);
            assertTrue(message.contains("stage 0 is on rank 0 and on rank 1"), message);
            message = refused(() -> trainer.join(comm, 1 - comm.rank()).microbatches(2).build());
            assertTrue(message.contains("stage 0 is on rank 1; it belongs to rank 0"), message);
            message = refused(() -> trainer.join(comm, 7 * comm.rank()).microbatches(2).build());
            assertTrue(message.contains("stage 7 of rank 1 does not exist"), message);
            message = refused(() -> trainer.join(comm, comm.rank()).microbatches(1).build());
            assertTrue(message.contains("1 micro-batches on 2 ranks; the next number that works is 2"), message);
            message = refused(() -> Pipeline.on(comm).microbatches(2).build());
            assertTrue(message.contains("this rank has no stage"), message);
            message = refused(() -> trainer.join(comm, comm.rank()).build());
            assertTrue(message.contains("microbatches is 0"), message);
            message = refused(() -> trainer.join(comm, comm.rank()).microbatches(-1).build());
            assertTrue(message.contains("microbatches is -1"), message);
            message = refused(() -> trainer.join(comm, comm.rank()).microbatches(2).edge(1, 0, 0).build());
            assertTrue(message.contains("edge"), message);
            message = refused(() -> Pipeline.on(comm).stage(comm.rank(), call -> {}, call -> {})
                    .microbatches(4).schedule(Schedule.ZB_H2).build());
            assertTrue(message.contains("needs the callback backward_input"), message);
            final TesseraException differ = assertThrows(TesseraMismatchException.class,
                    () -> trainer.join(comm, comm.rank()).microbatches(2 + comm.rank()).build());
            assertTrue(differ.getMessage().contains("micro-batches"), differ.getMessage());
        });
    }

    private static String refused(org.junit.jupiter.api.function.Executable build) {
        return assertThrows(TesseraInvalidArgumentException.class, build).getMessage();
    }

    @Test
    void closedOrBusyItRefuses() throws Exception {
        Ranks.run(1, comm -> {
            final Data data = new Data(2, 1);
            final Trainer trainer = new Trainer();
            final Pipeline pipe = trainer.join(comm, 0).microbatches(2).build();
            assertEquals(-1, pipe.stats().longestStage());
            assertEquals("Pipeline(" + comm + ", stages [0])", pipe.toString());
            pipe.setStream(0);
            assertTrue(refused(() -> pipe.setStream(1)).contains("on the CPU, which has none"));
            trainer.before = call -> {
                assertThrows(IllegalStateException.class, () -> pipe.setStream(0));
                assertThrows(IllegalStateException.class, () -> pipe.step(data.inputs, data.targets));
                assertThrows(IllegalStateException.class, () -> pipe.eval(data.inputs, data.targets));
                assertThrows(IllegalStateException.class, () -> pipe.sumTied(data.inputs, 0));
                assertThrows(IllegalStateException.class, pipe::stats);
                pipe.close();
                assertFalse(pipe.ref.isDestroyed());
            };
            assertEquals(2, pipe.step(data.inputs, data.targets).length, "it ends as it began");
            assertEquals(4, trainer.calls.size());
            assertTrue(pipe.ref.isDestroyed());
            pipe.close();
            for (org.junit.jupiter.api.function.Executable use : List.<org.junit.jupiter.api.function.Executable>of(
                    () -> pipe.step(data.inputs, data.targets), () -> pipe.eval(data.inputs, data.targets),
                    () -> pipe.sumTied(data.inputs, 0), pipe::stats)) {
                assertTrue(assertThrows(IllegalStateException.class, use).getMessage().contains("is closed"));
            }
            trainer.before = call -> {};
            assertEquals(ErrorCode.UNSUPPORTED, assertThrows(TesseraException.class,
                    () -> trainer.join(comm, 0).microbatches(2).onDevice(true).build()).code());
            final Pipeline last = trainer.join(comm, 0).microbatches(2).build();
            last.step(data.inputs, data.targets);
            comm.close();
            assertTrue(last.isClosed() && last.ref.isDestroyed());
            assertThrows(IllegalStateException.class, () -> last.step(data.inputs, data.targets));
            assertThrows(IllegalStateException.class, () -> trainer.join(comm, 0).microbatches(2).build());
        });
    }

    @Test
    void aRankThatClosesOrIsInterruptedFailsThoseWhoWait() throws Exception {
        for (boolean interrupts : List.of(false, true)) {
            final AtomicReference<Thread> waits = new AtomicReference<>();
            Ranks.run(2, comm -> {
                final Data data = new Data(2, 2);
                final Trainer trainer = new Trainer();
                try (Pipeline pipe = trainer.join(comm, comm.rank()).microbatches(2).build()) {
                    if (comm.rank() == 0) {
                        trainer.before = call -> waits.set(Thread.currentThread());
                        final TesseraException error =
                                assertThrows(TesseraException.class, () -> pipe.step(data.inputs, data.targets));
                        assertEquals(interrupts, error instanceof TesseraInterruptedException, error.toString());
                        assertEquals(interrupts, Thread.interrupted());
                    } else if (interrupts) {
                        Ranks.eventually("rank 0 is in its step", () -> waits.get() != null);
                        waits.get().interrupt();
                        assertThrows(TesseraAbortedException.class, () -> pipe.step(data.inputs, data.targets));
                    }
                }
            });
        }
    }

    @Test
    void oneThatIsForgottenIsFreed() throws Exception {
        Ranks.run(1, comm -> {
            final Ref forgotten = forget(comm);
            Ranks.collectUntil("it is freed", forgotten::isDestroyed);
        });
    }

    private static Ref forget(Comm comm) {
        final Trainer trainer = new Trainer();
        final Data data = new Data(2, 1);
        final Pipeline pipe = trainer.join(comm, 0).microbatches(2).build();
        pipe.step(data.inputs, data.targets);
        return pipe.ref;
    }

    @Test
    void aDdpInAStageReducesAtTheLastBackward() throws Exception {
        Ranks.run(4, comm -> {
            try (Mesh mesh = Mesh.over(comm).dim("pp", 2).dim("dp", 2).build();
                    Comm pp = mesh.comm("pp");
                    Comm dp = mesh.comm("dp");
                    Ddp ddp = Ddp.create(dp, Params.of("w", Tensor.copyOf(new float[] {pp.rank() + 2})))) {
                final Pipeline.Callback forward = call -> call.output(DType.F32, 1).floats()
                        .put(0, call.inputs().get(0).floats().get(0) * ddp.param(0).get(0));
                final Pipeline.Callback backward = call -> {
                    ddp.setSync(call.isLastBackward());
                    final float dy = call.stage() == 1 ? 1 : call.outputGrads().get(0).floats().get(0);
                    if (call.stage() == 1) {
                        call.inputGrads().get(0).floats().put(0, dy * ddp.param(0).get(0));
                    }
                    ddp.grad(0).put(0, ddp.grad(0).get(0) + dy * call.inputs().get(0).floats().get(0));
                    ddp.readyAll();
                    ddp.await();
                };
                try (Pipeline pipe = Pipeline.on(pp).stage(pp.rank(), forward, backward).microbatches(2).build()) {
                    pipe.step(Tensor.copyOf(new float[] {1 + dp.rank(), 2 + dp.rank()}), null);
                }
                // The inputs' sum is 3 or 5, so its average 4.
                assertEquals(pp.rank() == 0 ? 3 * 4f : 2 * 4f, ddp.grad(0).get(0));
            }
        });
    }

    @Test
    void statesAndOptimizersOfRanksWithDifferentParametersAreJoined(@TempDir Path root) throws Exception {
        Ranks.run(2, comm -> {
            final Tensor weight = Tensor.copyOf(new float[] {comm.rank() + 1}, 1);
            final Params params = Params.of(comm.rank() == 0 ? "first" : "second", weight);
            final Tensor grad = Tensor.copyOf(new float[] {3 + comm.rank()}, 1);
            try (Optimizer sgd = Optimizer.sgd(params, List.of(grad)).momentum(0.5).build();
                    State state = State.of("weight." + params.names().get(0), weight).with("optim", sgd);
                    Saver saver = Saver.at(comm, root).open()) {
                sgd.join(comm);
                assertEquals(5, sgd.clipGradNorm(100));
                assertThrows(TesseraInvalidStateException.class, () -> sgd.join(comm));
                assertThrows(TesseraMismatchException.class, () -> saver.save(1, state));
                assertSame(state, state.join(comm));
                saver.save(1, state);
                weight.floats().put(0, 0);
                assertEquals(1, saver.resume(state));
                assertEquals(comm.rank() + 1, weight.floats().get(0));
                assertEquals(1, state.gather(comm, "weight.first", -1).floats().get(0));
            }
        });
    }

    @Test
    void nullIsRefusedAndNothingIsBegun() throws Exception {
        assertThrows(NullPointerException.class, () -> Pipeline.on(null));
        Ranks.run(1, comm -> {
            final Pipeline.Callback none = call -> {};
            final Pipeline.Builder builder = Pipeline.on(comm);
            assertThrows(NullPointerException.class, () -> builder.stage(0, null, none));
            assertThrows(NullPointerException.class, () -> builder.stage(0, none, null));
            assertThrows(NullPointerException.class, () -> builder.stage(0, none, null, none));
            assertThrows(NullPointerException.class, () -> builder.stage(0, none, none, none, null));
            assertThrows(NullPointerException.class, () -> builder.schedule(null));
            assertThrows(NullPointerException.class, () -> builder.scheduleCsv(null));
            builder.stage(0, none, none);
            assertThrows(IllegalArgumentException.class, () -> builder.stage(0, none, none));
            try (Pipeline pipe = builder.microbatches(2).build()) {
                assertThrows(NullPointerException.class, () -> pipe.step(null, List.of()));
                assertThrows(NullPointerException.class, () -> pipe.step(Arrays.asList((Tensor) null), List.of()));
                assertThrows(NullPointerException.class, () -> pipe.eval(List.of(), null, null));
                assertEquals(2, pipe.step((Tensor) null, null).length, "callbacks with their own data");
            }
        });
    }
}
