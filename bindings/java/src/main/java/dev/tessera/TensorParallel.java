package dev.tessera;

import java.lang.ref.Reference;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.LongConsumer;
import java.util.function.LongSupplier;
import java.util.function.LongUnaryOperator;

/**
 * Tensor-parallel training: each rank of a group holds a slice of every large parameter and computes with it. A plan
 * names how each parameter is cut. Between such regions of the model, activations are gathered, summed or split. A
 * two-layer perceptron whose first weight is cut by columns and whose second by rows needs one sum in forward and one
 * in backward:
 *
 * <pre>{@code
 * TensorParallel tp = TensorParallel.over(mesh, "tp").params(params)
 *         .rule("fc1", Style.COLUMN).rule("fc2", Style.ROW).build();
 * multiply(x, tp.slice("fc1.weight"), hidden);          // my outputs of fc1
 * multiply(relu(hidden), tp.slice("fc2.weight"), y);    // my summand
 * tp.leave(y, y, tp.slice("fc2.bias"));                 // the sum of all ranks' summands, and the bias
 * ...
 * tp.enterBackward(dx, dx);                             // the sum of all ranks' gradients
 * optimizer.step();
 * }</pre>
 *
 * <p>Sizes need not divide by the number of ranks: they are cut like {@code torch.chunk} (equal parts of ceil(size /
 * ranks), then a shorter one, then empty ones), and a slice may be empty.
 *
 * <p>The calls for activations read and write tensors that you pass; {@link #part} computes the sizes of parts. {@code
 * dim} is the dimension along which an activation is cut over the ranks outside of the region, and may be any
 * dimension; the methods without it have all of the activation on every rank there. Tensors of a call are of one dtype.
 * Collective calls must be the same on all ranks, in the same order. They are exclusive, and use the mesh's
 * communicator. Each has an {@code …Async} variant that immediately returns a {@link Work}.
 *
 * <p>Parameters and activations may be on the communicator's CUDA device; {@link #setStream} says in which order. On a
 * device a call cannot see ids and targets: of one that is wrong it makes zeros, or leaves it out, and once the device is done
 * the communicator fails with {@link TesseraInvalidArgumentException}.
 *
 * <p>All of them throw {@link TesseraInvalidArgumentException} before anything is sent if the shapes or dtypes do not
 * belong together, {@link TesseraTimeoutException}, {@link TesseraPeerLostException}, {@link TesseraAbortedException},
 * {@link TesseraMismatchException} if another rank makes a different call, and {@link TesseraInterruptedException}; the
 * asynchronous ones from {@link Work#await()} as well.
 *
 * <p>Closing it closes the optimizers and states made from it; closing the mesh closes it. The memory is freed as soon
 * as no view of it is reachable and no operation in the background uses it.
 */
public final class TensorParallel extends NativeObject {
    private final Mesh mesh; // not closed by us; reachable while we are
    private final Comm comm; // the mesh's
    private final List<String> names;
    private final Map<String, Integer> numbers = new HashMap<>(); // by names, and names as given
    private final List<long[]> facts = new ArrayList<>(); // of each parameter: its cut or -1, and its full shape
    private final Memory[] slices; // guards itself and grads
    private final Memory[] grads;
    private volatile long stream; // of the operations on a device

    /** Where a slice or gradient is. It keeps no view of it reachable: the mesh, not only this object, may close this. */
    private static final class Memory {
        private final long[] descriptor;
        private final Views.View view;

        Memory(Ref ref, long[] descriptor) {
            this.descriptor = descriptor;
            final Tensor bare = Tensor.overNative(descriptor, null);
            view = new Views.View(ref, bare);
        }

        Tensor tensor() {
            return Tensor.overNative(descriptor, view.owner());
        }
    }

    /** What a rule does with the parameters that it matches. Weights are [outputs, inputs, ...]. */
    public static final class Style {
        /** Every rank holds it; the default for parameters that no rule matches. */
        public static final Style REPLICATE = new Style("REPLICATE", 1, 0, null, 0);
        /** Cut along dimension 0, weights and biases: each rank computes some of the outputs. */
        public static final Style COLUMN = new Style("COLUMN", 2, 0, null, 0);
        /**
         * Weights are cut along dimension 1: each rank takes some of the inputs. Biases are replicated; {@link
         * TensorParallel#leave(Tensor, Tensor, Tensor)} adds them once, after the sum.
         */
        public static final Style ROW = new Style("ROW", 3, 0, null, 0);
        /** The weight [words, features] of an embedding, cut along dimension 0; see {@link TensorParallel#embed}. */
        public static final Style VOCABULARY = new Style("VOCABULARY", 4, 0, null, 0);
        /**
         * Replicated, used where each rank has a part of the sequence, such as the weight of a norm: {@link
         * TensorParallel#sumGrads} sums its gradient over the ranks.
         */
        public static final Style SEQUENCE = new Style("SEQUENCE", 5, 0, null, 0);

        private final String name;
        private final int number;
        private final int dim;
        private final Layout layout;
        private final int heads;

        private Style(String name, int number, int dim, Layout layout, int heads) {
            this.name = name;
            this.number = number;
            this.dim = dim;
            this.layout = layout;
            this.heads = heads;
        }

        /**
         * The same between attention heads: each rank gets the same number of complete heads. For {@link #COLUMN}, {@link
         * #ROW} and {@link #shard}.
         *
         * @param count the number of heads that the dimension which is cut consists of, which the ranks must divide
         * @return the style
         * @throws IllegalArgumentException if there is none, or another style is meant
         */
        public Style heads(int count) {
            if (count < 1 || (number != 2 && number != 3 && number != 6)) {
                throw new IllegalArgumentException(this + " cannot have " + count + " heads");
            }
            return new Style(name + ".heads(" + count + ")", number, dim, layout, count);
        }

