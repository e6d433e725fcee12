package dev.tessera;

import java.nio.FloatBuffer;
import java.nio.file.FileSystems;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.OptionalDouble;
import java.util.function.LongUnaryOperator;
import java.util.function.Supplier;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/**
 * DeepSpeed's engine: a configuration ({@code ds_config}) makes the data-parallel model, the optimizer, the loss scale and
 * the learning-rate schedule, and a step does what the configuration asks. Your program computes. docs/ENGINE.md has the
 * keys of the configuration.
 *
 * <pre>{@code
 * try (Engine engine = Engine.on(comm).unit("fc1", params1).unit("fc2", params2).build(Path.of("ds_config.json"))) {
 *     for (...) {                                          // micro-batches
 *         for (int unit = 0; unit < engine.unitCount(); ++unit) {
 *             try (Engine.Pass pass = engine.forward(unit)) {
 *                 ...                                      // compute with pass.param("w1")
 *             }
 *         }
 *         ...                                              // the loss times engine.lossFactor()
 *         for (int unit = engine.unitCount() - 1; unit >= 0; --unit) {
 *             try (Engine.Pass pass = engine.backward(unit)) {
 *                 ...                                      // write pass.grad("w1"), or add if engine.addsGradients()
 *                 pass.ready();
 *             }
 *         }
 *         engine.backwardDone();
 *         engine.step();
 *     }
 * }
 * }</pre>
 *
 * <p>Every {@link #gradientAccumulationSteps}-th {@link #step} is a boundary: the optimizer makes a step, and gradients are
 * set to zero. Between boundaries gradients add up. All ranks make the same calls, in the same order.
 *
 * <p>Parameters are numbered in order over all units; units and parameters are identified by number or name. All methods,
 * including those of {@link Pass}, are exclusive, except those that only describe the model.
 *
 * <p>Closing it ends its open passes and closes its {@linkplain #optimizer optimizer} and the states made from it. The memory
 * is freed as soon as no view of it is reachable.
 */
public final class Engine extends NativeObject {
    private final Comm comm; // not closed by us; reachable while we are
    private final UnitNames names;
    private final List<long[]> shapes;
    private final Views.View[] params; // by exclusive calls only, as grads
    private final Views.View[] grads;
    private final Pass[] open; // of each unit; guards itself
    private final Tensor.Uses[] uses; // of each unit's gradients: parameters are lent to no operation
    private final int[] notReady; // of each unit: gradients in its backward; by exclusive calls only

    private interface ParamCall {
        long[] call(long handle, long index);
    }

    /** What an engine has counted, including what a loaded checkpoint had. Immutable. */
    public static final class Counters {
        private final long[] counts;

        private Counters(long[] counts) {
            this.counts = counts;
        }

        /**
         * Boundaries.
         *
         * @return their number, with those whose step was skipped
         */
        public long globalSteps() {
            return counts[0];
        }

        /**
         * Samples of all ranks.
         *
         * @return their number
         */
        public long globalSamples() {
            return counts[1];
        }

        /**
         * Boundaries whose step was skipped.
         *
         * @return their number
         */
        public long skippedSteps() {
            return counts[2];
        }

        /**
         * Calls of {@link Engine#step}.
         *
         * @return their number
         */
        public long microSteps() {
            return counts[3];
        }

        @Override
        public String toString() {
            return "Counters(globalSteps " + counts[0] + ", globalSamples " + counts[1] + ", skippedSteps " + counts[2]
                    + ", microSteps " + counts[3] + ")";
        }
    }

    /** What an engine is made of. Units, in the order of the model's forward, must be the same on every rank. */
    public static final class Builder {
        private final Comm comm;
        private final Map<String, Params> units = new LinkedHashMap<>();
        private LrSchedule schedule;

        private Builder(Comm comm) {
            this.comm = Objects.requireNonNull(comm, "comm");
        }

        /**
         * Add a part of the model whose parameters are used together, such as a layer.
         *
         * @param name unique in the model
         * @param params contiguous floating-point tensors on the CPU, with names that are unique in the model; a leading
         *     "module." or "_orig_mod." is stripped. At stage 0 without {@code "fp16"} and {@code "bf16"} they are trained
         *     in place and kept reachable until the engine is closed; otherwise they are read by {@code build} only
         * @return this
         * @throws IllegalArgumentException if there is a unit of this name
         */
        public Builder unit(String name, Params params) {
            Native.utf8(name, "name");
            Objects.requireNonNull(params, "params");
            if (units.putIfAbsent(name, params) != null) {
                throw new IllegalArgumentException("two units are named \"" + name + "\"");
            }
            return this;
        }

