package dev.tessera;

import java.util.LinkedHashSet;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.function.UnaryOperator;

/**
 * Parameters of an {@link Fsdp} model that are unsharded together, such as a layer. Immutable; the methods return new
 * units.
 */
public final class FsdpUnit {
    final String name;
    final Params params; // those without values are at address 0
    final Set<String> frozen;
    final Settings settings;

    /** Must not be changed; {@link #with} creates a new one. */
    static final class Settings extends FsdpUnitFields<Settings> {
        private Settings() {}

        private Settings(Settings from) {
            super(from);
        }
    }

    private FsdpUnit(String name, Params params, Set<String> frozen, Settings settings) {
        this.name = name;
        this.params = params;
        this.frozen = frozen;
        this.settings = settings;
    }

    private FsdpUnit with(UnaryOperator<Settings> change) {
        return new FsdpUnit(name, params, frozen, change.apply(new Settings(settings)));
    }

    /**
     * A unit without parameters yet.
     *
     * @param name "layer3", for messages and calls; must be unique in the model
     * @return the unit
     */
    public static FsdpUnit of(String name) {
        return of(name, Params.of(Map.of()));
    }

    /**
     * A unit of parameters.
     *
     * @param name "layer3", for messages and calls; must be unique in the model
     * @param params contiguous, floating-point if trained, with at least one dimension, sharded by rows (see also
     *     {@link #flat}); all of a model on the CPU, or all on the communicator's CUDA device (see {@link
     *     Fsdp#setStream}); read by {@link Fsdp#create}, on a device in the order of its default stream, and not used
     *     later
     * @return the unit
     */
    public static FsdpUnit of(String name, Params params) {
        Native.utf8(name, "name");
        return new FsdpUnit(name, Objects.requireNonNull(params, "params"), Set.of(), new Settings());
    }

    /**
     * This unit with one more parameter.
     *
     * @param param its name
     * @param tensor as those of {@link #of(String, Params)}
     * @return a new unit
     */
    public FsdpUnit and(String param, Tensor tensor) {
        return new FsdpUnit(name, params.and(param, tensor), frozen, settings);
    }

    /**
     * This unit with one more parameter, whose values are written into its shards later (by {@link Fsdp#shardTensor} or
     * a load); no rank ever needs memory for all of it. Until then it is zero.
     *
     * @param param its name
     * @param dtype F16, BF16, F32 or F64
     * @param shape at least one dimension
     * @return a new unit
     */
    public FsdpUnit andDeferred(String param, DType dtype, long... shape) {
        return andDeferred(param, dtype, Device.cpu(), shape);
    }

    /**
     * The same of a model whose parameters are on a CUDA device.
     *
     * @param param its name
     * @param dtype F16, BF16, F32 or F64
     * @param device of the model's parameters
     * @param shape at least one dimension
     * @return a new unit
     */
    public FsdpUnit andDeferred(String param, DType dtype, Device device, long... shape) {
        return and(param, Params.named(param, () -> Tensor.deferred(dtype, device, shape)));
    }

    /**
     * This unit with some parameters frozen.
     *
     * @param names of parameters that it has
     * @return a new unit
     */
    public FsdpUnit freeze(String... names) {
        final Set<String> all = new LinkedHashSet<>(frozen);
        for (String param : names) {
            if (!params.names().contains(Objects.requireNonNull(param, "a name"))) {
                throw new IllegalArgumentException("unit \"" + name + "\" has no parameter \"" + param + "\" to freeze; it has "
                        + params.names());
            }
            all.add(param);
        }
        return new FsdpUnit(name, params, all, settings);
    }

    /**
     * This unit, unsharded from its forward to its backward or not: more memory, less communication. Initially not.
     *
     * @param value whether
     * @return a new unit
     */
    public FsdpUnit keepWhole(boolean value) {
        return with(unit -> unit.reshardAfterForward(value ? 0 : 1));
    }

    /**
     * This unit, kept from its forward to its backward in groups of that many consecutive ranks, which must divide the
     * number of ranks that it is sharded over: unsharded on each host if a group fits on one, else a part on each rank.
     * Initially not.
     *
     * @param ranks at least 2; 1 does not keep it
     * @return a new unit
     */
    public FsdpUnit keepAmong(int ranks) {
        return with(unit -> unit.reshardAfterForward(ranks));
    }

    /**
     * This unit with its own dtype of unsharded parameters, instead of {@link FsdpOptions#paramDtype}.
     *
     * @param dtype F16, BF16, F32 or F64
     * @return a new unit
     */
    public FsdpUnit paramDtype(DType dtype) {
        return with(unit -> unit.paramDtype(dtype));
    }

    /**
     * This unit with its own dtype of reductions, instead of {@link FsdpOptions#reduceDtype}.
     *
     * @param dtype F16, BF16, F32 or F64
     * @return a new unit
     */
    public FsdpUnit reduceDtype(DType dtype) {
        return with(unit -> unit.reduceDtype(dtype));
    }

    /**
     * This unit with its parameters sharded only between blocks of that many rows. Initially they are sharded between
     * any rows (0), as {@code torch.chunk} does.
     *
     * @param rows at least 0
     * @return a new unit
     */
    public FsdpUnit rowBlock(int rows) {
        return with(unit -> unit.rowBlock(rows));
    }

    /**
     * This unit, with parameters of one dtype sharded together or not, as one row of elements, at any element: all
     * ranks hold equally much, shards have one dimension, and parameters may have none. Initially not.
     *
     * @param value whether
     * @return a new unit
     */
    public FsdpUnit flat(boolean value) {
        return with(unit -> unit.flat(value));
    }

    /**
     * Its name.
     *
     * @return as given
     */
    public String name() {
        return name;
    }

    /** The unit's name and those of its parameters. */
    @Override
    public String toString() {
        return "FsdpUnit(" + name + ", " + params.names() + ")";
    }
}
