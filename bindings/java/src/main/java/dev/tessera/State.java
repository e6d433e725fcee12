package dev.tessera;

import java.lang.ref.Reference;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.LongFunction;
import java.util.stream.Collectors;

/**
 * The state that a checkpoint saves and loads in place: named tensors and values. It borrows the added objects: closing
 * one of them closes the state. The garbage collector frees a state that is not closed. All methods are exclusive;
 * those that add something return the state itself.
 */
public final class State extends NativeObject {
    private final List<Object> members = new ArrayList<>(); // keeps them, or their memory, reachable
    private final AtomicReference<Throwable> thrown = new AtomicReference<>(); // by a Stateful in the call in flight

    /** An empty state. */
    public State() {
        super(new Ref("State", Native.stateCreate(), Native::stateDestroy).mayLeak());
        ref.keep(members);
    }

    /**
     * A state of a DDP model's parameters.
     *
     * @param prefix "model"
     * @param ddp the model
     * @return the state
     */
    public static State of(String prefix, Ddp ddp) {
        return new State().with(prefix, ddp);
    }

    /**
     * A state of an FSDP model's parameters.
     *
     * @param prefix "model"
     * @param fsdp the model
     * @return the state
     */
    public static State of(String prefix, Fsdp fsdp) {
        return new State().with(prefix, fsdp);
    }

    /**
     * A state of a tensor-parallel model's parameters.
     *
     * @param prefix "model"
     * @param tp the model
     * @return the state
     */
    public static State of(String prefix, TensorParallel tp) {
        return new State().with(prefix, tp);
    }

    /**
     * A state of what an engine trains and counts.
     *
     * @param prefix "engine"
     * @param engine the engine
     * @return the state
     */
    public static State of(String prefix, Engine engine) {
        return new State().with(prefix, engine);
    }

    /**
     * A state of one replicated tensor, complete and equal on every rank.
     *
     * @param name of the tensor
     * @param tensor on the CPU or a CUDA device
     * @return the state
     */
    public static State of(String name, Tensor tensor) {
        return new State().with(name, tensor);
    }