        /**
         * Use this learning-rate schedule; the configuration must then have none. The engine attaches its optimizer to it and
         * steps it.
         *
         * @param value may be closed before the engine
         * @return this
         */
        public Builder schedule(LrSchedule value) {
            schedule = Objects.requireNonNull(value, "schedule");
            return this;
        }

        /**
         * Make the engine: checks that all ranks have the same configuration and model, and begins with rank 0's parameters.
         * Rank 0 logs the keys that are unknown or without effect. Collective; the communicator and the schedule are in
         * exclusive use during the call.
         *
         * @param config the text of a {@code ds_config}: JSON, comments and trailing commas allowed
         * @return the engine
         * @throws TesseraInvalidArgumentException on every rank, if the configuration of one is malformed, contradicts
         *     itself or has no {@code "optimizer"}; the message has the key, its line, its value and what to do. Also for a
         *     model without units, or a unit without parameters
         * @throws TesseraException with {@link ErrorCode#UNSUPPORTED}: an optimizer or scheduler that this library does not
         *     have, a key that is refused, or a tensor on a device
         * @throws TesseraMismatchException if the ranks differ; the message names the first difference
         */
        public Engine build(String config) {
            return build(() -> Native.utf8(config, "config"));
        }

        /**
         * As {@link #build(String)}.
         *
         * @param config a file, which every rank reads; its path has no brace
         * @return the engine
         * @throws TesseraException with {@link ErrorCode#NOT_FOUND} or {@link ErrorCode#IO}, on every rank, if one cannot
         *     read the file
         */
        public Engine build(Path config) {
            return build(() -> pathOf(config));
        }

        private Engine build(Supplier<byte[]> source) {
            final byte[] config = comm.orRefuse(Creation.MODEL, source);
            final List<byte[]> paramNames = new ArrayList<>();
            comm.orRefuse(Creation.MODEL, () -> {
                units.values().forEach(params -> Collections.addAll(paramNames, params.nameBytes()));
                return paramNames;
            });
            final List<Tensor> tensors =
                    units.values().stream().flatMap(params -> params.tensors().stream()).collect(Collectors.toList());
            final byte[][] unitNames = units.keySet().stream().map(name -> Native.utf8(name, "name")).toArray(byte[][]::new);
            final int[] counts = units.values().stream().mapToInt(Params::size).toArray();
            final long[] values = comm.orRefuse(Creation.MODEL, () -> Tensor.descriptors(tensors));
            final long handle = Comm.creating(comm, Creation.MODEL, reached -> {
                final LongUnaryOperator create = s -> comm.ref.callLongExclusive(c -> {
                    reached.set(true);
                    return create(c, unitNames, counts, paramNames, values, config, s);
                });
                return schedule == null ? create.applyAsLong(0) : schedule.ref.callLongExclusive(create);
            });
            return new Engine(handle, comm, units, tensors);
        }

        private static long create(long comm, byte[][] unitNames, int[] counts, List<byte[]> paramNames,
                long[] tensors, byte[] config, long schedule) {
            return Native.engineCreate(
                    comm, unitNames, counts, paramNames.toArray(new byte[0][]), tensors, config, schedule);
        }
    }

    /**
     * A unit while it computes. Use its views (tensors and buffers) only until the pass ends: by {@link #close}, when all its
     * gradients are ready, by {@link Engine#backwardDone}, or with the engine. Its methods and tensors then throw {@link
     * IllegalStateException}. Buffers cannot: a buffer that is kept shows other parameters or gradients, and writing to it
     * may destroy them. It never points at freed memory.
     */
    public final class Pass implements AutoCloseable {
        private final int unit;
        private final boolean isForward;
        private final Tensor.Lease reading;
        private final Tensor.Lease[] writing; // of each gradient
        private final Tensor[] paramTensors;
        private final Tensor[] gradTensors;