        /**
         * Cut along a dimension.
         *
         * @param dim of the parameter
         * @return the style
         */
        public static Style shard(int dim) {
            return new Style("shard(" + dim + ")", 6, dim, null, 0);
        }

        /**
         * Cut according to a layout, for weights that join several, such as q, k and v. A rank's slice has its boxes
         * one after another.
         *
         * @param layout of the parameter, over the ranks of the group; its boxes are full in all dimensions but one.
         *     Keep it open until the model is built
         * @return the style
         */
        public static Style layout(Layout layout) {
            return new Style("layout", 7, 0, Objects.requireNonNull(layout, "layout"), 0);
        }

        /** Its name here. */
        @Override
        public String toString() {
            return name;
        }
    }

    /** Collects the parameters and the plan of a model. */
    public static final class Builder {
        private final Mesh mesh;
        private final String dim; // null: the mesh has one
        private Params params = Params.of(Map.of()); // those without values are at address 0
        private final List<String> patterns = new ArrayList<>();
        private final List<Style> styles = new ArrayList<>();
        private TpOptions options = new TpOptions();

        private Builder(Mesh mesh, String dim) {
            this.mesh = Objects.requireNonNull(mesh, "mesh");
            this.dim = dim;
        }

        /**
         * Add parameters.
         *
         * @param more contiguous, with the shapes of the full parameters; read by {@link #build} and not used later.
         *     Only rank 0's values count, unless {@link TpOptions#syncValues} is false
         * @return this
         * @throws IllegalArgumentException if two parameters have the same name
         */
        public Builder params(Params more) {
            for (int i = 0; i < more.size(); ++i) {
                params = params.and(more.names().get(i), more.tensors().get(i));
            }
            return this;
        }

        /**
         * Add a parameter without values. On other ranks than rank 0 it stands for one with values there. If rank 0 has
         * none either, its slices are zeros, for example until a checkpoint is loaded; no rank ever needs memory for
         * all of it.
         *
         * @param name differs from the previous names
         * @param dtype of the parameter
         * @param shape of the full parameter
         * @return this
         * @throws IllegalArgumentException if two parameters have the same name, or the shape is invalid
         */
        public Builder deferred(String name, DType dtype, long... shape) {
            params = params.and(name, Params.named(name, () -> Tensor.deferred(dtype, Device.cpu(), shape)));
            return this;
        }

        /**
         * Add a rule to the plan. The pattern is a shell pattern for each dotted part of a name: '*' matches any
         * characters but dots, '?' one character, "[abc]" one of a set. It matches a parameter, or all parameters of a
         * module: "layers.*.attn.w[qkv]" matches "layers.0.attn.wq.weight" and "layers.0.attn.wq.bias". Each pattern
         * must match something, and only one may match a parameter.
         *
         * @param pattern of names
         * @param style what to do with the parameters that it matches
         * @return this
         */
        public Builder rule(String pattern, Style style) {
            Native.utf8(pattern, "pattern");
            styles.add(Objects.requireNonNull(style, "style"));
            patterns.add(pattern);
            return this;
        }

        /**
         * Add the rules of a map, in its order of iteration, which must be the same on every rank.
         *
         * @param plan styles by pattern, as for {@link #rule}
         * @return this
         */
        public Builder plan(Map<String, Style> plan) {
            plan.forEach(this::rule);
            return this;
        }

        /**
         * Set the options; initially all defaults.
         *
         * @param given the same on every rank
         * @return this
         */
        public Builder options(TpOptions given) {
            options = Objects.requireNonNull(given, "options");
            return this;
        }

        /**
         * Cut the parameters over the ranks, check that the ranks' plans are equal, and give each rank its slices.
         * Collective over the ranks of the mesh's dimension; the mesh is in exclusive use during the call.
         *
         * @return the model
         * @throws TesseraInvalidArgumentException if a pattern matches nothing, several match a parameter, or a
         *     parameter cannot have its style, on all ranks, naming the rank; if the mesh has several dimensions
         * @throws TesseraMismatchException if the plans of the ranks differ; the message names the first difference
         * @throws TesseraNotFoundException if the mesh lacks the dimension
         */
        public TensorParallel build() {
            final Mesh part = dim == null ? mesh : mesh.slice(dim);
            final List<Ref> layouts = new ArrayList<>();
            try {
                // The library refuses a mesh of several dimensions.
                final Comm comm = part.names.size() == 1 ? part.comm(part.names.get(0)) : null;
                final long handle = Comm.creating(comm, Creation.MODEL, reached -> {
                    final long[] handles = new long[styles.size()];
                    for (int i = 0; i < handles.length; ++i) {
                        if (styles.get(i).layout != null) {
                            final Ref layout = styles.get(i).layout.ref;
                            layout.retain();
                            layouts.add(layout);
                            handles[i] = layout.<Long>callRetained(h -> h);
                        }
                    }
                    return mesh.ref.callLongExclusive(m -> part == mesh ? register(m, comm, handles, reached)
                            : part.ref.callLong(p -> register(p, comm, handles, reached)));
                });
                return new TensorParallel(handle, mesh, part, comm, params.names());
            } finally {
                layouts.forEach(Ref::release);
                if (part != mesh) {
                    part.close(); // the model keeps what it needs of it
                }
                Reference.reachabilityFence(params);
            }
        }

        private long register(long ranks, Comm comm, long[] layouts, AtomicBoolean reached) {
            final byte[][] texts = patterns.stream().map(p -> Native.utf8(p, "pattern")).toArray(byte[][]::new);
            final byte[][] names = params.nameBytes();
            final long[] tensors = params.descriptors();
            final int[] kinds = styles.stream().mapToInt(style -> style.number).toArray();
            final int[] dims = styles.stream().mapToInt(style -> style.dim).toArray();
            final int[] heads = styles.stream().mapToInt(style -> style.heads).toArray();
            final LongUnaryOperator create = c -> {
                reached.set(true);
                return Native.tpCreate(ranks, names, tensors, texts, kinds, dims, heads, layouts, options);
            };
            return comm == null ? create.applyAsLong(0) : comm.ref.callLongExclusive(create);
        }
    }

