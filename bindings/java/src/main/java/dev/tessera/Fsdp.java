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
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * Fully sharded data-parallel training: each rank holds its rows of every parameter, its gradient and the optimizer's
 * state. Parameters are grouped into units, such as layers, and are unsharded only while their unit computes, in one
 * copy that the ranks of a host share. All ranks begin the same passes of the same units in the same order:
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
 * <p>Parameters are numbered in order over all units; units and parameters are identified by number or name. All
 * methods, including those of {@link Pass}, are exclusive, except those that only describe the model or return views of
 * shards.
 *
 * <p>Closing it ends its open passes and closes the optimizers and states made from it. The memory is freed as soon as
 * no view of it is reachable.
 */
public final class Fsdp extends NativeObject {
    private final Comm comm; // not closed by us; reachable while we are
    private final TensorParallel tp; // likewise; null: the parameters are whole
    private final UnitNames names;
    private final List<long[]> facts = new ArrayList<>(); // of each parameter: unit, whether it is trained, whole shape
    private final Tensor[] shards; // cleared by close(), as shardGrads; guards itself and that
    private final Tensor[] shardGrads;
    private final Views.View[] wholes; // by exclusive calls only, as grads
    private final Views.View[] grads;
    private final Pass[] open; // of each unit; guards itself
    private final Tensor.Uses[] uses; // of each unit's gradients: whole parameters are lent to no operation

    /**
     * The phase of a unit in the current step. A program may write its shards while it is SHARDED or REDUCING; an
     * optimizer and a load may write while all units are SHARDED.
     */
    public enum Phase {
        /** Each rank has its rows. */
        SHARDED,
        /** It is being unsharded. */
        ON_ITS_WAY,
        /** Its parameters are unsharded. */
        WHOLE,
        /** It is unsharded, and its gradients are being written. */
        BACKWARD,
        /** It is sharded, and its gradients are being reduced until {@link Fsdp#await}. */
        REDUCING
    }

    private interface UnitCall {
        void call(long handle, int unit);
    }

    private interface ParamCall {
        long[] call(long handle, int index);
    }