        private Pass(int unit, boolean isForward) {
            this.unit = unit;
            this.isForward = isForward;
            final String what = "this pass of unit \"" + names.unit(unit) + "\" has ended";
            reading = new Tensor.Lease(Tensor.Lender.ENGINE_PASS, true, what, uses[unit]);
            paramTensors = new Tensor[names.paramCount(unit)];
            gradTensors = new Tensor[paramTensors.length];
            writing = Stream.generate(() -> new Tensor.Lease(Tensor.Lender.ENGINE_PASS, false,
                    "the time of this gradient of unit \"" + names.unit(unit) + "\" has ended", uses[unit]))
                    .limit(gradTensors.length).toArray(Tensor.Lease[]::new);
        }

        /**
         * The unit.
         *
         * @return its number
         */
        public int unit() {
            return unit;
        }

        /**
         * An F32 parameter, like {@link #paramTensor(int)}.
         *
         * @param index of a parameter of this unit
         * @return read-only; elements row-major, position 0
         * @throws IllegalArgumentException if the parameter belongs to another unit or has another dtype
         */
        public FloatBuffer param(int index) {
            return paramTensor(index).floats();
        }

        /**
         * As {@link #param(int)}.
         *
         * @param name of a parameter of this unit
         * @return read-only; elements row-major, position 0
         */
        public FloatBuffer param(String name) {
            return param(index(name));
        }

        /**
         * The values of a parameter. It is read-only, because the ranks of a host may share one copy: its buffers are
         * read-only, and operations, which write in place, refuse it.
         *
         * @param index of a parameter of this unit
         * @return of the parameter's shape; F16 or BF16 with {@code "fp16"} or {@code "bf16"}, otherwise of its dtype
         * @throws IllegalArgumentException if the parameter belongs to another unit
         */
        public Tensor paramTensor(int index) {
            return ref.callExclusive(h -> {
                final int place = place(index);
                return view(h, index, place, paramTensors, Native::engineParam, params, reading);
            });
        }

        /**
         * As {@link #paramTensor(int)}.
         *
         * @param name of a parameter of this unit
         * @return the tensor
         */
        public Tensor paramTensor(String name) {
            return paramTensor(index(name));
        }

        /**
         * The gradient of a parameter, to be written, like {@link #gradTensor(int)}.
         *
         * @param index of a parameter of this unit
         * @return elements row-major, position 0
         * @throws IllegalArgumentException if the parameter belongs to another unit, or the gradient is not F32
         */
        public FloatBuffer grad(int index) {
            return gradTensor(index).floats();
        }

        /**
         * As {@link #grad(int)}.
         *
         * @param name of a parameter of this unit
         * @return elements row-major, position 0
         */
        public FloatBuffer grad(String name) {
            return grad(index(name));
        }

        /**
         * The memory for the gradient of a parameter. If {@link Engine#addsGradients}, add to what it holds; otherwise
         * overwrite all of it, as its content is undefined.
         *
         * @param index of a parameter of this unit
         * @return of the parameter's shape; its dtype is that of {@link #paramTensor(int)}, unless the configuration has a
         *     {@code "communication_data_type"}
         * @throws IllegalArgumentException if the parameter belongs to another unit
         * @throws IllegalStateException if this is not a backward, or the gradient is ready
         */
        public Tensor gradTensor(int index) {
            return ref.callExclusive(h -> {
                final int place = place(index);
                requireBackward();
                writing[place].check();
                return view(h, index, place, gradTensors, Native::engineGrad, grads, writing[place]);
            });
        }

        /**
         * As {@link #gradTensor(int)}.
         *
         * @param name of a parameter of this unit
         * @return the tensor
         */
        public Tensor gradTensor(String name) {
            return gradTensor(index(name));
        }

        /**
         * Mark one gradient as written. When all of the unit are, this pass ends and their reduction begins in the
         * background, unless the pass is not reduced.
         *
         * @param index of a parameter of this unit
         * @throws IllegalArgumentException if the parameter belongs to another unit
         * @throws IllegalStateException if this is not a backward, or while an operation in the background uses a gradient
         * @throws TesseraInvalidStateException if it is marked already
         */
        public void ready(int index) {
            ref.runExclusive(h -> {
                final int place = place(index);
                requireBackward();
                requireUnused(unit);
                Native.engineReady(h, index);
                writing[place].end();
                if (--notReady[unit] == 0) {
                    end(unit);
                }
            });
        }