    private TensorParallel(long handle, Mesh mesh, Mesh part, Comm comm, List<String> given) {
        super(ref(handle, mesh, part));
        this.mesh = mesh;
        this.comm = comm;
        final List<String> known = new ArrayList<>();
        for (int i = 0; i < given.size(); ++i) {
            numbers.put(given.get(i), i);
        }
        final long count = ref.callLong(Native::tpParamCount);
        for (int i = 0; i < count; ++i) {
            final int index = i;
            known.add(ref.call(h -> Native.text(Native.tpParamName(h, index))));
            numbers.put(known.get(i), i);
            facts.add(ref.call(h -> Native.tpParam(h, index)));
        }
        names = List.copyOf(known);
        slices = new Memory[names.size()];
        grads = new Memory[names.size()];
    }

    private static Ref ref(long handle, Mesh mesh, Mesh part) {
        final Ref ref = new Ref("TensorParallel", handle, Native::tpDestroy).dependOn(mesh.ref);
        return part == mesh ? ref : ref.borrow(part.ref);
    }

    /** Create a model over the slices of `tp`, whose handle `options` take; null: not over slices. */
    static long handed(TensorParallel tp, LongConsumer options, LongSupplier create) {
        if (tp == null) {
            options.accept(0);
            return create.getAsLong();
        }
        return tp.ref.callLongExclusive(handle -> {
            options.accept(handle);
            try {
                return create.getAsLong();
            } finally {
                options.accept(0);
            }
        });
    }

    /** The native part of such a model. */
    static Ref under(TensorParallel tp, Ref model) {
        return tp == null ? model : model.dependOn(tp.ref);
    }

    /**
     * Start building a model over the ranks of a mesh.
     *
     * @param mesh of one dimension
     * @return a builder without parameters
     */
    public static Builder over(Mesh mesh) {
        return new Builder(mesh, null);
    }

    /**
     * Start building a model over the ranks along one dimension of a mesh.
     *
     * @param mesh of any number of dimensions
     * @param dim the dimension's name, "tp"
     * @return a builder without parameters
     */
    public static Builder over(Mesh mesh, String dim) {
        return new Builder(mesh, Objects.requireNonNull(dim, "dim"));
    }

    // --- parameters

    /**
     * The names of the parameters, in the order of registration.
     *
     * @return unmodifiable
     */
    public List<String> names() {
        return ref.call(h -> names);
    }

    /**
     * The full shape of a parameter.
     *
     * @param name of the parameter
     * @return as registered
     * @throws IllegalArgumentException if there is no such parameter
     */
    public long[] shape(String name) {
        return ref.call(h -> shape(number(name)));
    }

    /**
     * The dimension along which a parameter is cut.
     *
     * @param name of the parameter
     * @return the dimension; -1: every rank has all of it
     * @throws IllegalArgumentException if there is no such parameter
     */
    public int cut(String name) {
        return ref.call(h -> (int) facts.get(number(name))[0]);
    }

    /**
     * This rank's slice of a parameter, which the optimizer updates and checkpoints save. It may be empty. The memory
     * never changes.
     *
     * @param name of the parameter
     * @return of the parameter's dtype, and its shape but for the size along {@link #cut}
     * @throws IllegalArgumentException if there is no such parameter
     */
    public Tensor slice(String name) {
        return ref.call(h -> {
            final int index = number(name);
            synchronized (slices) {
                if (slices[index] == null) {
                    slices[index] = new Memory(ref, Native.tpSlice(h, index));
                }
                return slices[index].tensor();
            }
        });
    }

    /**
     * The gradient of this rank's slice, which you write; initially zero. The memory never changes. The first call
     * allocates the memory of all gradients, and is exclusive.
     *
     * @param name of the parameter
     * @return of the slice's dtype and shape
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidStateException if the parameter is not floating-point
     */
    public Tensor grad(String name) {
        final int index = ref.call(h -> number(name));
        synchronized (slices) {
            if (grads[index] != null) {
                return grads[index].tensor();
            }
        }
        return ref.callExclusive(h -> {
            final Memory memory = new Memory(ref, Native.tpGrad(h, index));
            synchronized (slices) {
                grads[index] = memory;
            }
            return memory.tensor();
        });
    }

    /**
     * Which rank holds which part of a parameter, over all ranks of the communicator that the mesh was made from.
     *
     * @param name of the parameter
     * @return the layout, owned by the caller
     * @throws IllegalArgumentException if there is no such parameter
     */
    public Layout layout(String name) {
        return ref.call(h -> {
            final int index = number(name);
            return new Layout(Native.tpLayout(h, index), shape(index).length);
        });
    }

    /**
     * This rank's share of a dimension that is cut over the ranks.
     *
     * @param size of the dimension, at least 0
     * @return how much of it this rank has; may be 0
     */
    public long part(long size) {
        if (size < 0) {
            throw new IllegalArgumentException("a size is " + size + "; it must not be negative");
        }
        return ref.callLong(h -> {
            final long most = size / comm.worldSize() + (size % comm.worldSize() == 0 ? 0 : 1);
            return Math.max(0, Math.min(most, size - comm.rank() * most));
        });
    }

    private long[] shape(int index) {
        final long[] all = facts.get(index);
        return Arrays.copyOfRange(all, 1, all.length);
    }

    private int number(String name) {
        final Integer number = numbers.get(Objects.requireNonNull(name, "name"));
        if (number == null) {
            throw new IllegalArgumentException("there is no parameter \"" + name + "\"; known: " + names);
        }
        return number;
    }

    // --- activations

    private static final int ALL = -1; // the library's dim where every rank has all of an activation

