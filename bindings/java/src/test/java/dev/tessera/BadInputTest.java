package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.lang.reflect.Executable;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Every public method with null in each place, and on a closed object: an exception, never a crash. */
class BadInputTest {
    @TempDir
    static Path scratch;

    @TempDir
    Path root;

    /** Where null means something. */
    private static final Set<String> NULL_IS_FINE = Set.of("LoadOptions.progress 0", "LoadOptions.comm 0",
            "Checkpoint.export 0", "Mesh.flatten 1", "Comm.abort 0", "Comm.reduce 1", "Comm.reduceAsync 1",
            "Comm.gather 1", "Comm.gatherAsync 1", "Comm.scatter 0", "Comm.scatterAsync 0", "Store.compareSet 1",
            "Saver.at 0", "State.put 1", "Pipeline.step 0", "Pipeline.step 1", "Pipeline.step 2", "Pipeline.eval 0",
            "Pipeline.eval 1", "Pipeline.eval 2", "Log.setHandler 0", "Ddp.setHook 0", "Metric.update 1",
            "Metric.update 2", "Metric.update 3", "TensorParallel.crossEntropy 4",
            "TensorParallel.crossEntropyAsync 4", "Placement.equals 0", "Box.equals 0", "Device.equals 0");

    /** What a closed object still answers. */
    private static final Set<String> AFTER_CLOSE = Set.of("kind", "close", "isClosed", "toString", "rank", "worldSize", "params",
            "sizeBytes", "root");

    private static final String ENGINE_CONFIG = "{\"train_batch_size\": 1, \"optimizer\": {\"type\": \"SGD\"},"
            + " \"scheduler\": {\"type\": \"WarmupLR\"}}";

    private static final List<Class<?>> TYPES = List.of(Buffer.class, Box.class, Checkpoint.class, Comm.class,
            CommOptions.class, Ddp.class, DdpOptions.class, Device.class, Engine.class, Engine.Builder.class,
            Engine.Pass.class, Fsdp.class, Fsdp.Pass.class, FsdpOptions.class, FsdpUnit.class, GradScaler.class,
            Launch.class, Layout.class, LoadOptions.class, Log.class, LossScale.class, LossScale.Builder.class,
            LrSchedule.class, Mesh.class, Mesh.Builder.class, Metric.class, Metric.Builder.class, Optimizer.class,
            Params.class, Pipeline.class, Pipeline.Builder.class, Placement.class, Plan.class, Sampler.class,
            Saver.class, State.class, Store.class, StoreOptions.class, StoreServer.class, Tensor.class,
            TensorParallel.class, TensorParallel.Builder.class, TensorParallel.Style.class, TpOptions.class,
            CrossEntropyOptions.class, Version.class, Work.class);

    private interface Body {
        void run(Map<Class<?>, Object> instances) throws Exception;
    }

    private void withInstances(Body body) throws Exception {
        Ranks.runStores(1, (store, rank) -> {
            try (StoreServer server = StoreServer.serve("127.0.0.1", 0, new StoreOptions().insecure(true));
                    Comm comm = Comm.create(store, 0, 1);
                    Buffer buffer = Buffer.create(comm, 64);
                    Mesh mesh = Mesh.over(comm).dim("dp", 1).build();
                    Plan plan = Plan.of(comm, Plan.Collective.BARRIER, List.of(), List.of(), ReduceOp.SUM, 0);
                    Layout layout = Layout.of(new long[] {2}, new int[] {1}, Placement.replicate());
                    Ddp ddp = Ddp.create(comm, Params.of("w", Tensor.zeros(DType.F32, 2)));
                    Fsdp fsdp = Fsdp.create(comm, List.of(FsdpUnit.of("u", Params.of("w", Tensor.zeros(DType.F32, 2))),
                            FsdpUnit.of("x").andDeferred("x", DType.F32, 2)));
                    Fsdp.Pass pass = fsdp.backward("u");
                    TensorParallel tp = TensorParallel.over(mesh).deferred("x", DType.F32, 2).build();
                    Optimizer optimizer = Optimizer.sgd(ddp).build();
                    GradScaler scaler = GradScaler.builder().build();
                    LrSchedule schedule = LrSchedule.exponential(0.5);
                    LossScale lossScale = LossScale.builder().build();
                    Engine engine = Engine.on(comm).unit("u", Params.of("w", Tensor.zeros(DType.F32, 2)))
                            .unit("x", Params.of("x", Tensor.zeros(DType.F32, 2))).build(ENGINE_CONFIG);
                    Engine.Pass enginePass = engine.backward("u");
                    Pipeline pipe = Pipeline.on(comm).stage(0, call -> {}, call -> {}).microbatches(1).build();
                    Sampler sampler = Sampler.of(comm, 10).build();
                    Metric metric = Metric.of(Metric.Kind.MEAN).build();
                    Saver saver = Saver.at(comm, root).open();
                    State state = State.of("m", Tensor.zeros(DType.F32, 2));
                    Work work = comm.barrierAsync()) {
                work.await();
                saver.save(1, state);
                final Checkpoint checkpoint = Checkpoint.open(root);
                final Map<Class<?>, Object> instances = new LinkedHashMap<>();
                for (Object object : new Object[] {store, server, comm, buffer, mesh, plan, layout, ddp, fsdp, pass, tp,
                        optimizer, scaler, schedule, lossScale, LossScale.builder(), engine, enginePass, Engine.on(comm), sampler, metric,
                        Metric.of(Metric.Kind.MEAN), saver, state, work, checkpoint, new CommOptions(),
                        new DdpOptions(), new FsdpOptions(), pipe, Pipeline.on(comm), FsdpUnit.of("y"),
                        new StoreOptions(), new LoadOptions(), Mesh.over(comm), ddp.params(),
                        TensorParallel.over(mesh), TensorParallel.Style.ROW, new TpOptions(),
                        new CrossEntropyOptions(), Tensor.zeros(DType.F32, 2), Placement.shard(0), Device.cpu(),
                        new Box(new long[0], new long[0])}) {
                    instances.put(object.getClass(), object);
                }
                body.run(instances);
                checkpoint.close();
            }
        });
    }

