package dev.tessera;

import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/**
 * Fully sharded data-parallel training: each rank holds its rows of every parameter, of its gradient and of the optimizer's
 * state. Parameters are grouped into units, such as layers, and are whole only while their unit computes, in one copy that the
 * ranks of a host share. All ranks begin the same passes of the same units in the same order:
 *
 * <pre>{@code
 * try (Fsdp.Pass pass = fsdp.forward("fc1")) {
 *     hidden = compute(input, pass.param("w1"));
 * }
 * ...
 * try (Fsdp.Pass pass = fsdp.backward("fc1")) {
 *     backward(delta, pass.param("w1"), pass.grad("w1"));
 *     pass.ready();
 * }
 * fsdp.await();
 * optimizer.step();
 * }</pre>
 *
 * <p>Parameters are numbered as they come, over all units; units and parameters are named by their number or their name. All
 * methods but those that only tell of the model or give views of shards are exclusive, those of {@link Pass} too.
 *
 * <p>Closing it ends its open passes and closes the optimizers and states made from it. The memory is given back at once, or,
 * while views of it are reachable, when the garbage collector finds the last one gone.
 */
public final class Fsdp extends NativeObject {
    private final Comm comm; // not closed by us; reachable while we are
    private final List<String> unitNames = new ArrayList<>();
    private final List<String> names = new ArrayList<>(); // without wrappers
    private final Map<String, Integer> units = new HashMap<>();
    private final Map<String, Integer> params = new HashMap<>(); // with and without wrappers
    private final List<long[]> facts = new ArrayList<>(); // of each parameter: unit, whether it is trained, whole shape
    private final int[] firstOf; // parameter of each unit
    private final Tensor[] shards; // cleared by close(), as shardGrads; guards itself and that
    private final Tensor[] shardGrads;
    private final Views.View[] wholes; // by exclusive calls only, as grads
    private final Views.View[] grads;
    private final Pass[] open; // of each unit; guards itself
    private final Tensor.Uses[] uses; // of each unit's gradients: whole parameters are lent to no operation

    /**
     * Where a unit is in its step. A program may write its shards while it is SHARDED or REDUCING; an optimizer and a load do
     * so while all units are SHARDED.
     */
    public enum Phase {
        /** Each rank has its rows. */
        SHARDED,
        /** It is to be whole. */
        ON_ITS_WAY,
        /** Its parameters are whole. */
        WHOLE,
        /** It is whole, and its gradients are being written. */
        BACKWARD,
        /** It is sharded; until {@link Fsdp#await} its gradients are reduced. */
        REDUCING
    }

    private interface UnitCall {
        void call(long handle, int unit);
    }

    private interface ParamCall {
        long[] call(long handle, int index);
    }

    /**
     * A unit while it computes. Its views, tensors and buffers alike, are for use until the pass ends: by {@link #close} or
     * {@link #ready}, when the unit is sharded otherwise ({@link Fsdp#reshard}, {@link Fsdp#await}), or with the model. From
     * then on its methods and tensors throw {@link IllegalStateException}. A buffer cannot: one that is kept shows other
     * parameters or gradients afterwards, and what is written to it may destroy these. It never points at memory that is
     * not there.
     */
    public final class Pass implements AutoCloseable {
        private final int unit;
        private final UnitCall leave; // what close() calls; null: nothing
        private final Tensor.Lease reading;
        private final Tensor.Lease writing;
        private final Tensor[] paramTensors;
        private final Tensor[] gradTensors;