    private static int checked(int dim) {
        if (dim < 0) {
            throw new IllegalArgumentException("dim is " + dim + "; it must be at least 0. If every rank has all of the"
                    + " activation, call the method without dim");
        }
        return dim;
    }

    /** The CPU has no streams. */
    private long on(boolean device) {
        return device ? stream : 0;
    }

    private long on(Tensor tensor) {
        return on(!tensor.device().equals(Device.cpu()));
    }

    /**
     * Name the CUDA stream on which the trainer computes, for a model whose parameters are on a device. Every operation on
     * tensors of the device is then in its order: it returns once it is on the stream, and what the stream gets later sees
     * the result. The {@code …Async} variants run on another stream, after what it has then; {@link Work#order} makes it wait
     * for them.
     *
     * @param stream address of a stream of the parameters' device ({@code cudaStream_t}), which must exist until another one
     *     is set; 0, as at first, is its default stream. A new one continues after what the previous one had
     * @throws TesseraInvalidArgumentException if it is of another device, or the parameters are on the CPU
     */
    public void setStream(long stream) {
        ref.runExclusive(h -> {
            Native.tpSetStream(h, stream);
            this.stream = stream;
        });
    }

    private void run(Operation operation) {
        try {
            ref.runExclusive(h -> comm.ref.runExclusive(c -> operation.issue(h, on(operation.isOnDevice()), false)));
        } finally {
            Reference.reachabilityFence(operation);
        }
    }

    private Work start(Operation operation) {
        final Work[] work = new Work[1];
        ref.runExclusive(h -> comm.ref.runExclusive(c -> {
            // Closing the mesh ends the operation by closing the communicator.
            final long issued = operation.issue(h, on(operation.isOnDevice()), true);
            work[0] = new Work(issued, new Object[] {operation, this}, ref, comm.ref);
            operation.isDoneBy(work[0].completion());
        }));
        return work[0];
    }

    private interface Move {
        long issue(long handle, long[] from, int dim, long[] to, long stream, boolean async);
    }

    private static Operation moving(Move move, Tensor from, int dim, Tensor to) {
        final long[] source = from.descriptor();
        final long[] target = to.descriptor();
        return new Operation((h, stream, async) -> move.issue(h, source, dim, target, stream, async), from, to);
    }

    private static Operation leaving(Tensor in, int dim, Tensor out, long[] added, Tensor bias) {
        final long[] source = in.descriptor();
        final long[] target = out.descriptor();
        return new Operation(
                (h, stream, async) -> Native.tpLeave(h, source, dim, added, target, stream, async), in, out, bias);
    }

    /**
     * Enter a region, in which every rank has all of an activation: forward. Copies {@code in}, without communication;
     * in place it does nothing.
     *
     * @param in the activation
     * @param out receives it, in the same shape; may be {@code in}
     */
    public void enter(Tensor in, Tensor out) {
        run(moving(Native::tpEnter, in, ALL, out));
    }

    /**
     * Enter a region, in which every rank has all of an activation: forward. Copies {@code in}, without communication;
     * in place it does nothing. Returns immediately.
     *
     * @param in the activation
     * @param out receives it, in the same shape; may be {@code in}
     * @return the operation in flight
     */
    public Work enterAsync(Tensor in, Tensor out) {
        return start(moving(Native::tpEnter, in, ALL, out));
    }

    /**
     * Enter a region, in which every rank has all of an activation: forward. Gathers the ranks' parts. Collective.
     *
     * @param in this rank's part along {@code dim}
     * @param dim the dimension, at least 0
     * @param out receives the full activation
     */
    public void enter(Tensor in, int dim, Tensor out) {
        run(moving(Native::tpEnter, in, checked(dim), out));
    }

    /**
     * Enter a region, in which every rank has all of an activation: forward. Gathers the ranks' parts. Collective.
     * Returns immediately.
     *
     * @param in this rank's part along {@code dim}
     * @param dim the dimension, at least 0
     * @param out receives the full activation
     * @return the operation in flight
     */
    public Work enterAsync(Tensor in, int dim, Tensor out) {
        return start(moving(Native::tpEnter, in, checked(dim), out));
    }

    /**
     * The adjoint of {@link #enter(Tensor, Tensor)}: the sum over the ranks of their gradients of the activation.
     * Collective.
     *
     * @param grad this rank's gradient of the activation
     * @param out receives the sum, in the same shape; may be {@code grad}
     */
    public void enterBackward(Tensor grad, Tensor out) {
        run(moving(Native::tpEnterBackward, grad, ALL, out));
    }

    /**
     * The adjoint of {@link #enter(Tensor, Tensor)}: the sum over the ranks of their gradients of the activation.
     * Collective. Returns immediately.
     *
     * @param grad this rank's gradient of the activation
     * @param out receives the sum, in the same shape; may be {@code grad}
     * @return the operation in flight
     */
    public Work enterBackwardAsync(Tensor grad, Tensor out) {
        return start(moving(Native::tpEnterBackward, grad, ALL, out));
    }

    /**
     * The adjoint of {@link #enter(Tensor, int, Tensor)}: this rank's part of the sum over the ranks of their gradients
     * of the activation. Collective.
     *
     * @param grad this rank's gradient of the full activation
     * @param dim as in forward
     * @param out receives this rank's part along {@code dim}
     */
    public void enterBackward(Tensor grad, int dim, Tensor out) {
        run(moving(Native::tpEnterBackward, grad, checked(dim), out));
    }

    /**
     * The adjoint of {@link #enter(Tensor, int, Tensor)}: this rank's part of the sum over the ranks of their gradients
     * of the activation. Collective. Returns immediately.
     *
     * @param grad this rank's gradient of the full activation
     * @param dim as in forward
     * @param out receives this rank's part along {@code dim}
     * @return the operation in flight
     */
    public Work enterBackwardAsync(Tensor grad, int dim, Tensor out) {
        return start(moving(Native::tpEnterBackward, grad, checked(dim), out));
    }

