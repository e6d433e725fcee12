package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.lang.ref.WeakReference;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.ReadOnlyBufferException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalDouble;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.IntFunction;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

/** Trainings that equal those of DDP and FSDP, boundaries, overflows, schedules, checkpoints at other sizes, mistakes. */
class EngineTest {
    private static final int STEPS = 8;
    private static final int SAMPLES = 12; // of all ranks per step
    private static final int HIDDEN = 3;
    private static final int IN = 2;

    @TempDir
    Path root;

    // --- configurations

    private static String config(int stage, int micro, int accumulation, String more) {
        return String.format("{\"train_micro_batch_size_per_gpu\": %d, \"gradient_accumulation_steps\": %d,"
                + " \"zero_optimization\": {\"stage\": %d}%s}", micro, accumulation, stage, more);
    }

    private static String adam(int stage, int micro, int accumulation) {
        return config(stage, micro, accumulation,
                ", \"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 0.02, \"weight_decay\": 0.1}}");
    }

    /** With a rate of 1 and without clipping: a parameter is minus the sum of its gradients. */
    private static String sgd(int stage, int accumulation, String more) {
        return config(stage, 1, accumulation, ", \"gradient_clipping\": 0, \"optimizer\": {\"type\": \"SGD\", \"params\":"
                + " {\"lr\": 1}}" + more);
    }

    // --- a network with one hidden layer of tanh, in two units

    private static Params first(double by) {
        return Params.of("module.w", Tensor.copyOf(new double[] {by, -0.2, 0.3, 0.1, -0.4, 0.5}, HIDDEN, IN))
                .and("b", Tensor.copyOf(new double[] {0.1, 0.2, -by}));
    }

    private static Params second(double by) {
        return Params.of("v", Tensor.copyOf(new double[] {0.5, -by, 0.25}));
    }

    private static Engine engine(Comm comm, String config) {
        final double by = 0.1 + comm.rank(); // rank 0's values count
        return Engine.on(comm).unit("fc1", first(by)).unit("fc2", second(by)).build(config);
    }

    /** Gradients of the mean loss over samples, times a factor. */
    private static double[][] gradients(double[][] p, int from, int count, double factor) {
        final double[][] grads = {new double[HIDDEN * IN], new double[HIDDEN], new double[HIDDEN]};
        for (int s = from; s < from + count; ++s) {
            final double[] x = {Math.sin(s), Math.cos(3 * s)};
            final double[] h = new double[HIDDEN];
            double error = -Math.sin(2 * s);
            for (int j = 0; j < HIDDEN; ++j) {
                h[j] = Math.tanh(p[0][j * IN] * x[0] + p[0][j * IN + 1] * x[1] + p[1][j]);
                error += p[2][j] * h[j];
            }
            final double d = error * factor / count;
            for (int j = 0; j < HIDDEN; ++j) {
                final double dh = d * p[2][j] * (1 - h[j] * h[j]);
                grads[2][j] += d * h[j];
                grads[1][j] += dh;
                grads[0][j * IN] += dh * x[0];
                grads[0][j * IN + 1] += dh * x[1];
            }
        }
        return grads;
    }

    private static double[] array(DoubleBuffer values) {
        final double[] out = new double[values.remaining()];
        values.duplicate().get(out);
        return out;
    }

    private static double[][] forward(Engine engine) {
        final double[][] values = new double[engine.size()][];
        for (int unit = 0; unit < engine.unitCount(); ++unit) {
            try (Engine.Pass pass = engine.forward(unit)) {
                for (int i = 0; i < values.length; ++i) {
                    if (engine.unitOf(i) == unit) {
                        values[i] = array(pass.paramTensor(i).doubles());
                    }
                }
            }
        }
        return values;
    }

    private static void backward(Engine engine, IntFunction<double[]> grads) {
        final boolean adds = engine.addsGradients();
        for (int unit = engine.unitCount() - 1; unit >= 0; --unit) {
            try (Engine.Pass pass = engine.backward(unit)) {
                for (int i = 0; i < engine.size(); ++i) {
                    if (engine.unitOf(i) == unit) {
                        final DoubleBuffer to = pass.gradTensor(i).doubles();
                        final double[] grad = grads.apply(i);
                        for (int k = 0; k < grad.length; ++k) {
                            to.put(k, (adds ? to.get(k) : 0) + grad[k]);
                        }
                    }
                }
                pass.ready();
            }
        }
        engine.backwardDone();
    }

    /** The parameters between steps. */
    private static double[][] values(Engine engine) {
        engine.setTraining(false);
        assertFalse(engine.isTraining());
        final double[][] values = forward(engine);
        engine.setTraining(true);
        return values;
    }

    private static void train(Engine engine, Comm comm, int from, int to) {
        final int micro = (int) engine.trainMicroBatchSize();
        final long passes = engine.gradientAccumulationSteps();
        for (int step = from; step < to; ++step) {
            for (int pass = 0; pass < passes; ++pass) {
                assertEquals(pass + 1 == passes, engine.isBoundary());
                final int begin = step * SAMPLES + (pass * comm.worldSize() + comm.rank()) * micro;
                final double[][] grads = gradients(forward(engine), begin, micro, engine.lossFactor());
                backward(engine, i -> grads[i]);
                assertEquals(pass + 1 == passes, engine.step());
            }
        }
    }