    /**
     * Add a DDP model's parameters as {@code <prefix>.<parameter>}.
     *
     * @param prefix "model"
     * @param ddp the model
     * @return this
     */
    public State with(String prefix, Ddp ddp) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(ddp, ddp.ref, h -> ddp.ref.run(d -> Native.stateAddDdp(h, text, d)));
    }

    /**
     * Add the shards of an FSDP model's parameters as {@code <prefix>.<parameter>}: can be loaded in any layout and on
     * any number of ranks, into this rank's rows. Load between steps, while no unit is unsharded.
     *
     * @param prefix "model"
     * @param fsdp the model
     * @return this
     */
    public State with(String prefix, Fsdp fsdp) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(fsdp, fsdp.ref, h -> fsdp.ref.run(f -> Native.stateAddFsdp(h, text, f)));
    }

    /**
     * Add this rank's slices of a tensor-parallel model's parameters as {@code <prefix>.<parameter>}: can be loaded in
     * any layout and on any number of ranks, into this rank's slices. The saver's communicator has the ranks of the one
     * that the mesh was made from.
     *
     * @param prefix "model"
     * @param tp the model
     * @return this
     */
    public State with(String prefix, TensorParallel tp) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(tp, tp.ref, h -> tp.ref.run(t -> Native.stateAddTp(h, text, t)));
    }

    /**
     * Add an optimizer's moments as {@code <prefix>.state.<parameter>.<moment>} and its settings as
     * {@code <prefix>.param_groups.0.<setting>}. A load sets the settings too.
     *
     * @param prefix "optim"
     * @param optimizer the optimizer
     * @return this
     */
    public State with(String prefix, Optimizer optimizer) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(optimizer, optimizer.ref, h -> optimizer.ref.run(o -> Native.stateAddOptimizer(h, text, o)));
    }

    /**
     * Add a scaler's scale, step count and options as {@code <prefix>.*}, with the names of PyTorch's state_dict. A
     * load sets all of them.
     *
     * @param prefix "scaler"
     * @param scaler the scaler
     * @return this
     */
    public State with(String prefix, GradScaler scaler) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(scaler, scaler.ref, h -> scaler.ref.run(s -> Native.stateAddGradScaler(h, text, s)));
    }

    /**
     * Add a learning-rate schedule's step and the base rates of its optimizers as {@code <prefix>.*}. A load sets both,
     * and the optimizers accordingly. It throws {@link TesseraMismatchException} if the schedule is not the saved one, or
     * not attached to as many optimizers.
     *
     * @param prefix "schedule"
     * @param schedule the schedule
     * @return this
     */
    public State with(String prefix, LrSchedule schedule) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(schedule, schedule.ref, h -> schedule.ref.run(s -> Native.stateAddLrSchedule(h, text, s)));
    }

    /**
     * Add what an engine trains and counts: its parameters as {@code <prefix>.model.<parameter>}, its optimizer and schedule
     * as {@code <prefix>.optim} and {@code <prefix>.schedule}, its counters and loss scale as {@code <prefix>.engine.*}.
     * Parameters are those that the optimizer updates, in their own dtype, also with {@code "fp16"} and {@code "bf16"}. A
     * load continues the run at any number of ranks, stage, precision and batch sizes. Between an engine with a schedule
     * and one without, it must allow the names of the schedule to be missing or unexpected. From a backward pass to the
     * optimizer's step saves and loads throw {@link TesseraInvalidStateException}, because gradients are not saved.
     *
     * @param prefix "engine"
     * @param engine the engine
     * @return this
     */
    public State with(String prefix, Engine engine) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(engine, engine.ref, h -> engine.ref.run(e -> Native.stateAddEngine(h, text, e)));
    }

    /**
     * Add a sampler's position as {@code <prefix>.*}.
     *
     * @param prefix "data"
     * @param sampler the sampler
     * @return this
     */
    public State with(String prefix, Sampler sampler) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(sampler, sampler.ref, h -> sampler.ref.run(s -> Native.stateAddSampler(h, text, s)));
    }

    /**
     * Add the samples of a metric as {@code <prefix>.*}. Rank 0 saves all of them: call {@link Metric#gather} before a save.
     * A load gives them to rank 0 and resets the metric on the other ranks, whatever their number. A save or load while
     * another rank has samples throws {@link TesseraInvalidStateException}.
     *
     * @param prefix "auroc"
     * @param metric the metric
     * @param comm the ranks that compute the metric
     * @return this
     */
    public State with(String prefix, Metric metric, Comm comm) {
        final byte[] text = Native.utf8(prefix, "prefix");
        return join(metric, metric.ref,
                h -> metric.ref.run(m -> comm.ref.run(c -> Native.stateAddMetric(h, text, m, c))));
    }

    /**
     * Add the values of a custom object as {@code <prefix>.<name>}. Each save asks the object for them, and each load
     * gives them back.
     *
     * @param prefix "loader"; must not be a prefix of another object's prefix or vice versa
     * @param object kept reachable
     * @return this
     */
    public State with(String prefix, Stateful object) {
        final byte[] text = Native.utf8(prefix, "prefix");
        final StatefulCalls calls = new StatefulCalls(Objects.requireNonNull(object, "object"), thrown);
        ref.runExclusive(h -> Native.stateAddSource(h, text, calls));
        return this;
    }

    /**
     * Add a replicated tensor, complete and equal on every rank.
     *
     * @param name not empty, at most 1 KiB, unique; a "module." or "_orig_mod." part is stripped
     * @param tensor on the CPU, kept reachable, or on a CUDA device
     * @return this
     */
    public State with(String name, Tensor tensor) {
        final byte[] text = Native.utf8(name, "name");
        final long[] descriptor = tensor.descriptor();
        ref.runExclusive(h -> {
            Native.stateAddTensor(h, text, descriptor);
            members.add(tensor);
        });
        return this;
    }

    /**
     * Add this rank's pieces of a tensor that is distributed according to {@code layout}.
     *
     * @param name as for {@link #with(String, Tensor)}
     * @param layout with the saver's world size; copied
     * @param dtype of the global tensor
     * @param rank this rank
     * @param pieces one for each of this rank's boxes in the layout, with the box's size; kept reachable. Pieces
     *     without elements, which the layout omits, are allowed
     * @return this
     */
    public State with(String name, Layout layout, DType dtype, int rank, List<Tensor> pieces) {
        final byte[] text = Native.utf8(name, "name");
        final boolean asManyAsBoxes = pieces.size() == layout.boxes(rank).size();
        final List<Tensor> kept = pieces.stream().filter(piece -> asManyAsBoxes || piece.numel() > 0)
                .collect(Collectors.toUnmodifiableList());
        ref.runExclusive(h -> {
            layout.ref.run(l -> Native.stateAddSharded(h, text, l, dtype.number(), Tensor.descriptors(kept), rank));
            members.add(kept);
        });
        return this;
    }

    /**
     * Set the stream on which the program makes and uses the state's tensors of a CUDA device. A save reads them after what
     * that stream has when it is called, a load overwrites them after it. What the stream gets after
     * {@link Saver#saveAsync} waits, on the device, until they are copied. Without this call it is the device's default
     * stream.
     *
     * @param cudaDevice the device's number
     * @param stream address of a stream of that device ({@code cudaStream_t}), which must outlive its use here; 0 for the
     *     default stream
     * @return this
     * @throws TesseraInvalidArgumentException if there is no such device, or the stream is of another
     */
    public State setStream(int cudaDevice, long stream) {
        ref.runExclusive(h -> Native.stateSetStream(h, cudaDevice, stream));
        return this;
    }

    private State join(Object member, Ref other, java.util.function.LongConsumer add) {
        ref.runExclusive(h -> {
            add.accept(h);
            members.add(member);
            ref.dependOn(other);
        });
        return this;
    }

    /**
     * Set a value to an integer.
     *
     * @param name of the value
     * @param value any number
     * @return this
     */
    public State put(String name, long value) {
        final byte[] text = Native.utf8(name, "name");
        ref.runExclusive(h -> Native.stateSetInt64(h, text, value));
        return this;
    }

    /**
     * Set a value to a floating-point number.
     *
     * @param name of the value
     * @param value any number, including NaN and infinities
     * @return this
     */
    public State put(String name, double value) {
        final byte[] text = Native.utf8(name, "name");
        ref.runExclusive(h -> Native.stateSetDouble(h, text, value));
        return this;
    }

    /**
     * Set a value to null, a Boolean, a number, a String, bytes, a list or a map, nested at most 64 levels deep; {@link
     * Values} lists the Java classes.
     *
     * @param name of the value
     * @param value copied
     * @return this
     * @throws IllegalArgumentException if its class, or that of a member, is not one of them
     */
    public State put(String name, Object value) {
        final byte[] text = Native.utf8(name, "name");
        final byte[] json = Native.utf8(Values.toJson(value), "value");
        ref.runExclusive(h -> Native.stateSetValue(h, text, json));
        return this;
    }

    /**
     * An integer.
     *
     * @param name of the value
     * @return the value
     * @throws TesseraNotFoundException if the value does not exist
     * @throws TesseraInvalidArgumentException if it has another kind
     */
    public long getLong(String name) {
        final byte[] text = Native.utf8(name, "name");
        return use(h -> Native.stateGetInt64(h, text));
    }

    /**
     * A floating-point number.
     *
     * @param name of the value
     * @return the value
     * @throws TesseraNotFoundException if the value does not exist
     * @throws TesseraInvalidArgumentException if it has another kind
     */
    public double getDouble(String name) {
        final byte[] text = Native.utf8(name, "name");
        return use(h -> Native.stateGetDouble(h, text));
    }

    /**
     * A value of any kind, as the Java object described in {@link Values}.
     *
     * @param name of the value
     * @return the value; may be null
     * @throws TesseraNotFoundException if the value does not exist
     */
    public Object get(String name) {
        final byte[] text = Native.utf8(name, "name");
        return Values.fromJson(use(h -> Native.text(Native.stateGetValue(h, text))));
    }

    /**
     * Set a metric of the next save, which consumes it even if it fails. {@code tessera ckpt ls} shows it.
     *
     * @param name "loss"
     * @param value any number
     * @return this
     */
    public State metric(String name, double value) {
        final byte[] text = Native.utf8(Objects.requireNonNull(name, "name"), "name");
        ref.runExclusive(h -> Native.stateSetMetric(h, text, value));
        return this;
    }

    /**
     * Its global tensors.
     *
     * @return sorted by name
     */
    public List<Checkpoint.Entry> tensors() {
        return use(h -> {
            final List<Checkpoint.Entry> entries = new ArrayList<>();
            final long count = Native.stateTensorCount(h);
            for (long i = 0; i < count; ++i) {
                entries.add(new Checkpoint.Entry(Native.text(Native.stateTensorName(h, i)), Native.stateTensorShape(h, i)));
            }
            return Collections.unmodifiableList(entries);
        });
    }

    /**
     * Join the states of ranks that have different tensors, such as the stages of a pipeline: afterwards a save, a load and
     * a gather have the tensors of all ranks. Call it when everything is added. Give a parameter that several stages share
     * the same name in each; the names of values must be the same on every rank. All ranks must call it.
     *
     * @param comm the saver's ranks
     * @return this state
     * @throws TesseraMismatchException if two ranks have the same name with different dtypes or shapes
     * @throws TesseraInvalidArgumentException if parts of a tensor overlap on two ranks without being equal
     */
    public State join(Comm comm) {
        use(h -> {
            comm.ref.runExclusive(c -> Native.stateJoin(h, c));
            return null;
        });
        return this;
    }

    /**
     * Gather a complete tensor of which each rank holds a part. Gathering all tensors one after the other gives the
     * full state, without memory for all of them at once. All ranks must call it.
     *
     * @param comm the ranks that hold the parts
     * @param name of the tensor, one of {@link #tensors()}
     * @param root the rank that gets it, or -1 for all ranks
     * @return in its own memory, or null on other ranks than the root
     * @throws TesseraNotFoundException if the tensor does not exist
     * @throws TesseraMismatchException if the ranks name different tensors, or another rank lacks it
     * @throws TesseraInvalidArgumentException if the root does not exist
     */
    public Tensor gather(Comm comm, String name, int root) {
        final byte[] text = Native.utf8(name, "name");
        Tensor whole = null;
        for (Checkpoint.Entry entry : root == -1 || root == comm.rank() ? tensors() : List.<Checkpoint.Entry>of()) {
            if (entry.name().equals(name)) {
                whole = Tensor.zeros(entry.dtype(), entry.shape());
            }
        }
        final long[] memory = whole == null ? null : whole.descriptor();
        try {
            use(h -> {
                comm.ref.runExclusive(c -> Native.stateGather(h, c, text, root, memory));
                return null;
            });
        } finally {
            Reference.reachabilityFence(whole);
        }
        return whole;
    }

    /** Makes a call that may call a Stateful. An exception of the Stateful is attached to the error of the call. */
    <T> T use(LongFunction<T> call) {
        return ref.callExclusive(h -> {
            thrown.set(null);
            try {
                return call.apply(h);
            } catch (TesseraException failed) {
                final Throwable why = thrown.getAndSet(null);
                if (why != null) {
                    failed.addSuppressed(why);
                }
                throw failed;
            }
        });
    }
}