    private static Object dummy(Class<?> type, Map<Class<?>, Object> instances) {
        final ByteBuffer direct = ByteBuffer.allocateDirect(8).order(ByteOrder.nativeOrder());
        final Map<Class<?>, Object> values = new LinkedHashMap<>(instances);
        values.putAll(Map.of(int.class, 0, long.class, 2L, double.class, 1.0, boolean.class, true, String.class, "x",
                Duration.class, Duration.ofMillis(1), byte[].class, new byte[1], long[].class, new long[] {2},
                int[].class, new int[] {1}, Path.class, scratch.resolve("nowhere")));
        values.putAll(Map.of(java.nio.FloatBuffer.class, direct.asFloatBuffer(), java.nio.DoubleBuffer.class,
                direct.asDoubleBuffer(), java.nio.IntBuffer.class, direct.asIntBuffer(), java.nio.LongBuffer.class,
                direct.asLongBuffer(), java.nio.ShortBuffer.class, direct.asShortBuffer(), ByteBuffer.class, direct,
                float[].class, new float[2], List.class, List.of(), Map.class, Map.of(), Object.class, "x"));
        values.put(Placement[].class, new Placement[] {Placement.replicate()});
        values.put(Throwable.class, new Exception("x"));
        values.put(double[].class, new double[2]);
        values.put(String[].class, new String[] {"x"});
        values.put(ExportOptions.class, new ExportOptions());
        values.put(Progress.class, (Progress) (phase, done, total) -> { });
        values.put(Storage.class, new StorageTest.MapStorage(true));
        values.put(Stateful.class, new Stateful() {
            @Override
            public Map<String, Object> stateDict() {
                return Map.of("x", 1L);
            }

            @Override
            public void loadStateDict(Map<String, Object> given) {}
        });
        values.put(Pipeline.Callback.class, (Pipeline.Callback) call -> { });
        values.put(TensorParallel.PartCallback.class, (TensorParallel.PartCallback) (begin, part) -> { });
        values.put(Ddp.Hook.class, (Ddp.Hook) bucket -> { });
        values.put(Turn.Body.class, (Turn.Body<Object, RuntimeException>) turn -> null);
        values.put(Launch.Program.class, (Launch.Program) () -> { });
        values.put(java.util.function.Function.class,
                (java.util.function.Function<Object, Object>) told -> new String[] {"x"});
        values.put(java.util.function.BiConsumer.class, (java.util.function.BiConsumer<Object, Object>) (a, b) -> { });
        values.put(Collectives.class, instances.get(Comm.class));
        if (type.isEnum()) {
            return type.getEnumConstants()[0];
        }
        if (!values.containsKey(type)) {
            throw new AssertionError("no value of " + type + " for the test");
        }
        return values.get(type);
    }

    private static List<Method> methods(Class<?> type) {
        final List<Method> methods = new ArrayList<>();
        for (Class<?> from = type; Modifier.isPublic(from.getModifiers()) && from != Object.class;
                from = from.getSuperclass()) { // a Comm's collectives are inherited
            for (Method method : from.getDeclaredMethods()) {
                final int modifiers = method.getModifiers();
                if (Modifier.isPublic(modifiers) && !Modifier.isAbstract(modifiers) && !method.isSynthetic()) {
                    methods.add(method);
                }
            }
        }
        methods.sort(java.util.Comparator.comparing(Method::toString));
        return methods;
    }