    private static double[][] trainedByDdp(Comm comm) {
        final int share = SAMPLES / comm.worldSize();
        final Params params = first(0.1).and("v", second(0.1).tensors().get(0));
        try (Ddp ddp = Ddp.create(comm, params);
                Optimizer optimizer = Optimizer.adamW(ddp).lr(0.02).weightDecay(0.1).build()) {
            for (int step = 0; step < STEPS; ++step) {
                final double[][] values = params.tensors().stream().map(t -> array(t.doubles())).toArray(double[][]::new);
                final double[][] grads = gradients(values, step * SAMPLES + comm.rank() * share, share, 1);
                for (int i = 2; i >= 0; --i) {
                    ddp.gradTensor(i).doubles().put(grads[i]);
                    ddp.ready(i);
                }
                ddp.await();
                optimizer.clipGradNorm(1);
                optimizer.step();
            }
        }
        return params.tensors().stream().map(t -> array(t.doubles())).toArray(double[][]::new);
    }

    private static double[][] trainedByFsdp(Comm comm) {
        final int share = SAMPLES / comm.worldSize();
        try (Fsdp fsdp = Fsdp.create(comm, List.of(FsdpUnit.of("fc1", first(0.1)), FsdpUnit.of("fc2", second(0.1))));
                Optimizer optimizer = Optimizer.adamW(fsdp).lr(0.02).weightDecay(0.1).build()) {
            for (int step = 0; step < STEPS; ++step) {
                final double[][] grads =
                        gradients(whole(fsdp), step * SAMPLES + comm.rank() * share, share, 1);
                for (int unit = 1; unit >= 0; --unit) {
                    try (Fsdp.Pass pass = fsdp.backward(unit)) {
                        for (int i = unit * 2; i < unit + 2; ++i) {
                            pass.gradTensor(i).doubles().put(grads[i]);
                        }
                        pass.ready();
                    }
                }
                fsdp.await();
                optimizer.clipGradNorm(1);
                optimizer.step();
            }
            return whole(fsdp);
        }
    }

    private static double[][] whole(Fsdp fsdp) {
        final double[][] values = new double[3][];
        for (int unit = 0; unit < 2; ++unit) {
            try (Fsdp.Pass pass = fsdp.whole(unit)) {
                for (int i = unit * 2; i < unit + 2; ++i) {
                    values[i] = array(pass.paramTensor(i).doubles());
                }
            }
        }
        return values;
    }

    private static void expectNear(double[][] wanted, double[][] found) {
        for (int i = 0; i < wanted.length; ++i) {
            assertArrayEquals(wanted[i], found[i], 1e-10, "parameter " + i);
        }
    }

    // --- training

    @Test
    void trainsAsDdpAndFsdpDoAtEveryStage() throws Exception {
        Ranks.run(2, comm -> {
            final double[][] wanted = trainedByDdp(comm);
            assertTrue(Math.abs(wanted[0][0] - 0.1) > 0.01, "it learns something");
            expectNear(wanted, trainedByFsdp(comm));
            for (int stage = 0; stage <= 3; ++stage) {
                for (int accumulation = 1; accumulation <= 2; ++accumulation) {
                    try (Engine engine = engine(comm, adam(stage, 6 / accumulation, accumulation))) {
                        assertEquals(SAMPLES, engine.trainBatchSize());
                        assertEquals(1.0 / accumulation, engine.lossFactor());
                        assertEquals(OptionalDouble.empty(), engine.gradNorm());
                        train(engine, comm, 0, STEPS);
                        expectNear(wanted, values(engine));
                        assertTrue(engine.gradNorm().getAsDouble() > 0);
                        final Engine.Counters counters = engine.counters();
                        assertEquals(STEPS, counters.globalSteps());
                        assertEquals(STEPS * SAMPLES, counters.globalSamples());
                        assertEquals(0, counters.skippedSteps());
                        assertEquals(STEPS * accumulation, counters.microSteps());
                        assertTrue(counters.toString().contains("globalSteps " + STEPS), counters.toString());
                    }
                }
            }
        });
    }

    @Test
    void gradientsAccumulateToTheSameBits() throws Exception {
        Ranks.run(2, comm -> {
            for (int stage = 0; stage <= 3; ++stage) {
                try (Engine engine = engine(comm, sgd(stage, 4, ""))) {
                    final double[] before = values(engine)[0];
                    for (int pass = 0; pass < 4; ++pass) {
                        assertEquals(stage < 2 && pass > 0, engine.addsGradients());
                        final double value = (pass + 1 + comm.rank()) * engine.lossFactor();
                        backward(engine, i -> filled(engine, i, value));
                        engine.step();
                    }
                    assertEquals(before[0] - 3, values(engine)[0][0], "the mean of 2.5 and 3.5");
                    assertEquals(Math.sqrt(12 * 9), engine.gradNorm().getAsDouble(), 1e-12);
                }
            }
        });
    }

    private static double[] filled(Engine engine, int index, double value) {
        final double[] grad = new double[(int) Tensor.zeros(DType.F64, engine.shape(index)).numel()];
        java.util.Arrays.fill(grad, value);
        return grad;
    }