    /**
     * A unit while it computes. Use its views (tensors and buffers) only until the pass ends: by {@link #close} or
     * {@link #ready}, when the unit is sharded by {@link Fsdp#reshard} or {@link Fsdp#await}, or with the model. Its
     * methods and tensors then throw {@link IllegalStateException}. Buffers cannot: a buffer that is kept shows other
     * parameters or gradients, and writing to it may destroy them. It never points at freed memory.
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
            final String what = "this pass of unit \"" + names.unit(unit) + "\" has ended";
            reading = new Tensor.Lease(Tensor.Lender.FSDP_PASS, true, what, uses[unit]);
            writing = new Tensor.Lease(Tensor.Lender.FSDP_PASS, false, what, uses[unit]);
            paramTensors = new Tensor[names.paramCount(unit)];
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
         * An unsharded F32 parameter, like {@link #paramTensor(int)}.
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
         * An unsharded parameter. It is read-only, because the ranks of a host share one copy: its buffers are
         * read-only, and operations, which write in place, refuse it. It may be the bias of {@link
         * TensorParallel#leave(Tensor, Tensor, Tensor)}.
         *
         * @param index of a parameter of this unit
         * @return of the parameter's shape, and its dtype or {@link FsdpOptions#paramDtype}; at the same address in every pass
         * @throws IllegalArgumentException if the parameter belongs to another unit
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
         * The unsharded gradient of an F32 parameter, to be written, like {@link #gradTensor(int)}.
         *
         * @param index of a parameter of this unit
         * @return elements row-major, position 0
         * @throws IllegalArgumentException if the parameter belongs to another unit, or the gradient has another dtype
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
         * The unsharded gradient of a parameter. Write all of it in a backward pass. It is uninitialised, except
         * without synchronisation ({@link Fsdp#setSync}), where it holds the accumulated gradient, initially zero.
         *
         * @param index of a parameter of this unit
         * @return of the parameter's shape, and {@link FsdpOptions#reduceDtype} or the dtype of unsharded parameters
         * @throws IllegalArgumentException if the parameter belongs to another unit
         * @throws TesseraInvalidStateException if this is not a backward, or the parameter is frozen
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
         * Mark a parameter as having no gradient on this rank in this backward; it counts as zeros.
         *
         * @param index of a parameter of this unit
         * @throws IllegalArgumentException if the parameter belongs to another unit
         * @throws TesseraInvalidStateException if this is not a backward, or the parameter is frozen
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
         * Mark all gradients of the unit as written, which ends this backward pass: they are reduced into the shards in
         * the background, and the parameters are sharded again.
         *
         * @throws IllegalStateException while an operation in the background uses a gradient
         * @throws TesseraInvalidStateException if this is not a backward, or gradients were neither written nor marked
         *     unused; the message names them. Write them and call it again
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
         * End the pass. After a forward or {@link Fsdp#whole} the parameters are sharded again, unless the unit stays
         * unsharded until its backward. A backward without {@link #ready}, for example after an exception, is not over:
         * {@link Fsdp#await} names the unit, and {@link Fsdp#backward(int)} continues it. Does nothing if the pass has
         * already ended.
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
                    known[place] = Views.lent(ref, get.call(h, index), views, index, lease);
                }
                return known[place];
            });
        }

        /** Which parameter of the unit. */
        private int place(int index) {
            reading.check();
            return names.place(unit, index);
        }
    }

    private Fsdp(long handle, Comm comm, List<FsdpUnit> given, TensorParallel tp) {
        super(TensorParallel.under(tp, new Ref("Fsdp", handle, Native::fsdpDestroy)));
        this.comm = comm;
        this.tp = tp;
        final List<String> unitNames = new ArrayList<>();
        for (int u = 0; u < unitCount(); ++u) {
            final int unit = u;
            unitNames.add(ref.call(h -> Native.text(Native.fsdpUnitName(h, unit))));
        }
        names = new UnitNames(unitNames, given.stream().map(unit -> unit.params).collect(Collectors.toList()),
                index -> ref.call(h -> Native.text(Native.fsdpParamName(h, index))));
        for (int i = 0; i < size(); ++i) {
            final int index = i;
            facts.add(ref.call(h -> Native.fsdpParam(h, index)));
        }
        shards = new Tensor[names.paramCount()];
        shardGrads = new Tensor[names.paramCount()];
        wholes = new Views.View[names.paramCount()];
        grads = new Views.View[names.paramCount()];
        open = new Pass[names.unitCount()];
        uses = Stream.generate(Tensor.Uses::new).limit(open.length).toArray(Tensor.Uses[]::new);
    }

    /**
     * Register and shard a model, with default options: checks that all ranks registered the same model, and gives
     * every shard the values of rank 0. Collective.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param units all units of the model; parameter names must be unique in the model
     * @return the FSDP object
     * @throws TesseraMismatchException if the ranks' models differ; the message names the first difference
     */
    public static Fsdp create(Comm comm, List<FsdpUnit> units) {
        return create(comm, units, new FsdpOptions());
    }

    /**
     * Register and shard a model, like {@link #create(Comm, List)}.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param units all units of the model; parameter names must be unique in the model
     * @param options memory, types, reduction
     * @return the FSDP object
     * @throws TesseraMismatchException if the ranks' models differ; the message names the first difference
     */
    public static Fsdp create(Comm comm, List<FsdpUnit> units, FsdpOptions options) {
        final List<FsdpUnit> all = comm.orRefuse(Creation.MODEL, () -> {
            Objects.requireNonNull(options, "options");
            return List.copyOf(units);
        });
        final List<byte[]> names = new ArrayList<>();
        final List<byte[]> unitNames = new ArrayList<>();
        final List<Tensor> tensors = new ArrayList<>();
        final List<Integer> trained = new ArrayList<>();
        final Map<String, Integer> known = new HashMap<>();
        final long[] values = comm.orRefuse(Creation.MODEL, () -> {
            for (FsdpUnit unit : all) {
                if (known.put(unit.name, unit.params.size()) != null) {
                    throw new IllegalArgumentException("two units are named \"" + unit.name + "\"");
                }
                unitNames.add(Native.utf8(unit.name, "name"));
                Collections.addAll(names, unit.params.nameBytes());
                tensors.addAll(unit.params.tensors());
                unit.params.names().forEach(name -> trained.add(unit.frozen.contains(name) ? 0 : 1));
            }
            return Tensor.descriptors(tensors);
        });
        final ByteBuffer settings = ByteBuffer.allocateDirect(all.size() * FsdpUnitFields.BYTES);
        all.forEach(unit -> settings.put(unit.settings.struct.duplicate()));
        final int[] counts = all.stream().mapToInt(unit -> unit.params.size()).toArray();
        final int[] flags = trained.stream().mapToInt(flag -> flag).toArray();
        final long handle = Comm.creating(comm, Creation.MODEL, reached -> TensorParallel.handed(options.tp(),
                options::tpHandle, () -> comm.ref.callLongExclusive(c -> {
                    reached.set(true);
                    return Native.fsdpCreate(c, unitNames.toArray(new byte[0][]), settings, counts,
                            names.toArray(new byte[0][]), values, flags, options);
                })));
        return new Fsdp(handle, comm, all, options.tp());
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
        return ref.call(h -> names.unit(unit));
    }

    /**
     * The number of a unit.
     *
     * @param name as registered
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
        return (int) ref.callLong(Native::fsdpParamCount);
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
     * @param name as registered, or without a leading "module." or "_orig_mod."
     * @return 0 to size - 1
     * @throws IllegalArgumentException if there is no such parameter
     */
    public int index(String name) {
        return ref.call(h -> names.param(name));
    }

    /**
     * The unit of a parameter.
     *
     * @param index 0 to size - 1
     * @return the unit's number
     */
    public int unitOf(int index) {
        return ref.call(h -> (int) facts.get(names.check(index))[0]);
    }

    /**
     * The full shape of a parameter.
     *
     * @param index 0 to size - 1
     * @return as registered
     */
    public long[] shape(int index) {
        return ref.call(h -> wholeShape(names.check(index)));
    }

    /**
     * Whether a parameter has a gradient.
     *
     * @param index 0 to size - 1
     * @return false if its unit froze it
     */
    public boolean isTrained(int index) {
        return ref.call(h -> facts.get(names.check(index))[1] != 0);
    }

    private long[] wholeShape(int index) {
        final long[] all = facts.get(index);
        return Arrays.copyOfRange(all, 2, all.length);
    }

    /**
     * The phase of a unit in the current step.
     *
     * @param unit 0 to unitCount - 1
     * @return the phase
     */
    public Phase phase(int unit) {
        return ref.callExclusive(h -> Phase.values()[Native.fsdpUnitPhase(h, names.checkUnit(unit))]);
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
     * This rank's rows of an F32 parameter, like {@link #shardTensor}.
     *
     * @param index 0 to size - 1
     * @return elements row-major, position 0
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #shardTensor}
     */
    public FloatBuffer shard(int index) {
        return shardTensor(index).floats();
    }

    /**
     * This rank's rows of a parameter (possibly none), which the optimizer updates and checkpoints save. The memory
     * never changes. Do not write to it while the unit is unsharded or being unsharded.
     *
     * @param index 0 to size - 1
     * @return of the parameter's dtype, and its shape but for the number of rows
     */
    public Tensor shardTensor(int index) {
        return ref.call(h -> viewForGood(h, index, shards, Native::fsdpShard));
    }

    /**
     * The gradient of this rank's rows of an F32 parameter, like {@link #shardGradTensor}.
     *
     * @param index 0 to size - 1
     * @return elements row-major, position 0
     * @throws IllegalArgumentException if the parameter has another dtype; see {@link #shardGradTensor}
     */
    public FloatBuffer shardGrad(int index) {
        return shardGradTensor(index).floats();
    }

    /**
     * The gradient of this rank's rows, reduced when {@link #await} returns. The memory never changes.
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
            if (known[names.check(index)] == null) {
                known[index] = Views.of(ref, get.call(handle, index));
            }
            return known[index];
        }
    }

    /**
     * Which rank holds which rows of a parameter.
     *
     * @param index 0 to size - 1
     * @return the layout, owned by the caller
     */
    public Layout layout(int index) {
        return ref.call(h -> new Layout(Native.fsdpLayout(h, names.check(index)), wholeShape(index).length));
    }

    /**
     * Begin a unit's forward: returns when its parameters are unsharded, while the next units are being unsharded.
     * Collective.
     *
     * @param unit 0 to unitCount - 1
     * @return the pass; close it at the end of the unit's forward
     * @throws IllegalStateException if a pass of this unit is open
     * @throws TesseraInvalidStateException in the middle of a backward
     * @throws TesseraMismatchException if another rank unshards a different unit; the message names both
     * @throws TesseraInterruptedException unsharding continues; call again
     */
    public Pass forward(int unit) {
        return begin(unit, Native::fsdpForward, Native::fsdpForwardDone);
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
     * Begin a unit's backward: returns when its parameters are unsharded and there is memory for its gradients. A unit
     * that a step uses more than once has one backward after all uses or one for each; their gradients are added up.
     * Collective.
     *
     * @param unit 0 to unitCount - 1
     * @return the pass; call {@link Pass#ready} when its gradients are written, and close it
     * @throws IllegalStateException if a pass of this unit is open
     * @throws TesseraMismatchException if another rank unshards a different unit; the message names both
     * @throws TesseraInterruptedException unsharding continues; call again
     */
    public Pass backward(int unit) {
        return begin(unit, Native::fsdpBackward, null);
    }

    /**
     * As {@link #backward(int)}.
     *
     * @param unit its name
     * @return the pass; call {@link Pass#ready} when its gradients are written, and close it
     */
    public Pass backward(String unit) {
        return backward(unit(unit));
    }

    /**
     * Unshard a unit without a forward, for evaluation or inspection, or wait until it is unsharded after {@link
     * #unshard(int)}. Collective.
     *
     * @param unit 0 to unitCount - 1
     * @return the pass; closing it shards the unit again
     * @throws IllegalStateException if a pass of this unit is open
     * @throws TesseraMismatchException if another rank unshards a different unit; the message names both
     * @throws TesseraInterruptedException unsharding continues; call again
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
     * @return the pass; closing it shards the unit again
     */
    public Pass whole(String unit) {
        return whole(unit(unit));
    }

    private Pass begin(int unit, UnitCall enter, UnitCall leave) {
        return ref.callExclusive(h -> {
            synchronized (open) {
                if (open[names.checkUnit(unit)] != null) {
                    throw new IllegalStateException("a pass of unit \"" + names.unit(unit) + "\" is open; close it first");
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
        uses[unit].requireNone("gradients of unit \"" + names.unit(unit) + "\"");
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
     * Whether any rank had a gradient of a parameter in the last reduced step. If no rank had one (with accumulation:
     * since gradients were set to zero), its gradients are zero, and optimizers leave the parameter, its moments and
     * its step count unchanged.
     *
     * @param index 0 to paramCount - 1
     * @return false before the first step, and for a frozen parameter
     */
    public boolean used(int index) {
        return ref.callExclusive(h -> Native.fsdpUsed(h, names.check(index)));
    }

    /**
     * Begin to unshard a unit in the background. Does nothing if it is unsharded or being unsharded. Collective.
     *
     * @param unit 0 to unitCount - 1
     */
    public void unshard(int unit) {
        ref.runExclusive(h -> Native.fsdpUnshard(h, names.checkUnit(unit)));
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
     * Free the memory of an unsharded unit, which ends its open pass. Waits for a unit that is being unsharded; does
     * nothing if it is sharded. Collective.
     *
     * @param unit 0 to unitCount - 1
     * @throws TesseraInvalidStateException if its backward has begun
     */
    public void reshard(int unit) {
        ref.runExclusive(h -> {
            Native.fsdpReshard(h, names.checkUnit(unit));
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
     * End the backward pass: return when the gradients of all shards are the average (or sum) over the ranks and every
     * unit is sharded. Open passes end. Collective.
     *
     * @throws TesseraInvalidStateException if units were never marked ready; the message names them. Complete the step
     *     and wait again
     * @throws TesseraInterruptedException wait again
     */
    public void await() {
        ref.runExclusive(h -> {
            Native.fsdpWait(h);
            endAll();
        });
    }

    /**
     * Abandon the current step at any point, such as after an exception: open passes end, every unit is sharded, and
     * every gradient, including accumulated ones, is zero. All ranks must call it after the same calls of the step.
     * Collective.
     *
     * @throws IllegalStateException while an operation in the background uses an unsharded gradient
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
     * Name the CUDA stream on which the trainer computes and updates shards. For parameters on a device everything is in
     * its order: the beginning of a pass and {@link #await} make this stream wait for the device, not the caller.
     * Reductions take what this stream has written at {@link Pass#ready}.
     *
     * @param stream address of a stream of the parameters' device ({@code cudaStream_t}), which must exist until another one
     *     is set; 0, as at first, is its default stream. A new one continues after what the previous one had
     * @throws TesseraInvalidArgumentException if it is of another device, or the parameters are on the CPU
     * @throws TesseraInvalidStateException if a unit is not sharded, or its gradients are being reduced
     */
    public void setStream(long stream) {
        ref.runExclusive(h -> Native.fsdpSetStream(h, stream));
    }

    /**
     * Set whether the following backwards reduce. If not, each rank accumulates unsharded gradients, which need memory,
     * until the next backward with synchronisation reduces their sum; they are initially zero, and the trainer adds to
     * them.
     *
     * @param sync the same on every rank; initially true
     * @throws TesseraInvalidStateException in the middle of a backward
     */
    public void setSync(boolean sync) {
        ref.runExclusive(h -> Native.fsdpSetSync(h, sync));
    }

    /**
     * Set whether the following backwards add to the gradients of the shards instead of replacing them.
     *
     * @param accumulate initially false
     * @throws TesseraInvalidStateException in the middle of a backward
     */
    public void setAccumulate(boolean accumulate) {
        ref.runExclusive(h -> Native.fsdpSetAccumulate(h, accumulate));
    }

    /**
     * Set whether the following backwards also reduce over replicas ({@link FsdpOptions#shardRanks}). If not, the sums
     * over the ranks of each replica (which may be all ranks) are kept and accumulated until the next backward that
     * does; the shards' gradients are unchanged.
     *
     * @param allReduce the same on every rank; initially true
     * @throws TesseraInvalidStateException in the middle of a backward
     */
    public void setAllReduce(boolean allReduce) {
        ref.runExclusive(h -> Native.fsdpSetAllReduce(h, allReduce));
    }

    /**
     * Set whether a unit frees its memory after its following backwards. If not, it keeps its memory, and the next
     * forward reuses its contents unless some rank changed a shard since. Nothing is then sent between hosts, which
     * speeds up steps that accumulate gradients.
     *
     * @param unit 0 to unitCount - 1
     * @param reshard the same on every rank; initially true
     * @throws TesseraInvalidStateException in the middle of a backward
     */
    public void setReshardAfterBackward(int unit, boolean reshard) {
        ref.runExclusive(h -> Native.fsdpSetReshardAfterBackward(h, names.checkUnit(unit), reshard));
    }

    /**
     * As {@link #setReshardAfterBackward(int, boolean)}.
     *
     * @param unit its name
     * @param reshard the same on every rank; initially true
     */
    public void setReshardAfterBackward(String unit, boolean reshard) {
        setReshardAfterBackward(unit(unit), reshard);
    }

    /**
     * Set the gradients of the shards to zero and drop accumulated unsharded gradients.
     *
     * @throws TesseraInvalidStateException if units are unsharded, or gradients are being reduced
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

    /** The names of the units. */
    @Override
    public String toString() {
        return "Fsdp(" + comm + ", " + names.units() + ")";
    }
}