        /**
         * As {@link #ready(int)}.
         *
         * @param name of a parameter of this unit
         */
        public void ready(String name) {
            ready(index(name));
        }

        /**
         * Mark the gradients of the unit as written that are not yet, like {@link #ready(int)}. This ends the pass.
         *
         * @throws IllegalStateException if this is not a backward, or while an operation in the background uses a gradient
         */
        public void ready() {
            ref.runExclusive(h -> {
                reading.check();
                requireBackward();
                requireUnused(unit);
                Native.engineUnitReady(h, unit);
                notReady[unit] = 0;
                end(unit);
            });
        }

        /**
         * End the pass. After a forward the parameters may be sharded again. A backward without {@link #ready()}, for example
         * after an exception, is not over: {@link Engine#backward(int)} continues it, and {@link Engine#backwardDone} counts
         * what is not ready as zeros. Does nothing if the pass has already ended.
         */
        @Override
        public void close() {
            if (reading.isOver()) {
                return;
            }
            ref.runExclusive(h -> {
                end(unit);
                if (isForward) {
                    Native.engineForwardDone(h, unit);
                }
            });
        }

        private Tensor view(long handle, int index, int place, Tensor[] known, ParamCall get, Views.View[] views,
                Tensor.Lease lease) {
            if (known[place] == null) {
                known[place] = Views.lent(ref, get.call(handle, index), views, index, lease);
            }
            return known[place];
        }

        private int place(int index) {
            reading.check();
            return names.place(unit, index);
        }

        private void requireBackward() {
            if (isForward) {
                throw new IllegalStateException("this is a forward pass of unit \"" + names.unit(unit)
                        + "\"; gradients belong to engine.backward(unit)");
            }
        }

        private void endLeases() {
            reading.end();
            for (Tensor.Lease lease : writing) {
                lease.end();
            }
        }
    }

    private Engine(long handle, Comm comm, Map<String, Params> units, List<Tensor> tensors) {
        super(new Ref("Engine", handle, Native::engineDestroy).keep(tensors));
        this.comm = comm;
        names = new UnitNames(List.copyOf(units.keySet()), List.copyOf(units.values()),
                index -> ref.call(h -> Native.text(Native.engineParamName(h, index))));
        shapes = tensors.stream().map(Tensor::shape).collect(Collectors.toUnmodifiableList());
        params = new Views.View[names.paramCount()];
        grads = new Views.View[names.paramCount()];
        open = new Pass[names.unitCount()];
        uses = Stream.generate(Tensor.Uses::new).limit(open.length).toArray(Tensor.Uses[]::new);
        notReady = new int[open.length];
        if (!trainsInPlace(description())) {
            ref.keep(null);
        }
    }

    private static boolean trainsInPlace(Map<String, Object> description) {
        final Map<?, ?> zero = (Map<?, ?>) description.get("zero_optimization");
        return zero.get("stage").equals(0L) && description.get("precision").equals("params");
    }

    /**
     * Start building an engine.
     *
     * @param comm the data-parallel ranks
     * @return a builder
     */
    public static Builder on(Comm comm) {
        return new Builder(comm);
    }

    /**
     * What a configuration says, without an engine: the batch sizes and every default filled in. An optimizer or scheduler
     * that this library does not have is passed through with {@code "core": false}. docs/ENGINE.md lists the members.
     *
     * @param config the text of a {@code ds_config}: JSON, comments and trailing commas allowed
     * @param ranks the number of data-parallel ranks, at least 1
     * @return a new map; its values are null, Boolean, Long, Double, String, List and Map
     * @throws TesseraInvalidArgumentException if it is malformed or contradicts itself; the message has the key, its line,
     *     its value and what to do
     * @throws TesseraException with {@link ErrorCode#UNSUPPORTED} for a key that is refused
     */
    public static Map<String, Object> resolve(String config, int ranks) {
        return object(Native.engineConfig(Native.utf8(config, "config"), ranks));
    }