    @Test
    void boundariesAreSetAndPassesAreNotReducedWhereTheProgramWants() throws Exception {
        Ranks.run(2, comm -> {
            try (Engine engine = engine(comm, sgd(0, 2, ""))) {
                final double before = values(engine)[1][0];
                engine.setBoundary(true);
                assertTrue(engine.isBoundary());
                backward(engine, i -> filled(engine, i, 1));
                assertThrows(TesseraInvalidStateException.class, () -> engine.setBoundary(false));
                assertTrue(engine.step());
                engine.setBoundary(false);
                backward(engine, i -> filled(engine, i, 1));
                assertFalse(engine.step());
                engine.resetBoundary();
                engine.beginNoSync();
                backward(engine, i -> filled(engine, i, comm.rank()));
                final String inside = assertThrows(TesseraInvalidStateException.class, engine::step).getMessage();
                assertTrue(inside.contains("inside no_sync"), inside);
                assertThrows(TesseraInvalidStateException.class, engine::beginNoSync);
                engine.endNoSync();
                assertThrows(TesseraInvalidStateException.class, engine::endNoSync);
                backward(engine, i -> filled(engine, i, comm.rank()));
                assertTrue(engine.step());
                assertEquals(before - 1 - (1 + 0.5 + 0.5), values(engine)[1][0], 1e-15);
            }
            try (Engine engine = engine(comm, sgd(2, 1, ""))) {
                final String sharded = assertThrows(TesseraInvalidStateException.class, engine::beginNoSync).getMessage();
                assertTrue(sharded.contains("not possible at stage 2"), sharded);
            }
        });
    }

    @Test
    void batchSizesChangeBetweenSteps() throws Exception {
        Ranks.run(2, comm -> {
            try (Engine engine = engine(comm, sgd(1, 2, ""))) {
                engine.setTrainBatchSize(6);
                assertEquals(3, engine.gradientAccumulationSteps());
                engine.setTrainMicroBatchSize(4);
                assertEquals(4, engine.trainMicroBatchSize());
                assertEquals(24, engine.trainBatchSize());
                assertEquals(24L, engine.description().get("train_batch_size"));
                final String said = assertThrows(TesseraInvalidArgumentException.class,
                        () -> engine.setTrainBatchSize(25)).getMessage();
                assertTrue(said.contains("choose a multiple of 8"), said);
                for (long bad : new long[] {0, -8, Long.MAX_VALUE}) {
                    assertThrows(TesseraInvalidArgumentException.class, () -> engine.setTrainBatchSize(bad));
                    assertThrows(TesseraInvalidArgumentException.class, () -> engine.setTrainMicroBatchSize(bad));
                }
                assertEquals(24, engine.trainBatchSize());
                backward(engine, i -> filled(engine, i, 1));
                engine.step();
                assertThrows(TesseraInvalidStateException.class, () -> engine.setTrainMicroBatchSize(1));
            }
        });
    }

    @Test
    void aTrainerOfFloatsHasHalfPrecision() throws Exception {
        Ranks.run(2, comm -> {
            final String f16 = ", \"fp16\": {\"enabled\": true, \"initial_scale_power\": 4}";
            for (String precision : List.of(f16, ", \"bf16\": {\"enabled\": true}")) {
                final Params w = Params.of("w", Tensor.zeros(DType.F32, 3));
                try (Engine engine = Engine.on(comm).unit("u", w).build(sgd(2, 1, precision))) {
                    final float factor = (float) engine.lossFactor();
                    try (Engine.Pass pass = engine.backward("u")) {
                        assertArrayEquals(new float[3], pass.paramTensor("w").toFloats());
                        assertThrows(ReadOnlyBufferException.class, () -> pass.paramTensor("w").setFloats(new float[3]));
                        final float own = comm.rank() == 0 ? 1.25f : 0.25f; // 0.75 on average
                        pass.gradTensor("w").setFloats(new float[] {own * factor, 0, -own * factor});
                        pass.ready();
                    }
                    engine.backwardDone();
                    assertTrue(engine.step());
                    engine.setTraining(false);
                    try (Engine.Pass pass = engine.forward("u")) {
                        assertArrayEquals(new float[] {-0.75f, 0, 0.75f}, pass.paramTensor("w").toFloats());
                    }
                }
            }
        });
    }

    @Test
    void anOverflowOfOneRankSkipsTheStepOfAll() throws Exception {
        Ranks.run(2, comm -> {
            for (int stage = 0; stage <= 3; ++stage) {
                final String config = sgd(stage, 1, ", \"fp16\": {\"enabled\": true, \"initial_scale_power\": 4,"
                        + " \"hysteresis\": 1}, \"communication_data_type\": \"fp32\"");
                try (LrSchedule halves = LrSchedule.exponential(0.5);
                        Engine engine = Engine.on(comm).unit("u", Params.of("w", Tensor.zeros(DType.F32, 5)))
                                .schedule(halves).build(config)) {
                    final float[] factors = {1, Float.POSITIVE_INFINITY, Float.NaN, 1};
                    final double[] scales = {16, 8, 4, 4};
                    for (int step = 0; step < factors.length; ++step) {
                        final float factor = comm.rank() == 1 ? factors[step] : 1;
                        assertEquals(engine.lossScale(), engine.lossFactor());
                        try (Engine.Pass pass = engine.forward("u")) {
                            assertEquals(DType.F16, pass.paramTensor("w").dtype());
                        }
                        try (Engine.Pass pass = engine.backward("u")) {
                            for (int k = 0; k < 5; ++k) {
                                pass.grad("w").put(k, (float) engine.lossFactor() * factor);
                            }
                            pass.ready("w");
                        }
                        engine.backwardDone();
                        final boolean finite = Float.isFinite(factors[step]);
                        assertEquals(finite, engine.step());
                        assertEquals(scales[step], engine.lossScale());
                        assertEquals(!finite, Double.isInfinite(engine.gradNorm().getAsDouble()));
                    }
                    assertEquals(4, engine.counters().globalSteps());
                    assertEquals(2, engine.counters().skippedSteps());
                    assertEquals(0.25, engine.lr(), "two steps of four");
                    assertEquals(2, halves.steps());
                    engine.setTraining(false);
                    try (Engine.Pass pass = engine.forward(0)) {
                        assertEquals((short) 0xbe00, pass.paramTensor(0).shorts().get(4), "-1.5 in f16");
                    }
                }
            }
        });
    }