        private Pass(int unit, UnitCall leave) {
            this.unit = unit;
            this.leave = leave;
            final String what = "this pass of unit \"" + unitNames.get(unit) + "\" has ended";
            reading = new Tensor.Lease(true, what, uses[unit]);
            writing = new Tensor.Lease(false, what, uses[unit]);
            paramTensors = new Tensor[firstOf[unit + 1] - firstOf[unit]];
            gradTensors = new Tensor[paramTensors.length];
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
         * A whole parameter of F32, as {@link #paramTensor(int)}.
         *
         * @param index of a parameter of this unit
         * @return read-only; elements row-major, position 0
         * @throws IllegalArgumentException if the parameter is another unit's, or of another dtype
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
         * A whole parameter. It is read-only, since the ranks of a host have one copy of it: its buffers are, and operations,
         * which write in place, refuse it.
         *
         * @param index of a parameter of this unit
         * @return of the parameter's shape, and its dtype or {@link FsdpOptions#paramDtype}; at the same address in every pass
         * @throws IllegalArgumentException if the parameter is another unit's
         */
        public Tensor paramTensor(int index) {
            return view(index, paramTensors, Native::fsdpWhole, wholes, reading);
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
         * Where the whole gradient of a parameter of F32 is to be written, as {@link #gradTensor(int)}.
         *
         * @param index of a parameter of this unit
         * @return elements row-major, position 0
         * @throws IllegalArgumentException if the parameter is another unit's, or the gradient of another dtype
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
         * Where the whole gradient of a parameter is to be written, all of it, in a backward pass. It holds anything at first,
         * but without synchronisation ({@link Fsdp#setSync}) what has added up: zeros, and what the trainer adds.
         *
         * @param index of a parameter of this unit
         * @return of the parameter's shape, and {@link FsdpOptions#reduceDtype} or the dtype of whole parameters
         * @throws IllegalArgumentException if the parameter is another unit's
         * @throws TesseraInvalidStateException if this is no backward, or the parameter is frozen
         */
        public Tensor gradTensor(int index) {
            return view(index, gradTensors, Native::fsdpGrad, grads, writing);
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
         * Say that this rank has no gradient of a parameter in this backward, which counts as zeros.
         *
         * @param index of a parameter of this unit
         * @throws IllegalArgumentException if the parameter is another unit's
         * @throws TesseraInvalidStateException if this is no backward, or the parameter is frozen
         */
        public void unused(int index) {
            ref.runExclusive(h -> {
                place(index);
                Native.fsdpUnused(h, index);
            });
        }

        /**
         * As {@link #unused(int)}.
         *
         * @param name of a parameter of this unit
         */
        public void unused(String name) {
            unused(index(name));
        }

        /**
         * Say that all gradients of the unit are written, which ends this backward pass: they are reduced into the shards in
         * the background, and the parameters are sharded again.
         *
         * @throws IllegalStateException while an operation in the background uses a gradient
         * @throws TesseraInvalidStateException if this is no backward, or gradients, which are named, were neither written
         *     nor said to be unused; it is said again afterwards
         */
        public void ready() {
            ref.runExclusive(h -> {
                reading.check();
                requireUnused(unit);
                Native.fsdpGradsReady(h, unit);
                end(unit);
            });
        }

        /**
         * End the pass: of a forward, the parameters are sharded again, unless the unit stays whole until its backward; of
         * {@link Fsdp#whole}, too. A backward of which {@link #ready} was not said, since something was thrown, say, is not
         * over: {@link Fsdp#await} names the unit, and {@link Fsdp#backward(int)} goes on with it. Does nothing once the
         * pass has ended.
         */
        @Override
        public void close() {
            if (reading.isOver()) {
                return;
            }
            ref.runExclusive(h -> {
                end(unit);
                if (leave != null) {
                    leave.call(h, unit);
                }
            });
        }

        private Tensor view(int index, Tensor[] known, ParamCall get, Views.View[] views, Tensor.Lease lease) {
            return ref.callExclusive(h -> {
                final int place = place(index);
                if (known[place] == null) {
                    final long[] descriptor = get.call(h, index);
                    final Tensor bare = Tensor.overNative(descriptor, null);
                    if (views[index] == null || views[index].address() != bare.address()) {
                        views[index] = new Views.View(ref, bare.address(), bare.sizeBytes());
                    }
                    known[place] = Tensor.overNative(descriptor, views[index].owner()).leased(lease);
                }
                return known[place];
            });
        }

        /** Which parameter of the unit. */
        private int place(int index) {
            reading.check();
            check(index);
            final int place = index - firstOf[unit];
            if (place < 0 || place >= paramTensors.length) {
                throw new IllegalArgumentException("parameter \"" + names.get(index) + "\" does not belong to unit \""
                        + unitNames.get(unit) + "\"; it has " + names.subList(firstOf[unit], firstOf[unit + 1]));
            }
            return place;
        }
    }

    private Fsdp(long handle, Comm comm, List<FsdpUnit> given) {
        super(new Ref("Fsdp", handle, Native::fsdpDestroy));
        this.comm = comm;
        firstOf = new int[unitCount() + 1];
        for (int u = 0; u < firstOf.length - 1; ++u) {
            final int unit = u;
            unitNames.add(ref.call(h -> Native.text(Native.fsdpUnitName(h, unit))));
            units.put(unitNames.get(u), u);
        }
        int i = 0;
        for (FsdpUnit unit : given) {
            for (String name : unit.params.names()) {
                params.put(name, i++);
            }
        }
        for (i = 0; i < size(); ++i) {
            final int index = i;
            names.add(ref.call(h -> Native.text(Native.fsdpParamName(h, index))));
            params.put(names.get(i), i);
            facts.add(ref.call(h -> Native.fsdpParam(h, index)));
            firstOf[(int) facts.get(i)[0] + 1] = i + 1;
        }
        shards = new Tensor[names.size()];
        shardGrads = new Tensor[names.size()];
        wholes = new Views.View[names.size()];
        grads = new Views.View[names.size()];
        open = new Pass[unitNames.size()];
        uses = Stream.generate(Tensor.Uses::new).limit(open.length).toArray(Tensor.Uses[]::new);
    }

    /**
     * Register a model and cut it, with default options: check that all ranks registered the same, and give every shard the
     * values of rank 0. Collective.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param units all of the model; names of parameters differ over all of it
     * @return the FSDP object
     * @throws TesseraMismatchException if the ranks' models differ; names the first difference
     */
    public static Fsdp create(Comm comm, List<FsdpUnit> units) {
        return create(comm, units, new FsdpOptions());
    }

    /**
     * Register a model and cut it, as {@link #create(Comm, List)}.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param units all of the model; names of parameters differ over all of it
     * @param options memory, types, reduction
     * @return the FSDP object
     * @throws TesseraMismatchException if the ranks' models differ; names the first difference
     */
    public static Fsdp create(Comm comm, List<FsdpUnit> units, FsdpOptions options) {
        Objects.requireNonNull(options, "options");
        final List<FsdpUnit> all = List.copyOf(units);
        final List<byte[]> names = new ArrayList<>();
        final List<byte[]> unitNames = new ArrayList<>();
        final List<Tensor> tensors = new ArrayList<>();
        final List<Integer> trained = new ArrayList<>();
        final Map<String, Integer> known = new HashMap<>();
        for (FsdpUnit unit : all) {
            if (known.put(unit.name, unit.params.size()) != null) {
                throw new IllegalArgumentException("two units are named \"" + unit.name + "\"");
            }
            unitNames.add(Native.utf8(unit.name, "name"));
            Collections.addAll(names, unit.params.nameBytes());
            tensors.addAll(unit.params.tensors());
            unit.params.names().forEach(name -> trained.add(unit.frozen.contains(name) ? 0 : 1));
        }
        final ByteBuffer settings = ByteBuffer.allocateDirect(all.size() * FsdpUnitFields.BYTES);
        all.forEach(unit -> settings.put(unit.settings.struct.duplicate()));
        final int[] counts = all.stream().mapToInt(unit -> unit.params.size()).toArray();
        final int[] flags = trained.stream().mapToInt(flag -> flag).toArray();
        return new Fsdp(comm.ref.callLongExclusive(c -> Native.fsdpCreate(c, unitNames.toArray(new byte[0][]), settings,
                counts, names.toArray(new byte[0][]), Tensor.descriptors(tensors), flags, options)), comm, all);
    }

    /**
     * The number of units.
     *
     * @return at least 1
     */
    public int unitCount() {
        return (int) ref.callLong(Native::fsdpUnitCount);
    }

    /**
     * The name of a unit.
     *
     * @param unit 0 to unitCount - 1
     * @return as registered
     */
    public String unitName(int unit) {
        return ref.call(h -> unitNames.get(checkUnit(unit)));
    }

    /**
     * The number of a unit.
     *
     * @param name as registered
     * @return 0 to unitCount - 1
     * @throws IllegalArgumentException if there is no such unit
     */
    public int unit(String name) {
        return ref.call(h -> find(units, name, "unit", unitNames));
    }

    /**
     * The number of parameters, over all units.
     *
     * @return at least 1
     */
    public int size() {
        return (int) ref.callLong(Native::fsdpParamCount);
    }

    /**
     * The name of a parameter, without a leading "module." or "_orig_mod.".
     *
     * @param index 0 to size - 1
     * @return the name that checkpoints have
     */
    public String name(int index) {
        return ref.call(h -> names.get(check(index)));
    }

    /**
     * The number of a parameter.
     *
     * @param name as registered, or without a leading "module." or "_orig_mod."
     * @return 0 to size - 1
     * @throws IllegalArgumentException if there is no such parameter
     */
    public int index(String name) {
        return ref.call(h -> find(params, name, "parameter", names));
    }

    /**
     * The unit of a parameter.
     *
     * @param index 0 to size - 1
     * @return the unit's number
     */
    public int unitOf(int index) {
        return ref.call(h -> (int) facts.get(check(index))[0]);
    }

    /**
     * The whole shape of a parameter.
     *
     * @param index 0 to size - 1
     * @return as registered
     */
    public long[] shape(int index) {
        return ref.call(h -> wholeShape(check(index)));
    }

    /**
     * Whether a parameter has a gradient.
     *
     * @param index 0 to size - 1
     * @return false if its unit froze it
     */
    public boolean isTrained(int index) {
        return ref.call(h -> facts.get(check(index))[1] != 0);
    }

    private long[] wholeShape(int index) {
        final long[] all = facts.get(index);
        return Arrays.copyOfRange(all, 2, all.length);
    }

    /**
     * Where a unit is in its step.
     *
     * @param unit 0 to unitCount - 1
     * @return the phase
     */
    public Phase phase(int unit) {
        return ref.callExclusive(h -> Phase.values()[Native.fsdpUnitPhase(h, checkUnit(unit))]);
    }

    /**
     * As {@link #phase(int)}.
     *
     * @param unit its name
     * @return the phase
     */
    public Phase phase(String unit) {
        return phase(unit(unit));
    }

    /**
     * This rank's rows of a parameter of F32, as {@link #shardTensor}.
     *
     * @param index 0 to size - 1
     * @return elements row-major, position 0
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #shardTensor}
     */
    public FloatBuffer shard(int index) {
        return shardTensor(index).floats();
    }

    /**
     * This rank's rows of a parameter, which may be none: what the optimizer updates and a checkpoint holds. The same memory
     * for good. Not to be written while the unit is whole or on its way.
     *
     * @param index 0 to size - 1
     * @return of the parameter's dtype, and its shape but for the number of rows
     */
    public Tensor shardTensor(int index) {
        return ref.call(h -> viewForGood(h, index, shards, Native::fsdpShard));
    }

    /**
     * The gradient of this rank's rows of a parameter of F32, as {@link #shardGradTensor}.
     *
     * @param index 0 to size - 1
     * @return elements row-major, position 0
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #shardGradTensor}
     */
    public FloatBuffer shardGrad(int index) {
        return shardGradTensor(index).floats();
    }

    /**
     * The gradient of this rank's rows: reduced when {@link #await} returns. The same memory for good.
     *
     * @param index 0 to size - 1
     * @return of the shard's dtype and shape
     * @throws TesseraInvalidStateException if the parameter is frozen
     */
    public Tensor shardGradTensor(int index) {
        return ref.call(h -> viewForGood(h, index, shardGrads, Native::fsdpShardGrad));
    }

    private Tensor viewForGood(long handle, int index, Tensor[] known, ParamCall get) {
        synchronized (shards) {
            if (known[check(index)] == null) {
                final long[] descriptor = get.call(handle, index);
                final Tensor bare = Tensor.overNative(descriptor, null);
                final Views.View view = new Views.View(ref, bare.address(), bare.sizeBytes());
                known[index] = Tensor.overNative(descriptor, view.owner());
            }
            return known[index];
        }
    }

    /**
     * Who holds which rows of a parameter.
     *
     * @param index 0 to size - 1
     * @return the layout, which is the caller's
     */
    public Layout layout(int index) {
        return ref.call(h -> new Layout(Native.fsdpLayout(h, check(index)), wholeShape(index).length));
    }

    /**
     * Begin a unit's forward: returns when its parameters are whole, with the next units on their way. Collective.
     *
     * @param unit 0 to unitCount - 1
     * @return to be closed at the end of the unit's forward
     * @throws IllegalStateException if a pass of this unit is open
     * @throws TesseraInvalidStateException in the middle of a backward
     * @throws TesseraMismatchException if another rank makes another unit whole; names both
     * @throws TesseraInterruptedException the unit goes on to become whole; call again
     */
    public Pass forward(int unit) {
        return begin(unit, Native::fsdpForward, Native::fsdpForwardDone);
    }

    /**
     * As {@link #forward(int)}.
     *
     * @param unit its name
     * @return to be closed at the end of the unit's forward
     */
    public Pass forward(String unit) {
        return forward(unit(unit));
    }

    /**
     * Begin a unit's backward: returns when its parameters are whole and there is memory for its gradients. A unit that a
     * step uses more than once has one backward after its uses or one for each; the gradients of all are added up.
     * Collective.
     *
     * @param unit 0 to unitCount - 1
     * @return to be told when gradients are written, by {@link Pass#ready}, and closed
     * @throws IllegalStateException if a pass of this unit is open
     * @throws TesseraMismatchException if another rank makes another unit whole; names both
     * @throws TesseraInterruptedException the unit goes on to become whole; call again
     */
    public Pass backward(int unit) {
        return begin(unit, Native::fsdpBackward, null);
    }

    /**
     * As {@link #backward(int)}.
     *
     * @param unit its name
     * @return to be told when gradients are written, by {@link Pass#ready}, and closed
     */
    public Pass backward(String unit) {
        return backward(unit(unit));
    }

    /**
     * Make a unit whole without a forward, for evaluation or to look at it, or wait until it is, after {@link #unshard(int)}.
     * Collective.
     *
     * @param unit 0 to unitCount - 1
     * @return to be closed, which shards it again
     * @throws IllegalStateException if a pass of this unit is open
     * @throws TesseraMismatchException if another rank makes another unit whole; names both
     * @throws TesseraInterruptedException the unit goes on to become whole; call again
     */
    public Pass whole(int unit) {
        return begin(unit, (h, u) -> {
            Native.fsdpUnshard(h, u);
            Native.fsdpAwait(h, u);
        }, Native::fsdpReshard);
    }

    /**
     * As {@link #whole(int)}.
     *
     * @param unit its name
     * @return to be closed, which shards it again
     */
    public Pass whole(String unit) {
        return whole(unit(unit));
    }

    private Pass begin(int unit, UnitCall enter, UnitCall leave) {
        return ref.callExclusive(h -> {
            synchronized (open) {
                if (open[checkUnit(unit)] != null) {
                    throw new IllegalStateException("a pass of unit \"" + unitNames.get(unit) + "\" is open; close it first");
                }
            }
            enter.call(h, unit);
            final Pass pass = new Pass(unit, leave);
            synchronized (open) {
                open[unit] = pass;
            }
            return pass;
        });
    }

    private void requireUnused(int unit) {
        uses[unit].requireNone("gradients of unit \"" + unitNames.get(unit) + "\"");
    }

    private void end(int unit) {
        synchronized (open) {
            if (open[unit] != null) {
                open[unit].reading.end();
                open[unit].writing.end();
                open[unit] = null;
            }
        }
    }

    private void endAll() {
        for (int unit = 0; unit < open.length; ++unit) {
            end(unit);
        }
    }

    /**
     * Whether any rank had a gradient of a parameter in the last step that was reduced. Of one that no rank had, since
     * gradients were set to zero if they add up, gradients are zeros, and optimizers leave it, its moments and its count of
     * steps as they are.
     *
     * @param index 0 to paramCount - 1
     * @return false before the first step, and of a parameter that is not trained
     */
    public boolean used(int index) {
        return ref.callExclusive(h -> Native.fsdpUsed(h, check(index)));
    }

    /**
     * Begin to make a unit whole, in the background; of one that is whole or on its way, nothing. Collective.
     *
     * @param unit 0 to unitCount - 1
     */
    public void unshard(int unit) {
        ref.runExclusive(h -> Native.fsdpUnshard(h, checkUnit(unit)));
    }

    /**
     * As {@link #unshard(int)}.
     *
     * @param unit its name
     */
    public void unshard(String unit) {
        unshard(unit(unit));
    }

    /**
     * Give the memory of a whole unit back, which ends an open pass of it; of one that is sharded, nothing. One that is still
     * on its way is waited for. Collective.
     *
     * @param unit 0 to unitCount - 1
     * @throws TesseraInvalidStateException if its backward began
     */
    public void reshard(int unit) {
        ref.runExclusive(h -> {
            Native.fsdpReshard(h, checkUnit(unit));
            end(unit);
        });
    }

    /**
     * As {@link #reshard(int)}.
     *
     * @param unit its name
     */
    public void reshard(String unit) {
        reshard(unit(unit));
    }

    /**
     * The end of backward: returns when the gradients of all shards are the average (or sum) over the ranks, and every unit is
     * sharded; open passes end. Collective.
     *
     * @throws TesseraInvalidStateException if units were never said ready (names them); the step may be completed and waited
     *     for again
     * @throws TesseraInterruptedException wait again
     */
    public void await() {
        ref.runExclusive(h -> {
            Native.fsdpWait(h);
            endAll();
        });
    }

    /**
     * Give up the step that has begun, however far it is, such as after an exception: open passes end, every unit is sharded
     * and every gradient zero, also what was accumulated. All ranks do so after the same calls of that step. Collective.
     *
     * @throws IllegalStateException while an operation in the background uses a whole gradient
     * @throws TesseraInterruptedException call again
     */
    public void abandon() {
        ref.runExclusive(h -> {
            for (int unit = 0; unit < uses.length; ++unit) {
                requireUnused(unit);
            }
            Native.fsdpAbandon(h);
            endAll();
        });
    }

    /**
     * Whether the following backwards reduce. Without, gradients stay whole on each rank and take memory, until the next
     * backward with synchronisation reduces their sum: they are zero at first, and the trainer adds to what is there.
     *
     * @param sync the same on every rank; true at first
     * @throws TesseraInvalidStateException in the middle of a backward
     */
    public void setSync(boolean sync) {
        ref.runExclusive(h -> Native.fsdpSetSync(h, sync));
    }

    /**
     * Whether the following backwards add to the gradients of the shards instead of replacing them.
     *
     * @param accumulate false at first
     * @throws TesseraInvalidStateException in the middle of a backward
     */
    public void setAccumulate(boolean accumulate) {
        ref.runExclusive(h -> Native.fsdpSetAccumulate(h, accumulate));
    }

    /**
     * Whether the following backwards reduce over replicas ({@link FsdpOptions#shardRanks}), too. Without, the sums over the
     * ranks of each replica, which may be all ranks, are kept, and added up, until the next backward with it; the shards'
     * gradients stay as they are.
     *
     * @param allReduce the same on every rank; true at first
     * @throws TesseraInvalidStateException in the middle of a backward
     */
    public void setAllReduce(boolean allReduce) {
        ref.runExclusive(h -> Native.fsdpSetAllReduce(h, allReduce));
    }

    /**
     * Whether the memory of a unit is free after its following backwards. Without, it stays the unit's, and the forward that
     * comes next uses what lies there, unless a shard was changed on some rank since: between hosts nothing is sent then, which
     * steps that add up gradients gain by.
     *
     * @param unit 0 to unitCount - 1
     * @param reshard the same on every rank; true at first
     * @throws TesseraInvalidStateException in the middle of a backward
     */
    public void setReshardAfterBackward(int unit, boolean reshard) {
        ref.runExclusive(h -> Native.fsdpSetReshardAfterBackward(h, checkUnit(unit), reshard));
    }

    /**
     * As {@link #setReshardAfterBackward(int, boolean)}.
     *
     * @param unit its name
     * @param reshard the same on every rank; true at first
     */
    public void setReshardAfterBackward(String unit, boolean reshard) {
        setReshardAfterBackward(unit(unit), reshard);
    }

    /**
     * Set the gradients of the shards to zero, and forget those that add up whole.
     *
     * @throws TesseraInvalidStateException if units are whole, or gradients are being reduced
     */
    public void zeroGrad() {
        ref.runExclusive(Native::fsdpZeroGrad);
    }

    @Override
    public void close() {
        synchronized (shards) {
            Arrays.fill(shards, null);
            Arrays.fill(shardGrads, null);
        }
        endAll();
        super.close();
    }

    private int check(int index) {
        if (index < 0 || index >= names.size()) {
            throw new IndexOutOfBoundsException("parameter " + index + " does not exist; the model has " + names.size());
        }
        return index;
    }

    private int checkUnit(int unit) {
        if (unit < 0 || unit >= unitNames.size()) {
            throw new IndexOutOfBoundsException("unit " + unit + " does not exist; the model has " + unitNames.size());
        }
        return unit;
    }

    private static int find(Map<String, Integer> all, String name, String what, List<String> names) {
        final Integer number = all.get(Objects.requireNonNull(name, what));
        if (number == null) {
            throw new IllegalArgumentException("there is no " + what + " \"" + name + "\"; known: " + names);
        }
        return number;
    }

    /** The names of the units. */
    @Override
    public String toString() {
        return "Fsdp(" + comm + ", " + unitNames + ")";
    }
}