    /** Computes with one part of an activation. */
    @FunctionalInterface
    public interface PartCallback {
        /**
         * Compute. It must not use the model.
         *
         * @param begin the part's first index along the dimension; parts come once each, in order, except empty ones
         * @param part of the activation, until this method returns: get its buffer again in each call and never keep it
         * @throws Exception which fails the call
         */
        void compute(long begin, Tensor part) throws Exception;
    }

    /**
     * {@link #enter(Tensor, int, Tensor)}, overlapped: compute with one rank's part while the next ones are on their way.
     * Collective.
     *
     * @param in this rank's part along {@code dim}
     * @param dim the dimension, at least 0
     * @param out receives the full activation
     * @param compute reads each part
     * @throws TesseraException with {@link ErrorCode#USER}, or the code of a Tessera or I/O exception, if {@code compute}
     *     threw: its exception is the cause; {@code out} is complete all the same, and no other rank has failed
     */
    public void enterParts(Tensor in, int dim, Tensor out, PartCallback compute) {
        final long[] source = in.readDescriptor();
        final long[] target = out.descriptor();
        final int at = checked(dim);
        final PartRelay relay = new PartRelay(Objects.requireNonNull(compute, "compute"), true);
        relay.run(ref, comm, h -> Native.tpEnterParts(h, source, at, target, on(out), relay));
        Reference.reachabilityFence(in);
        Reference.reachabilityFence(out);
    }

    /**
     * {@link #leave(Tensor, int, Tensor)}, overlapped: compute this rank's summand of the part of one rank while the one
     * before is being summed. Collective.
     *
     * @param size of the full activation along {@code dim}
     * @param dim the dimension, at least 0
     * @param out receives this rank's part of the sum
     * @param compute writes each part
     * @throws TesseraException with {@link ErrorCode#USER}, or the code of a Tessera or I/O exception, if {@code compute}
     *     threw: its exception is the cause, and the communicator has ended on every rank
     */
    public void leaveParts(long size, int dim, Tensor out, PartCallback compute) {
        leaveParts(size, dim, out, (long[]) null, compute);
    }

    /**
     * {@link #leaveParts(long, int, Tensor, PartCallback)} with a bias, which is added once, after the sum. Collective.
     *
     * @param size of the full activation along {@code dim}
     * @param dim the dimension, at least 0
     * @param out receives this rank's part of the sum
     * @param bias as many elements as the last dimension of {@code out}
     * @param compute writes each part
     */
    public void leaveParts(long size, int dim, Tensor out, Tensor bias, PartCallback compute) {
        leaveParts(size, dim, out, bias.readDescriptor(), compute);
        Reference.reachabilityFence(bias);
    }

    private void leaveParts(long size, int dim, Tensor out, long[] bias, PartCallback compute) {
        final long[] target = out.descriptor();
        final int at = checked(dim);
        final PartRelay relay = new PartRelay(Objects.requireNonNull(compute, "compute"), false);
        relay.run(ref, comm, h -> Native.tpLeaveParts(h, size, at, bias, target, on(out), relay));
        Reference.reachabilityFence(out);
    }

    /**
     * Leave a region, in which each rank computed a summand of an activation: forward. Computes the sum over the ranks.
     * Collective.
     *
     * @param in this rank's summand
     * @param out receives the sum, in the same shape; may be {@code in}
     */
    public void leave(Tensor in, Tensor out) {
        run(leaving(in, ALL, out, null, null));
    }

    /**
     * Leave a region, in which each rank computed a summand of an activation: forward. Computes the sum over the ranks.
     * Collective. Returns immediately.
     *
     * @param in this rank's summand
     * @param out receives the sum, in the same shape; may be {@code in}
     * @return the operation in flight
     */
    public Work leaveAsync(Tensor in, Tensor out) {
        return start(leaving(in, ALL, out, null, null));
    }

    /**
     * Leave a region, in which each rank computed a summand of an activation: forward. Computes the sum over the ranks
     * and adds a bias. Collective.
     *
     * @param in this rank's summand
     * @param out receives the result, in the same shape; may be {@code in}
     * @param bias added once, after the sum; as many elements as the last dimension of {@code out}, of its
     *     floating-point dtype
     */
    public void leave(Tensor in, Tensor out, Tensor bias) {
        run(leaving(in, ALL, out, bias.readDescriptor(), bias));
    }

    /**
     * Leave a region, in which each rank computed a summand of an activation: forward. Computes the sum over the ranks
     * and adds a bias. Collective. Returns immediately.
     *
     * @param in this rank's summand
     * @param out receives the result, in the same shape; may be {@code in}
     * @param bias added once, after the sum; as many elements as the last dimension of {@code out}, of its
     *     floating-point dtype
     * @return the operation in flight
     */
    public Work leaveAsync(Tensor in, Tensor out, Tensor bias) {
        return start(leaving(in, ALL, out, bias.descriptor(), bias));
    }

    /**
     * Leave a region, in which each rank computed a summand of an activation: forward. Computes this rank's part of the
     * sum over the ranks. Collective.
     *
     * @param in this rank's summand
     * @param dim the dimension, at least 0
     * @param out receives this rank's part along {@code dim}
     */
    public void leave(Tensor in, int dim, Tensor out) {
        run(leaving(in, checked(dim), out, null, null));
    }

    /**
     * Leave a region, in which each rank computed a summand of an activation: forward. Computes this rank's part of the
     * sum over the ranks. Collective. Returns immediately.
     *
     * @param in this rank's summand
     * @param dim the dimension, at least 0
     * @param out receives this rank's part along {@code dim}
     * @return the operation in flight
     */
    public Work leaveAsync(Tensor in, int dim, Tensor out) {
        return start(leaving(in, checked(dim), out, null, null));
    }