    @Test
    void theRateFollowsTheScheduleOfTheConfiguration() throws Exception {
        final String scheduler = ", \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_type\": \"linear\","
                + " \"warmup_num_steps\": 4, \"warmup_max_lr\": 1}}";
        Ranks.run(1, comm -> {
            final LrSchedule kept;
            try (Engine engine = engine(comm, sgd(0, 1, scheduler)); LrSchedule schedule = engine.lrSchedule();
                    LrSchedule same = LrSchedule.fromConfig(sgd(0, 1, scheduler));
                    Optimizer optimizer = engine.optimizer()) {
                for (int step = 0; step < 5; ++step) {
                    assertEquals(same.lrAt(step, 1), engine.lr(), "step " + step);
                    assertEquals(engine.lr(), optimizer.lr());
                    backward(engine, i -> filled(engine, i, 1));
                    assertTrue(engine.step());
                    assertEquals(step + 1, schedule.steps());
                    assertEquals(step + 1, optimizer.steps());
                }
                engine.setLr(0.125);
                assertEquals(0.125, optimizer.lr());
                kept = engine.lrSchedule();
            }
            assertEquals(5, kept.steps(), "it may outlive the engine");
            try (Engine engine = engine(comm, sgd(0, 1, ""))) {
                final String none = assertThrows(TesseraInvalidStateException.class, engine::lrSchedule).getMessage();
                assertTrue(none.contains("no learning-rate schedule"), none);
            }
            final Engine.Builder both = Engine.on(comm).unit("u", second(1)).schedule(kept);
            final String twice = assertThrows(TesseraInvalidArgumentException.class,
                    () -> both.build(sgd(0, 1, scheduler))).getMessage();
            assertTrue(twice.contains("leave one of the two out"), twice);
            kept.close();
            assertThrows(IllegalStateException.class, () -> both.build(sgd(0, 1, "")));
        });
    }

    // --- checkpoints

    @Test
    void aTrainingGoesOnAtAnotherSizeAndStage() throws Exception {
        final String scheduler = ", \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_num_steps\": 6}},"
                + " \"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 0.02}}";
        final double[][][] wanted = new double[1][][];
        Ranks.run(2, comm -> {
            try (Engine engine = engine(comm, config(3, 3, 2, scheduler));
                    Saver saver = Saver.at(comm, root).open();
                    State state = State.of("engine", engine)) {
                train(engine, comm, 0, 4);
                backward(engine, i -> filled(engine, i, 0));
                final String early =
                        assertThrows(TesseraInvalidStateException.class, () -> saver.save(4, state)).getMessage();
                assertTrue(early.contains("cannot be saved"), early);
            }
            try (Engine engine = engine(comm, config(3, 3, 2, scheduler));
                    Saver saver = Saver.at(comm, root).open();
                    State state = State.of("engine", engine)) {
                train(engine, comm, 0, 4);
                saver.save(4, state);
                train(engine, comm, 4, STEPS);
                final double[][] last = values(engine);
                if (comm.rank() == 0) {
                    wanted[0] = last;
                }
            }
        });
        for (int stage = 0; stage <= 3; ++stage) {
            final int at = stage;
            Ranks.run(3, comm -> {
                try (Engine engine = engine(comm, config(at, 4, 1, scheduler));
                        Saver saver = Saver.at(comm, root).open();
                        State state = new State().with("engine", engine)) {
                    assertEquals(4, saver.resume(state));
                    assertEquals(4, engine.counters().globalSteps());
                    assertEquals(8, engine.counters().microSteps());
                    assertEquals(48, engine.counters().globalSamples());
                    train(engine, comm, 4, STEPS);
                    expectNear(wanted[0], values(engine));
                }
            });
        }
    }

    // --- what it says of a configuration and a model