    /**
     * As {@link #resolve(String, int)}.
     *
     * @param config a file; its path has no brace
     * @param ranks the number of data-parallel ranks, at least 1
     * @return a new map
     * @throws TesseraException with {@link ErrorCode#NOT_FOUND} or {@link ErrorCode#IO} if the file cannot be read
     */
    public static Map<String, Object> resolve(Path config, int ranks) {
        return object(Native.engineConfig(pathOf(config), ranks));
    }

    /** For the library, which reads the file: so a rank that cannot read it fails the creation on all. */
    static byte[] pathOf(Path config) {
        if (!Objects.requireNonNull(config, "config").getFileSystem().equals(FileSystems.getDefault())) {
            throw new IllegalArgumentException(
                    "the configuration " + config + " is not in the default file system; give its text");
        }
        return Native.utf8(config.toAbsolutePath().toString(), "config");
    }

    @SuppressWarnings("unchecked")
    private static Map<String, Object> object(byte[] json) {
        return (Map<String, Object>) Values.fromPlainJson(Native.text(json));
    }

    /**
     * What the configuration says, as {@link #resolve(String, int)}, with the batch sizes as they are now.
     *
     * @return a new map
     */
    public Map<String, Object> description() {
        return object(ref.callExclusive(Native::engineDescription));
    }

    /**
     * The number of units.
     *
     * @return at least 1
     */
    public int unitCount() {
        return (int) ref.callLong(Native::engineUnitCount);
    }

    /**
     * The name of a unit.
     *
     * @param unit 0 to unitCount - 1
     * @return as given
     */
    public String unitName(int unit) {
        return ref.call(h -> names.unit(unit));
    }

    /**
     * The number of a unit.
     *
     * @param name as given
     * @return 0 to unitCount - 1
     * @throws IllegalArgumentException if there is no such unit
     */
    public int unit(String name) {
        return ref.call(h -> names.unit(name));
    }

    /**
     * The number of parameters, over all units.
     *
     * @return at least 1
     */
    public int size() {
        return (int) ref.callLong(Native::engineParamCount);
    }

    /**
     * The name of a parameter, without a leading "module." or "_orig_mod.".
     *
     * @param index 0 to size - 1
     * @return the name in checkpoints
     */
    public String name(int index) {
        return ref.call(h -> names.param(index));
    }

    /**
     * The number of a parameter.
     *
     * @param name as given, or without a leading "module." or "_orig_mod."
     * @return 0 to size - 1
     * @throws TesseraInvalidArgumentException if there is no such parameter
     */
    public int index(String name) {
        final byte[] text = Native.utf8(name, "name");
        return (int) ref.callLong(h -> names.has(name) ? names.param(name) : Native.engineFind(h, text));
    }

    /**
     * The unit of a parameter.
     *
     * @param index 0 to size - 1
     * @return the unit's number
     */
    public int unitOf(int index) {
        return ref.call(h -> names.unitOf(index));
    }

    /**
     * The full shape of a parameter.
     *
     * @param index 0 to size - 1
     * @return as given
     */
    public long[] shape(int index) {
        return ref.call(h -> shapes.get(names.check(index)).clone());
    }

    /**
     * Begin a unit's forward: returns when its parameters are valid. To read the values between steps, run a forward while
     * not {@linkplain #setTraining training}. Collective.
     *
     * @param unit 0 to unitCount - 1
     * @return the pass; close it at the end of the unit's forward
     * @throws IllegalStateException if a pass of this unit is open
     * @throws TesseraInvalidStateException during a backward pass
     * @throws TesseraMismatchException if another rank begins a different unit; the message names both
     * @throws TesseraInterruptedException call again
     */
    public Pass forward(int unit) {
        return begin(unit, true);
    }

    /**
     * As {@link #forward(int)}.
     *
     * @param unit its name
     * @return the pass; close it at the end of the unit's forward
     */
    public Pass forward(String unit) {
        return forward(unit(unit));
    }

    /**
     * Begin a unit's backward: returns when its parameters and the memory of its gradients are valid. The first one begins a
     * backward pass. Collective.
     *
     * @param unit 0 to unitCount - 1
     * @return the pass; call {@link Pass#ready()} when its gradients are written, and close it
     * @throws IllegalStateException if a pass of this unit is open
     * @throws TesseraInvalidStateException if {@link #step} was not called after the last backward pass
     * @throws TesseraMismatchException if another rank begins a different unit; the message names both
     * @throws TesseraInterruptedException call again
     */
    public Pass backward(int unit) {
        return begin(unit, false);
    }