    /**
     * Leave a region, in which each rank computed a summand of an activation: forward. Computes this rank's part of the
     * sum over the ranks and adds a bias. Collective.
     *
     * @param in this rank's summand
     * @param dim the dimension, at least 0
     * @param out receives this rank's part along {@code dim}
     * @param bias added once, after the sum; as many elements as the last dimension of {@code out}, of its
     *     floating-point dtype
     */
    public void leave(Tensor in, int dim, Tensor out, Tensor bias) {
        run(leaving(in, checked(dim), out, bias.readDescriptor(), bias));
    }

    /**
     * Leave a region, in which each rank computed a summand of an activation: forward. Computes this rank's part of the
     * sum over the ranks and adds a bias. Collective. Returns immediately.
     *
     * @param in this rank's summand
     * @param dim the dimension, at least 0
     * @param out receives this rank's part along {@code dim}
     * @param bias added once, after the sum; as many elements as the last dimension of {@code out}, of its
     *     floating-point dtype
     * @return the operation in flight
     */
    public Work leaveAsync(Tensor in, int dim, Tensor out, Tensor bias) {
        return start(leaving(in, checked(dim), out, bias.descriptor(), bias));
    }

    /**
     * The adjoint of {@link #leave(Tensor, Tensor)}: the gradient of every rank's summand. Copies {@code grad}, without
     * communication; in place it does nothing.
     *
     * @param grad the gradient of the sum
     * @param out receives the summand's gradient, in the same shape; may be {@code grad}
     */
    public void leaveBackward(Tensor grad, Tensor out) {
        run(moving(Native::tpLeaveBackward, grad, ALL, out));
    }

    /**
     * The adjoint of {@link #leave(Tensor, Tensor)}: the gradient of every rank's summand. Copies {@code grad}, without
     * communication; in place it does nothing. Returns immediately.
     *
     * @param grad the gradient of the sum
     * @param out receives the summand's gradient, in the same shape; may be {@code grad}
     * @return the operation in flight
     */
    public Work leaveBackwardAsync(Tensor grad, Tensor out) {
        return start(moving(Native::tpLeaveBackward, grad, ALL, out));
    }

    /**
     * The adjoint of {@link #leave(Tensor, int, Tensor)}: the gradient of every rank's summand, gathered from the
     * ranks' parts. Collective.
     *
     * @param grad the gradient of this rank's part
     * @param dim as in forward
     * @param out receives the summand's gradient, in its full shape
     */
    public void leaveBackward(Tensor grad, int dim, Tensor out) {
        run(moving(Native::tpLeaveBackward, grad, checked(dim), out));
    }

    /**
     * The adjoint of {@link #leave(Tensor, int, Tensor)}: the gradient of every rank's summand, gathered from the
     * ranks' parts. Collective. Returns immediately.
     *
     * @param grad the gradient of this rank's part
     * @param dim as in forward
     * @param out receives the summand's gradient, in its full shape
     * @return the operation in flight
     */
    public Work leaveBackwardAsync(Tensor grad, int dim, Tensor out) {
        return start(moving(Native::tpLeaveBackward, grad, checked(dim), out));
    }

    /**
     * Gather an activation that is cut along {@code dim} inside of a region, such as the outputs of a {@link
     * Style#COLUMN} weight. Its adjoint is {@link #split} if every rank then computes the same, otherwise {@link
     * #enterBackward(Tensor, int, Tensor)}. Collective.
     *
     * @param in this rank's part along {@code dim}
     * @param dim the dimension, at least 0
     * @param out receives the full activation
     */
    public void gather(Tensor in, int dim, Tensor out) {
        run(moving(Native::tpGather, in, checked(dim), out));
    }

    /**
     * Gather an activation that is cut along {@code dim} inside of a region, such as the outputs of a {@link
     * Style#COLUMN} weight. Its adjoint is {@link #split} if every rank then computes the same, otherwise {@link
     * #enterBackward(Tensor, int, Tensor)}. Collective. Returns immediately.
     *
     * @param in this rank's part along {@code dim}
     * @param dim the dimension, at least 0
     * @param out receives the full activation
     * @return the operation in flight
     */
    public Work gatherAsync(Tensor in, int dim, Tensor out) {
        return start(moving(Native::tpGather, in, checked(dim), out));
    }

    /**
     * Take this rank's part of an activation that every rank has, such as the input of a {@link Style#ROW} weight.
     * Local; may be called from any thread. Its adjoint is {@link #gather}.
     *
     * @param in the full activation
     * @param dim the dimension, at least 0
     * @param out receives this rank's part along {@code dim}
     * @throws TesseraInvalidArgumentException if the shapes or dtypes do not belong together
     */
    public void split(Tensor in, int dim, Tensor out) {
        final long[] source = in.descriptor();
        final long[] target = out.descriptor();
        try {
            ref.run(h -> Native.tpSplit(h, source, checked(dim), target, on(in)));
        } finally {
            Reference.reachabilityFence(in);
            Reference.reachabilityFence(out);
        }
    }

    // --- the vocabulary

    private Operation embedding(String name, Tensor ids, int dim, Tensor out) {
        final int index = ref.call(h -> number(name));
        final long[] words = ids.descriptor();
        final long[] target = out.descriptor();
        return new Operation(
                (h, stream, async) -> Native.tpEmbed(h, index, words, dim, target, stream, async), ids, out);
    }

    private Operation embeddingBackward(String name, Tensor ids, Tensor grad, int dim) {
        final int index = ref.call(h -> number(name));
        final Tensor into = grad(name);
        final long[] words = ids.descriptor();
        final long[] source = grad.descriptor();
        final long[] sum = into.descriptor();
        return new Operation(
                (h, stream, async) -> Native.tpEmbedBackward(h, index, words, source, dim, sum, stream, async),
                ids, grad, into);
    }