    @Test
    void configurationsAreResolved() throws Exception {
        final String config = "{\n  // 3 of them\n  \"train_batch_size\": 24, \"gradient_accumulation_steps\": 4,\n"
                + "  \"optimizer\": {\"type\": \"OneBitAdam\", \"params\": {\"lr\": 0.1, \"~\": 18446744073709551615}},\n"
                + "  \"scheduler\": {\"type\": \"OneCycle\", \"params\": {\"cycle_min_lr\": 0.25, \"cycle_max_lr\": 0.75,"
                + " \"cycle_first_step_size\": 2}},\n}";
        final Path file = root.resolve("ds_config.json");
        Files.writeString(file, config);
        for (Map<String, Object> found : List.of(Engine.resolve(config, 3), Engine.resolve(file, 3))) {
            assertEquals(2L, found.get("train_micro_batch_size_per_gpu"));
            assertEquals(3L, found.get("ranks"));
            assertEquals(1.0, ((Number) found.get("gradient_clipping")).doubleValue());
            final Map<?, ?> optimizer = (Map<?, ?>) found.get("optimizer");
            assertEquals("OneBitAdam", optimizer.get("type"));
            assertEquals(false, optimizer.get("core"));
            assertEquals(new java.math.BigInteger("18446744073709551615"), ((Map<?, ?>) optimizer.get("params")).get("~"));
        }
        try (LrSchedule text = LrSchedule.fromConfig(config); LrSchedule fromFile = LrSchedule.fromConfig(file)) {
            assertEquals(0.5, text.lrAt(1, 1), 1e-12);
            assertEquals(0.5, fromFile.lrAt(1, 1), 1e-12);
        }
        final String noScheduler =
                assertThrows(TesseraInvalidArgumentException.class, () -> LrSchedule.fromConfig("{}")).getMessage();
        assertTrue(noScheduler.contains("has no \"scheduler\""), noScheduler);
        final String ranks = assertThrows(TesseraInvalidArgumentException.class, () -> Engine.resolve(config, 0)).getMessage();
        assertTrue(ranks.contains("ranks is 0"), ranks);
    }

    @Test
    void unitsAndParametersHaveNamesAndNumbers() throws Exception {
        Ranks.run(2, comm -> {
            final Path file = root.resolve("rank" + comm.rank());
            Files.writeString(file, adam(2, 2, 1));
            try (Engine engine = Engine.on(comm).unit("fc1", first(1)).unit("fc2", second(1)).build(file)) {
                assertEquals(2, engine.unitCount());
                assertEquals("fc2", engine.unitName(1));
                assertEquals(1, engine.unit("fc2"));
                assertEquals(3, engine.size());
                assertEquals("w", engine.name(0));
                assertEquals(0, engine.index("module.w"));
                assertEquals(0, engine.index("w"));
                assertEquals(2, engine.index("v"));
                assertEquals(0, engine.unitOf(1));
                assertEquals(1, engine.unitOf(2));
                assertArrayEquals(new long[] {HIDDEN, IN}, engine.shape(0));
                assertTrue(engine.toString().contains("[fc1, fc2]"), engine.toString());
                assertEquals(2L, ((Map<?, ?>) engine.description().get("zero_optimization")).get("stage"));
                final String absent =
                        assertThrows(TesseraInvalidArgumentException.class, () -> engine.index("x")).getMessage();
                assertTrue(absent.contains("no parameter \"x\""), absent);
                final String unit = assertThrows(IllegalArgumentException.class, () -> engine.unit("x")).getMessage();
                assertTrue(unit.contains("no unit \"x\"; known: [fc1, fc2]"), unit);
                for (Executable call : List.<Executable>of(() -> engine.name(3), () -> engine.shape(-1),
                        () -> engine.unitOf(3), () -> engine.unitName(2), () -> engine.forward(2),
                        () -> engine.backward(-1))) {
                    assertThrows(IndexOutOfBoundsException.class, call);
                }
            }
        });
    }

    // --- memory and lifetimes

    private static WeakReference<Tensor> tensorOf(Engine.Builder builder) {
        final Tensor tensor = Tensor.zeros(DType.F32, 1000);
        builder.unit("u", Params.of("w", tensor));
        return new WeakReference<>(tensor);
    }

    @Test
    void stageZeroTrainsInPlace() throws Exception {
        Ranks.run(1, comm -> {
            final Tensor weight = Tensor.copyOf(new float[] {1, 2});
            try (Engine engine = Engine.on(comm).unit("u", Params.of("w", weight)).build(sgd(0, 1, ""))) {
                step(engine, 3);
                assertEquals(-1f, weight.floats().get(1));
            }
            for (int stage : new int[] {0, 3}) {
                Engine.Builder builder = Engine.on(comm);
                final WeakReference<Tensor> tensor = tensorOf(builder);
                try (Engine engine = builder.build(sgd(stage, 1, ""))) {
                    builder = null;
                    final WeakReference<Object> other = new WeakReference<>(new Object());
                    Ranks.collectUntil("garbage is collected", () -> other.get() == null);
                    if (stage == 0) {
                        assertNotNull(tensor.get(), "freed while it is trained");
                    } else {
                        Ranks.collectUntil("it was only read", () -> tensor.get() == null);
                    }
                    step(engine, 1);
                }
                Ranks.collectUntil("it is freed in the end", () -> tensor.get() == null);
            }
        });
    }

    private static void step(Engine engine, float value) {
        try (Engine.Pass pass = engine.backward("u")) {
            final FloatBuffer grad = pass.grad("w");
            for (int k = 0; k < grad.capacity(); ++k) {
                grad.put(k, value);
            }
            pass.ready();
        }
        engine.backwardDone();
        assertTrue(engine.step());
    }