    /**
     * As {@link #backward(int)}.
     *
     * @param unit its name
     * @return the pass; call {@link Pass#ready()} when its gradients are written, and close it
     */
    public Pass backward(String unit) {
        return backward(unit(unit));
    }

    private Pass begin(int unit, boolean isForward) {
        return ref.callExclusive(h -> {
            synchronized (open) {
                if (open[names.checkUnit(unit)] != null) {
                    throw new IllegalStateException("a pass of unit \"" + names.unit(unit) + "\" is open; close it first");
                }
            }
            if (isForward) {
                Native.engineForward(h, unit);
            } else {
                Native.engineBackward(h, unit);
                notReady[unit] = notReady[unit] == 0 ? names.paramCount(unit) : notReady[unit];
            }
            final Pass pass = new Pass(unit, isForward);
            synchronized (open) {
                open[unit] = pass;
            }
            return pass;
        });
    }

    private void requireUnused(int unit) {
        uses[unit].requireNone("gradients of unit \"" + names.unit(unit) + "\"");
    }

    private void end(int unit) {
        synchronized (open) {
            if (open[unit] != null) {
                open[unit].endLeases();
                open[unit] = null;
            }
        }
    }

    private void endAll() {
        IntStream.range(0, open.length).forEach(this::end);
    }

    /**
     * End a backward pass: returns when its gradients are reduced or accumulated. Open passes end. Gradients that are not
     * ready count as zeros, unless {@code "ignore_unused_parameters"} is false. Collective.
     *
     * @throws IllegalStateException while an operation in the background uses a gradient
     * @throws TesseraInvalidStateException if {@code "ignore_unused_parameters"} is false and gradients are not ready; the
     *     message names them
     * @throws TesseraInterruptedException call again
     */
    public void backwardDone() {
        ref.runExclusive(h -> {
            IntStream.range(0, open.length).forEach(this::requireUnused);
            Native.engineBackwardDone(h);
            Arrays.fill(notReady, 0);
            endAll();
        });
    }

    /**
     * What the loss is multiplied by before its backward pass: the loss scale over the accumulation.
     *
     * @return the factor
     */
    public double lossFactor() {
        return ref.callExclusive(Native::engineLossFactor);
    }

    /**
     * Whether this backward pass must add its gradients to what their memory holds, instead of overwriting it.
     *
     * @return whether
     */
    public boolean addsGradients() {
        return ref.callExclusive(Native::engineAddsGradients);
    }

    /**
     * Whether the next {@link #step} is one of the optimizer.
     *
     * @return whether
     */
    public boolean isBoundary() {
        return ref.callExclusive(Native::engineIsBoundary);
    }

    /**
     * Set from now on whether steps are boundaries.
     *
     * @param boundary the same on every rank
     * @throws TesseraInvalidStateException from the beginning of a backward pass to its step
     */
    public void setBoundary(boolean boundary) {
        ref.runExclusive(h -> Native.engineSetBoundary(h, boundary ? 1 : 0));
    }

    /**
     * Steps are boundaries as the accumulation says, as at first.
     *
     * @throws TesseraInvalidStateException from the beginning of a backward pass to its step
     */
    public void resetBoundary() {
        ref.runExclusive(h -> Native.engineSetBoundary(h, -1));
    }

    /**
     * From now on backward passes are not reduced, and {@link #step} is refused.
     *
     * @throws TesseraInvalidStateException if it is so already, from stage 2 on, or from the beginning of a backward pass to
     *     its step
     */
    public void beginNoSync() {
        ref.runExclusive(Native::engineBeginNoSync);
    }

    /**
     * The next backward pass is reduced again, with what those before it accumulated.
     *
     * @throws TesseraInvalidStateException without {@link #beginNoSync}, or during a backward pass
     */
    public void endNoSync() {
        ref.runExclusive(Native::engineEndNoSync);
    }