    @Test
    void nullIsRefusedEverywhere() throws Exception {
        withInstances(instances -> {
            final List<String> wrong = new ArrayList<>();
            int calls = 0;
            for (Class<?> type : TYPES) {
                for (Method method : methods(type)) {
                    for (int i = 0; i < method.getParameterCount(); ++i) {
                        final String place = type.getSimpleName() + "." + method.getName() + " " + i;
                        if (method.getParameterTypes()[i].isPrimitive() || NULL_IS_FINE.contains(place)) {
                            continue;
                        }
                        ++calls;
                        final Throwable thrown = call(method, instances.get(type), withNull(method, i, instances));
                        if (!(thrown instanceof RuntimeException)) {
                            wrong.add(place + " of " + method + ": " + thrown);
                        }
                    }
                }
            }
            assertEquals(List.of(), wrong);
            assertTrue(calls > 100, "only " + calls + " calls");
        });
    }

    private static Object[] withNull(Executable method, int index, Map<Class<?>, Object> instances) {
        final Object[] arguments = new Object[method.getParameterCount()];
        for (int i = 0; i < arguments.length; ++i) {
            arguments[i] = i == index ? null : dummy(method.getParameterTypes()[i], instances);
        }
        return arguments;
    }

    private static Throwable call(Method method, Object on, Object[] arguments) throws Exception {
        try {
            method.invoke(on, arguments);
            return null;
        } catch (InvocationTargetException error) {
            return error.getCause();
        }
    }

    private static final Map<Class<?>, List<Object>> EXTREMES = Map.of(
            int.class, List.of(Integer.MIN_VALUE, -1, Integer.MAX_VALUE),
            long.class, List.of(Long.MIN_VALUE, -1L, Long.MAX_VALUE),
            double.class, List.of(Double.NaN, Double.NEGATIVE_INFINITY, Double.MAX_VALUE),
            int[].class, List.of(new int[0], new int[] {-1}, new int[] {Integer.MAX_VALUE, Integer.MAX_VALUE}, new int[64]),
            long[].class, List.of(new long[0], new long[] {-1}, new long[] {Long.MAX_VALUE, 2}, new long[64]),
            Duration.class, List.of(Duration.ofSeconds(Long.MAX_VALUE), Duration.ofNanos(-1)),
            byte[].class, List.of(new byte[0], new byte[] {0, -1}),
            String.class, List.of("", "\0", "\ud800", "\ud83d\ude00", "a".repeat(100_000)));

    @Test
    void extremeValuesEndInAnExceptionOrGoWell() throws Exception {
        final int[] calls = {0};
        final List<String> wrong = new ArrayList<>();
        for (Class<?> type : TYPES) {
            for (Method method : methods(type)) {
                if (java.util.Arrays.stream(method.getParameterTypes()).noneMatch(EXTREMES::containsKey)) {
                    continue;
                }
                withInstances(instances -> { // fresh ones: the method before may have aborted or filled them
                    for (int i = 0; i < method.getParameterCount(); ++i) {
                        for (Object value : EXTREMES.getOrDefault(method.getParameterTypes()[i], List.of())) {
                            if (method.getName().equals("await") && value.equals("\ud83d\ude00")) {
                                continue; // a good key, which would be waited for
                            }
                            ++calls[0];
                            final Object[] arguments = withNull(method, -1, instances);
                            arguments[i] = value;
                            final Throwable thrown = call(method, instances.get(type), arguments);
                            if (thrown != null && !(thrown instanceof RuntimeException)) {
                                wrong.add(method + " " + value + ": " + thrown);
                            }
                        }
                    }
                });
            }
        }
        assertEquals(List.of(), wrong);
        assertTrue(calls[0] > 200, "only " + calls[0] + " calls");
    }

    @Test
    void closedObjectsSaySoEverywhere() throws Exception {
        withInstances(instances -> {
            final List<Object> reversed = new ArrayList<>(instances.values());
            java.util.Collections.reverse(reversed);
            for (Object object : reversed) {
                if (object instanceof NativeObject && !(object instanceof Store)) {
                    ((NativeObject) object).close();
                }
            }
            ((Store) instances.get(Store.class)).close();
            final List<String> wrong = new ArrayList<>();
            int calls = 0;
            for (Map.Entry<Class<?>, Object> entry : instances.entrySet()) {
                if (!(entry.getValue() instanceof NativeObject)) {
                    continue;
                }
                for (Method method : methods(entry.getKey())) {
                    if (Modifier.isStatic(method.getModifiers()) || AFTER_CLOSE.contains(method.getName())) {
                        continue;
                    }
                    ++calls;
                    final Throwable thrown = call(method, entry.getValue(), withNull(method, -1, instances));
                    final boolean right = thrown instanceof IllegalStateException
                            && thrown.getMessage().contains("is closed");
                    // One output a rank is checked before anything else.
                    if (!right && !(thrown instanceof IllegalArgumentException)) {
                        wrong.add(method + ": " + thrown);
                    }
                }
            }
            assertEquals(List.of(), wrong);
            assertTrue(calls > 80, "only " + calls + " calls");
        });
    }
}