    @Test
    void viewsEndWithTheirPass() throws Exception {
        for (int stage = 0; stage <= 3; stage += 3) {
            final int at = stage;
            Ranks.run(2, comm -> {
                try (Engine engine = engine(comm, sgd(at, 1, ""))) {
                    final Engine.Pass pass = engine.forward("fc1");
                    assertEquals(0, pass.unit());
                    final Tensor w = pass.paramTensor("w");
                    assertThrows(ReadOnlyBufferException.class, () -> w.doubles().put(0, 1));
                    final String lent =
                            assertThrows(IllegalArgumentException.class, () -> comm.allReduce(w, ReduceOp.SUM)).getMessage();
                    assertTrue(lent.contains("read-only"), lent);
                    final String noGrad = assertThrows(IllegalStateException.class, () -> pass.gradTensor("w")).getMessage();
                    assertTrue(noGrad.contains("forward pass of unit \"fc1\""), noGrad);
                    assertThrows(IllegalStateException.class, pass::ready);
                    assertThrows(IllegalStateException.class, () -> pass.ready("w"));
                    assertThrows(IllegalArgumentException.class, () -> pass.param("w"), "F64 is not float");
                    final String foreign =
                            assertThrows(IllegalArgumentException.class, () -> pass.paramTensor("v")).getMessage();
                    assertTrue(foreign.contains("parameter \"v\" does not belong to unit \"fc1\""), foreign);
                    final String twice = assertThrows(IllegalStateException.class, () -> engine.forward(0)).getMessage();
                    assertTrue(twice.contains("a pass of unit \"fc1\" is open"), twice);
                    pass.close();
                    pass.close();
                    assertEquals("this pass of unit \"fc1\" has ended",
                            assertThrows(IllegalStateException.class, w::doubles).getMessage());
                    assertThrows(IllegalStateException.class, () -> pass.paramTensor("w"));
                    forward(engine);

                    final Engine.Pass back = engine.backward("fc2");
                    back.gradTensor(2).doubles().put(new double[3]);
                    back.ready(2);
                    assertThrows(IllegalStateException.class, () -> back.paramTensor("v"), "all are ready");
                    back.close();
                    final Engine.Pass left = engine.backward("fc1");
                    final Tensor b = left.gradTensor("b");
                    b.doubles().put(new double[3]);
                    left.ready("b");
                    assertThrows(IllegalStateException.class, b::doubles);
                    final String ready = assertThrows(IllegalStateException.class, () -> left.gradTensor("b")).getMessage();
                    assertTrue(ready.contains("has ended"), ready);
                    assertThrows(TesseraInvalidStateException.class, () -> left.ready("b"));
                    left.close(); // as after an exception
                    try (Engine.Pass again = engine.backward("fc1")) {
                        again.gradTensor("w").doubles().put(new double[] {1, 1, 1, 1, 1, 1});
                        again.ready();
                    }
                    engine.backwardDone();
                    assertTrue(engine.step());
                    assertEquals(0.1 - 1, values(engine)[0][0], 1e-15);
                }
            });
        }
    }

    @Test
    void aGradientIsNotReadyWhileAnOperationInTheBackgroundUsesIt() throws Exception {
        final CountDownLatch refused = new CountDownLatch(1);
        Ranks.run(2, comm -> {
            try (Engine engine = engine(comm, sgd(3, 1, ""))) {
                final Engine.Pass pass = engine.backward("fc2");
                if (comm.rank() == 1) {
                    assertTrue(refused.await(Patience.seconds(20), TimeUnit.SECONDS));
                }
                pass.gradTensor("v").doubles().put(new double[] {1, 2, 3});
                final Work sum = comm.allReduceAsync(pass.gradTensor("v"), ReduceOp.SUM);
                if (comm.rank() == 0) { // rank 1 has not begun it
                    for (Executable end : List.<Executable>of(pass::ready, () -> pass.ready("v"), engine::backwardDone)) {
                        final String said = assertThrows(IllegalStateException.class, end).getMessage();
                        assertTrue(said.contains("1 operations in the background still use gradients of unit \"fc2\""), said);
                    }
                    refused.countDown();
                }
                sum.await();
                pass.ready();
                engine.backward("fc1").close();
                engine.backwardDone();
                assertTrue(engine.step());
                assertEquals(0.5 - 2, values(engine)[2][0], 1e-15);
            }
        });
    }

    @Test
    void closingAnEngineClosesWhatWasMadeFromIt() throws Exception {
        Ranks.run(1, comm -> {
            final Engine engine = engine(comm, sgd(0, 1, ""));
            final Optimizer optimizer = engine.optimizer();
            final State state = State.of("engine", engine);
            final Engine.Pass pass = engine.backward("fc1");
            DoubleBuffer grad = pass.gradTensor("w").doubles();
            DoubleBuffer param = pass.paramTensor("w").doubles();
            engine.close();
            assertThrows(IllegalStateException.class, () -> pass.paramTensor("w"));
            pass.close();
            final String message = assertThrows(IllegalStateException.class, optimizer::lr).getMessage();
            assertTrue(message.contains("Engine that it belongs to was closed"), message);
            assertThrows(IllegalStateException.class, () -> state.put("x", 1));
            assertThrows(IllegalStateException.class, engine::step);
            assertThrows(IllegalStateException.class, () -> engine.forward("fc1"));
            System.gc();
            assertFalse(engine.ref.isDestroyed(), "the views would point at nothing");
            grad.put(5, 42);
            assertEquals(0.5, param.get(5));
            grad = null;
            param = null;
        });
        Ranks.run(1, comm -> {
            final Engine engine = engine(comm, sgd(3, 1, ""));
            engine.close();
            engine.close();
            assertTrue(engine.ref.isDestroyed(), "at once, without views");
        });
    }