    private static Operation loss(Tensor logits, Tensor targets, long vocabulary, Tensor loss, Tensor grad,
            CrossEntropyOptions options) {
        final long[] scores = logits.descriptor();
        final long[] classes = targets.descriptor();
        final long[] value = loss.descriptor();
        final long[] slope = Tensor.optionalDescriptor(grad);
        final Tensor weights = options.weights();
        final long[] weighted = Tensor.optionalDescriptor(weights);
        final Comm others = options.ranks();
        return new Operation((h, stream, async) -> {
            if (others == null) {
                return Native.tpCrossEntropy(
                        h, scores, vocabulary, classes, options, weighted, 0, value, slope, stream, async);
            }
            return others.ref.callLongExclusive(o -> Native.tpCrossEntropy(
                    h, scores, vocabulary, classes, options, weighted, o, value, slope, stream, async));
        }, logits, targets, loss, grad, weights);
    }

    /**
     * Look up words in an embedding that is cut over the ranks ({@link Style#VOCABULARY}) or complete on each.
     * Collective.
     *
     * @param name of the parameter, [words, features]
     * @param ids I32 or I64, of any shape with at most 7 dimensions, the same on every rank
     * @param out receives the features: the shape of {@code ids} and the features as the last dimension
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidArgumentException if an id is outside of the vocabulary, before anything is sent
     */
    public void embed(String name, Tensor ids, Tensor out) {
        run(embedding(name, ids, ALL, out));
    }

    /**
     * Look up words in an embedding that is cut over the ranks ({@link Style#VOCABULARY}) or complete on each.
     * Collective. Returns immediately.
     *
     * @param name of the parameter, [words, features]
     * @param ids I32 or I64, of any shape with at most 7 dimensions, the same on every rank
     * @param out receives the features: the shape of {@code ids} and the features as the last dimension
     * @return the operation in flight
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidArgumentException if an id is outside of the vocabulary, before anything is sent
     */
    public Work embedAsync(String name, Tensor ids, Tensor out) {
        return start(embedding(name, ids, ALL, out));
    }

    /**
     * Look up words in an embedding that is cut over the ranks ({@link Style#VOCABULARY}) or complete on each. Each
     * rank gets only its part of the result. Collective.
     *
     * @param name of the parameter, [words, features]
     * @param ids I32 or I64, of any shape with at most 7 dimensions, the same on every rank
     * @param dim the dimension, at least 0
     * @param out receives this rank's part along {@code dim} of the shape of {@code ids} and the features
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidArgumentException if an id is outside of the vocabulary, before anything is sent
     */
    public void embed(String name, Tensor ids, int dim, Tensor out) {
        run(embedding(name, ids, checked(dim), out));
    }

    /**
     * Look up words in an embedding that is cut over the ranks ({@link Style#VOCABULARY}) or complete on each. Each
     * rank gets only its part of the result. Collective. Returns immediately.
     *
     * @param name of the parameter, [words, features]
     * @param ids I32 or I64, of any shape with at most 7 dimensions, the same on every rank
     * @param dim the dimension, at least 0
     * @param out receives this rank's part along {@code dim} of the shape of {@code ids} and the features
     * @return the operation in flight
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidArgumentException if an id is outside of the vocabulary, before anything is sent
     */
    public Work embedAsync(String name, Tensor ids, int dim, Tensor out) {
        return start(embedding(name, ids, checked(dim), out));
    }

    /**
     * The adjoint of {@link #embed(String, Tensor, Tensor)}: adds the gradients of this rank's words to its {@link
     * #grad}, in the order of the ids. Local.
     *
     * @param name as in forward
     * @param ids as in forward
     * @param grad the gradient of what {@code embed} returned
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidArgumentException if an id is outside of the vocabulary, before anything is sent
     */
    public void embedBackward(String name, Tensor ids, Tensor grad) {
        run(embeddingBackward(name, ids, grad, ALL));
    }

    /**
     * The adjoint of {@link #embed(String, Tensor, Tensor)}: adds the gradients of this rank's words to its {@link
     * #grad}, in the order of the ids. Local. Returns immediately.
     *
     * @param name as in forward
     * @param ids as in forward
     * @param grad the gradient of what {@code embed} returned
     * @return the operation in flight
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidArgumentException if an id is outside of the vocabulary, before anything is sent
     */
    public Work embedBackwardAsync(String name, Tensor ids, Tensor grad) {
        return start(embeddingBackward(name, ids, grad, ALL));
    }

    /**
     * The adjoint of {@link #embed(String, Tensor, int, Tensor)}: gathers the gradients and adds those of this rank's
     * words to its {@link #grad}, in the order of the ids. Collective.
     *
     * @param name as in forward
     * @param ids as in forward
     * @param grad the gradient of this rank's part of what {@code embed} returned
     * @param dim as in forward
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidArgumentException if an id is outside of the vocabulary, before anything is sent
     */
    public void embedBackward(String name, Tensor ids, Tensor grad, int dim) {
        run(embeddingBackward(name, ids, grad, checked(dim)));
    }

    /**
     * The adjoint of {@link #embed(String, Tensor, int, Tensor)}: gathers the gradients and adds those of this rank's
     * words to its {@link #grad}, in the order of the ids. Collective. Returns immediately.
     *
     * @param name as in forward
     * @param ids as in forward
     * @param grad the gradient of this rank's part of what {@code embed} returned
     * @param dim as in forward
     * @return the operation in flight
     * @throws IllegalArgumentException if there is no such parameter
     * @throws TesseraInvalidArgumentException if an id is outside of the vocabulary, before anything is sent
     */
    public Work embedBackwardAsync(String name, Tensor ids, Tensor grad, int dim) {
        return start(embeddingBackward(name, ids, grad, checked(dim)));
    }