    /**
     * End a micro-step, after each backward pass. At a boundary the optimizer makes a step, unless the gradients of any rank
     * have an infinity or NaN and the configuration skips such steps; the schedule then stays as well. Collective.
     *
     * @return whether the optimizer made a step; the same on every rank
     * @throws TesseraInvalidStateException without a backward pass, in one, or after {@link #beginNoSync}; or if the loss
     *     scale must shrink below its minimum
     * @throws TesseraInterruptedException the communicator has failed
     */
    public boolean step() {
        return ref.callExclusive(Native::engineStep);
    }

    /**
     * Set whether backward passes follow. While none do, the end of a forward shards its unit.
     *
     * @param training initially true
     */
    public void setTraining(boolean training) {
        ref.runExclusive(h -> Native.engineSetTraining(h, training));
    }

    /**
     * Whether backward passes follow.
     *
     * @return initially true
     */
    public boolean isTraining() {
        return ref.callExclusive(Native::engineIsTraining);
    }

    /**
     * The counters.
     *
     * @return as they are now
     */
    public Counters counters() {
        return new Counters(ref.callExclusive(Native::engineCounters));
    }

    /**
     * The norm of the gradients of all ranks at the last boundary, before they were clipped and without the loss scale.
     *
     * @return empty if there was no boundary yet or {@code "compute_grad_norm"} is false; infinite if the step was skipped
     */
    public OptionalDouble gradNorm() {
        final double norm = ref.callExclusive(Native::engineGradNorm);
        return Double.isNaN(norm) ? OptionalDouble.empty() : OptionalDouble.of(norm);
    }

    /**
     * The learning rate of the next step.
     *
     * @return the rate
     */
    public double lr() {
        return ref.callExclusive(Native::engineLr);
    }

    /**
     * Set the learning rate. A schedule sets it again after each step.
     *
     * @param lr finite, not negative; the same on every rank
     * @throws TesseraInvalidArgumentException if it is not
     */
    public void setLr(double lr) {
        ref.runExclusive(h -> Native.engineSetLr(h, lr));
    }

    /**
     * The loss scale.
     *
     * @return 1 without {@code "fp16"}
     */
    public double lossScale() {
        return ref.callExclusive(Native::engineLossScale);
    }

    /**
     * Samples of all ranks per step of the optimizer: micro-batch * accumulation * ranks.
     *
     * @return at least 1
     */
    public long trainBatchSize() {
        return batch(0);
    }

    /**
     * Samples of a rank per backward pass.
     *
     * @return at least 1
     */
    public long trainMicroBatchSize() {
        return batch(1);
    }

    /**
     * Backward passes per step of the optimizer.
     *
     * @return at least 1
     */
    public long gradientAccumulationSteps() {
        return batch(2);
    }

    private long batch(int which) {
        return ref.callExclusive(Native::engineBatch)[which];
    }

    /**
     * Set another train batch by another accumulation, between steps of the optimizer.
     *
     * @param train a multiple of micro-batch * ranks; the same on every rank
     * @throws TesseraInvalidArgumentException if it is not; the message has the formula
     * @throws TesseraInvalidStateException if gradients have accumulated
     */
    public void setTrainBatchSize(long train) {
        ref.runExclusive(h -> Native.engineSetTrainBatchSize(h, train));
    }

    /**
     * Set another micro-batch, and so another train batch, between steps of the optimizer.
     *
     * @param micro at least 1; the same on every rank
     * @throws TesseraInvalidArgumentException if it is not
     * @throws TesseraInvalidStateException if gradients have accumulated
     */
    public void setTrainMicroBatchSize(long micro) {
        ref.runExclusive(h -> Native.engineSetTrainMicroBatchSize(h, micro));
    }

    /**
     * The engine's optimizer, for its settings. The engine makes its steps.
     *
     * @return a new object, in exclusive use with this engine; closed with it
     */
    public Optimizer optimizer() {
        return Optimizer.of(this);
    }

    /**
     * The engine's learning-rate schedule. The engine makes its steps.
     *
     * @return a new object, in exclusive use with this engine; it may outlive it
     * @throws TesseraInvalidStateException if the engine has none
     */
    public LrSchedule lrSchedule() {
        return new LrSchedule(ref.callLongExclusive(Native::engineLrSchedule));
    }

    @Override
    public void close() {
        endAll();
        super.close();
    }

    /** The names of the units. */
    @Override
    public String toString() {
        return "Engine(" + comm + ", " + names.units() + ")";
    }
}