    @Test
    void afterItsCommunicatorWasClosedItSaysSo() throws Exception {
        for (int stage = 0; stage <= 3; stage += 3) {
            final String config = sgd(stage, 1, "");
            Ranks.runStores(1, (store, rank) -> {
                final Comm comm = Comm.create(store, 0, 1);
                final Engine.Builder builder = Engine.on(comm).unit("u", second(1));
                try (Engine engine = builder.build(config)) {
                    comm.close();
                    final String closed = assertThrows(IllegalStateException.class, () -> builder.build(config)).getMessage();
                    assertTrue(closed.contains("this Comm is closed"), closed);
                    if (config.contains("\"stage\": 0")) { // one rank has nothing to send at stage 3
                        expectState(() -> backward(engine, i -> new double[3]), "already destroyed");
                    }
                }
            });
        }
    }

    // --- mistakes

    @Test
    void badConfigurationsAreRefusedWithKeyAndLine() throws Exception {
        final Map<String, List<String>> bad = new LinkedHashMap<>(); // with what is said
        bad.put("", List.of("line 1, column 1"));
        bad.put("[]", List.of("object"));
        bad.put("{\"train_batch_size\": }", List.of("line 1, column 22"));
        bad.put("{\"a\": 1,\n \"a\": 2}", List.of("\"a\" occurs twice", "line 2", "line 1"));
        bad.put("{\n\"train_batch_size\": \"many\"}", List.of("\"train_batch_size\" (line 2, column 1)", "\"many\""));
        bad.put("{\"train_batch_size\": 3, \"train_micro_batch_size_per_gpu\": 2, \"optimizer\": {\"type\": \"SGD\"}}",
                List.of("train_batch_size 3 does not equal", "train_micro_batch_size_per_gpu 2"));
        bad.put("{\"optimizer\": {\"type\": \"SGD\"}}", List.of("neither train_batch_size nor"));
        bad.put("{\"train_batch_size\": 1}", List.of("has no \"optimizer\""));
        bad.put(sgd(4, 1, ""), List.of("\"zero_optimization.stage\" (line 1", "is 4", "stages are 0 to 3"));
        bad.put("{\"train_batch_size\": 1,\n \"optimizer\": {\"type\": \"SGD\",\n  \"params\": {\"lr\": -1}}}",
                List.of("\"optimizer.params.lr\" (line 3", "is -1", "at least 0"));
        bad.put("{\"x\": " + "[".repeat(100) + "]".repeat(100) + "}", List.of("nested more than 32 levels deep"));
        bad.put("{\"x\": \"" + "y".repeat(300_000) + "\"}", List.of("bytes"));
        final Map<String, List<String>> unsupported = new LinkedHashMap<>();
        unsupported.put("{\"train_batch_size\": 1,\n\"optimizer\": {\"type\": \"OneBitAdam\"}}",
                List.of("\"optimizer.type\" (line 2", "\"OneBitAdam\"", "Tessera's engine has Adam"));
        unsupported.put(sgd(0, 1, ",\n\"sparse_gradients\": true"), List.of("\"sparse_gradients\" (line 2", "set it to false"));
        Ranks.run(1, comm -> {
            final Engine.Builder builder = Engine.on(comm).unit("u", second(1));
            bad.forEach((config, said) -> expect(ErrorCode.INVALID_ARGUMENT, () -> builder.build(config), said));
            unsupported.forEach((config, said) -> expect(ErrorCode.UNSUPPORTED, () -> builder.build(config), said));
            bad.forEach((config, said) -> {
                if (!said.get(0).startsWith("has no")) {
                    expect(ErrorCode.INVALID_ARGUMENT, () -> Engine.resolve(config, 1), said);
                }
            });
            final Path absent = root.resolve("absent.json");
            for (Executable read : List.<Executable>of(() -> builder.build(absent), () -> Engine.resolve(absent, 1),
                    () -> LrSchedule.fromConfig(absent))) {
                expect(ErrorCode.NOT_FOUND, read, List.of("cannot be read", absent.toString()));
            }
            expect(ErrorCode.IO, () -> builder.build(root), List.of("cannot be read", root.toString()));
            final Path odd = root.resolve("odd.json");
            Files.write(odd, new byte[] {'{', '}', 0, '}'});
            assertThrows(TesseraInvalidArgumentException.class, () -> builder.build(odd));
            Files.write(odd, new byte[] {'{', '"', (byte) 0xff, '"', ':', '1', '}'});
            assertThrows(TesseraInvalidArgumentException.class, () -> builder.build(odd));
            Files.write(odd, new byte[4 << 20]);
            assertThrows(TesseraInvalidArgumentException.class, () -> builder.build(odd));
        });
        final Path there = root.resolve("there.json");
        Files.write(there, sgd(0, 2, "").getBytes(java.nio.charset.StandardCharsets.UTF_8));
        Ranks.run(2, comm -> {
            final Path mine = comm.rank() == 1 ? root.resolve("absent.json") : there;
            expect(ErrorCode.NOT_FOUND, () -> Engine.on(comm).unit("u", second(1)).build(mine),
                    List.of("absent.json cannot be read"));
        });
    }