    /**
     * Compute the cross-entropy of logits whose vocabulary is cut over the ranks, and its gradient, by two sums of a
     * few numbers per row (Shoeybi et al. 2019). It computes in F32, or in F64 for F64 logits. The loss is the mean
     * over the rows whose target is not -100. Collective.
     *
     * @param logits [..., classes of this rank], F16, BF16, F32 or F64: the vocabulary is cut like {@code torch.chunk},
     *     and a rank may have no classes
     * @param targets I32 or I64 [...], the same on every rank
     * @param vocabulary the number of classes over all ranks
     * @param loss of no dimension, F32, or F64 for F64 logits: receives the loss
     * @param grad receives the gradient of the loss by this rank's logits, in their shape and dtype; may be {@code
     *     logits}; null: no gradient is wanted
     * @throws TesseraInvalidArgumentException if a target is neither a class nor the ignored index, before anything is
     *     sent
     */
    public void crossEntropy(Tensor logits, Tensor targets, long vocabulary, Tensor loss, Tensor grad) {
        run(loss(logits, targets, vocabulary, loss, grad, new CrossEntropyOptions()));
    }

    /**
     * Compute the cross-entropy of logits whose vocabulary is cut over the ranks, and its gradient, by two sums of a
     * few numbers per row (Shoeybi et al. 2019). It computes in F32, or in F64 for F64 logits. The loss is the mean
     * over the rows whose target is not -100. Collective. Returns immediately.
     *
     * @param logits [..., classes of this rank], F16, BF16, F32 or F64: the vocabulary is cut like {@code torch.chunk},
     *     and a rank may have no classes
     * @param targets I32 or I64 [...], the same on every rank
     * @param vocabulary the number of classes over all ranks
     * @param loss of no dimension, F32, or F64 for F64 logits: receives the loss
     * @param grad receives the gradient of the loss by this rank's logits, in their shape and dtype; may be {@code
     *     logits}; null: no gradient is wanted
     * @return the operation in flight
     * @throws TesseraInvalidArgumentException if a target is neither a class nor the ignored index, before anything is
     *     sent
     */
    public Work crossEntropyAsync(Tensor logits, Tensor targets, long vocabulary, Tensor loss, Tensor grad) {
        return start(loss(logits, targets, vocabulary, loss, grad, new CrossEntropyOptions()));
    }

    /**
     * Compute the cross-entropy of logits whose vocabulary is cut over the ranks, and its gradient, by two sums of a
     * few numbers per row (Shoeybi et al. 2019). It computes in F32, or in F64 for F64 logits. Collective.
     *
     * @param logits [..., classes of this rank], F16, BF16, F32 or F64: the vocabulary is cut like {@code torch.chunk},
     *     and a rank may have no classes
     * @param targets I32 or I64 [...], the same on every rank
     * @param vocabulary the number of classes over all ranks
     * @param loss F32, or F64 for F64 logits, of no dimension; with {@link CrossEntropyOptions.Reduction#NONE} of the
     *     targets' shape: receives the loss
     * @param grad receives the gradient of the loss by this rank's logits, in their shape and dtype; may be {@code
     *     logits}; null: no gradient is wanted
     * @param options weights, reduction, ranks with other rows of the batch
     * @throws TesseraInvalidArgumentException if a target is neither a class nor the ignored index, before anything is
     *     sent
     */
    public void crossEntropy(Tensor logits, Tensor targets, long vocabulary, Tensor loss, Tensor grad,
            CrossEntropyOptions options) {
        run(loss(logits, targets, vocabulary, loss, grad, options));
    }

    /**
     * Compute the cross-entropy of logits whose vocabulary is cut over the ranks, and its gradient, by two sums of a
     * few numbers per row (Shoeybi et al. 2019). It computes in F32, or in F64 for F64 logits. Collective. Returns
     * immediately.
     *
     * @param logits [..., classes of this rank], F16, BF16, F32 or F64: the vocabulary is cut like {@code torch.chunk},
     *     and a rank may have no classes
     * @param targets I32 or I64 [...], the same on every rank
     * @param vocabulary the number of classes over all ranks
     * @param loss F32, or F64 for F64 logits, of no dimension; with {@link CrossEntropyOptions.Reduction#NONE} of the
     *     targets' shape: receives the loss
     * @param grad receives the gradient of the loss by this rank's logits, in their shape and dtype; may be {@code
     *     logits}; null: no gradient is wanted
     * @param options weights, reduction, ranks with other rows of the batch
     * @return the operation in flight
     * @throws TesseraInvalidArgumentException if a target is neither a class nor the ignored index, before anything is
     *     sent
     */
    public Work crossEntropyAsync(Tensor logits, Tensor targets, long vocabulary, Tensor loss, Tensor grad,
            CrossEntropyOptions options) {
        return start(loss(logits, targets, vocabulary, loss, grad, options));
    }

    // --- gradients

    /**
     * Sum over the ranks the gradients of which each rank has a part: those of {@link Style#SEQUENCE} and, with {@link
     * TpOptions#sequenceParallel}, of the biases of {@link Style#ROW}. Call it once per step, after backward and before
     * clipping and the optimizer's step, which refuses to step without it. All other gradients are complete on their
     * rank. Collective.
     */
    public void sumGrads() {
        run(new Operation((h, stream, async) -> Native.tpSumGrads(h, async)));
    }

    /**
     * Sum over the ranks the gradients of which each rank has a part: those of {@link Style#SEQUENCE} and, with {@link
     * TpOptions#sequenceParallel}, of the biases of {@link Style#ROW}. Call it once per step, after backward and before
     * clipping and the optimizer's step, which refuses to step without it. All other gradients are complete on their
     * rank. Collective. Returns immediately.
     *
     * @return the operation in flight
     */
    public Work sumGradsAsync() {
        return start(new Operation((h, stream, async) -> Native.tpSumGrads(h, async)));
    }

    /** Set the gradients of all slices to zero. Exclusive. */
    public void zeroGrad() {
        ref.runExclusive(Native::tpZeroGrad);
    }

    /** The names of the parameters. */
    @Override
    public String toString() {
        return "TensorParallel(" + comm + ", " + names + ")";
    }
}