    private static void expect(ErrorCode code, Executable call, List<String> said) {
        final TesseraException error = assertThrows(TesseraException.class, call, said.toString());
        assertEquals(code, error.code(), error.getMessage());
        for (String part : said) {
            assertTrue(error.getMessage().contains(part), part + " is not in: " + error.getMessage());
        }
    }

    @Test
    void badModelsAreRefused() throws Exception {
        Ranks.run(1, comm -> {
            expect(ErrorCode.INVALID_ARGUMENT, () -> Engine.on(comm).build(sgd(0, 1, "")), List.of("has no units"));
            expect(ErrorCode.INVALID_ARGUMENT, () -> Engine.on(comm).unit("u", Params.of(Map.of())).build(sgd(0, 1, "")),
                    List.of("unit \"u\" has no parameters"));
            final String twice = assertThrows(IllegalArgumentException.class,
                    () -> Engine.on(comm).unit("u", second(1)).unit("u", first(1))).getMessage();
            assertTrue(twice.contains("two units are named \"u\""), twice);
            for (int stage = 0; stage <= 3; stage += 3) {
                final String config = sgd(stage, 1, "");
                assertThrows(TesseraInvalidArgumentException.class,
                        () -> Engine.on(comm).unit("u", second(1)).unit("w", second(1)).build(config));
                assertThrows(TesseraException.class, () -> Engine.on(comm)
                        .unit("u", Params.of("i", Tensor.zeros(DType.I32, 2))).build(config));
            }
        });
    }

    @Test
    void aFaultOfOneRankIsAnErrorOfAll() throws Exception {
        final CountDownLatch failed = new CountDownLatch(4); // a rank that leaves early would be the other's error
        Ranks.run(2, comm -> {
            final String text = comm.rank() == 1 ? "{\"train_batch_size\": }" : sgd(0, 1, "");
            expect(ErrorCode.INVALID_ARGUMENT, () -> engine(comm, text), List.of("line 1, column 22"));
            failed.countDown();
            expect(ErrorCode.MISMATCH, () -> engine(comm, sgd(0, 1 + comm.rank(), "")),
                    List.of("gradient_accumulation_steps"));
            failed.countDown();
            assertTrue(failed.await(Patience.seconds(20), TimeUnit.SECONDS));
        });
    }

    @Test
    void callsInAnotherOrderAreRefused() throws Exception {
        for (int stage = 0; stage <= 3; stage += 3) {
            final int at = stage;
            Ranks.run(1, comm -> {
                try (Engine engine = engine(comm, sgd(at, 2, ""))) {
                    expectState(engine::step, "without a backward pass");
                    try (Engine.Pass pass = engine.backward("fc2")) {
                        expectState(engine::step, "call backward_done() first");
                        expectState(() -> engine.setTrainBatchSize(4), "in a backward pass");
                        expectState(engine::beginNoSync, at == 3 ? "not possible at stage 3" : "in a backward pass");
                        assertThrows(IndexOutOfBoundsException.class, () -> pass.ready(3));
                        if (at == 3) {
                            expectState(() -> engine.forward("fc1"), "cannot begin during a backward pass");
                        }
                        pass.gradTensor("v").doubles().put(new double[] {1, 1, 1});
                        pass.ready();
                        assertThrows(IllegalStateException.class, pass::ready);
                    }
                    engine.backward("fc1").close(); // its gradients are not ready: zeros
                    engine.backwardDone();
                    expectState(() -> engine.backward("fc1"), "step() was not called after the last one");
                    assertFalse(engine.step());
                    expectState(engine::step, "without a backward pass");
                    engine.setTraining(false);
                    engine.setTraining(true);
                    assertThrows(TesseraInvalidArgumentException.class, () -> engine.setLr(Double.NaN));
                    assertThrows(TesseraInvalidArgumentException.class, () -> engine.setLr(-1));
                    backward(engine, i -> filled(engine, i, 0));
                    assertTrue(engine.step(), "it goes on");
                    assertEquals(0.5 - 1, values(engine)[2][0], 1e-15);
                    assertEquals(0.1, values(engine)[0][0]);
                }
            });
        }
    }

    private static void expectState(Executable call, String said) {
        final String message = assertThrows(TesseraInvalidStateException.class, call, said).getMessage();
        assertTrue(message.contains(said), message);
    }

    @Test
    void anOverflowAtTheMinimumIsAnErrorOfAllRanks() throws Exception {
        Ranks.run(2, comm -> {
            try (Engine engine = Engine.on(comm).unit("u", Params.of("w", Tensor.zeros(DType.F32, 2))).build(sgd(1, 1,
                    ", \"fp16\": {\"enabled\": true, \"initial_scale_power\": 4, \"hysteresis\": 1, \"min_loss_scale\": 16},"
                            + " \"communication_data_type\": \"fp32\""))) {
                try (Engine.Pass pass = engine.backward("u")) {
                    pass.grad("w").put(0, comm.rank() == 0 ? Float.NaN : 1).put(1, 1);
                    pass.ready();
                }
                engine.backwardDone();
                expectState(engine::step, "at its minimum 16");
                assertEquals(0, engine.counters().globalSteps());
                comm.barrier();
            }
        });
    }
}
