package dev.tessera;

import java.util.LinkedHashSet;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.function.UnaryOperator;

/**
 * Parameters of an {@link Fsdp} model that are whole at the same time: a layer, say. Immutable; the methods that add or change
 * make another one.
 */
public final class FsdpUnit {
    final String name;
    final Params params; // those without values are at address 0
    final Set<String> frozen;
    final Settings settings;

    /** Not to be changed: {@link #with} makes another one. */
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
     * @param name "layer3", in messages and calls; differs from those of the other units
     * @return the unit
     */
    public static FsdpUnit of(String name) {
        return of(name, Params.of(Map.of()));
    }

    /**
     * A unit of parameters.
     *
     * @param name "layer3", in messages and calls; differs from those of the other units
     * @param params contiguous, floating-point if trained, of one dimension or more, cut by rows (see also {@link #flat});
     *     read by {@link Fsdp#create} and not used later
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
     * @return another unit
     */
    public FsdpUnit and(String param, Tensor tensor) {
        return new FsdpUnit(name, params.and(param, tensor), frozen, settings);
    }

    /**
     * This unit with one more parameter, whose values come later, into its shards ({@link Fsdp#shardTensor}, or a load): no
     * rank ever needs memory for all of it. Until then it is zero.
     *
     * @param param its name
     * @param dtype F16, BF16, F32 or F64
     * @param shape of one dimension or more
     * @return another unit
     */
    public FsdpUnit andDeferred(String param, DType dtype, long... shape) {
        return and(param, Tensor.overNative(0, dtype, shape, null));
    }

    /**
     * This unit without gradients of some parameters.
     *
     * @param names of parameters that it has
     * @return another unit
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
     * This unit, whole from its forward to its backward or not: more memory, less communication. Not, at first.
     *
     * @param value whether
     * @return another unit
     */
    public FsdpUnit keepWhole(boolean value) {
        return with(unit -> unit.reshardAfterForward(value ? 0 : 1));
    }

    /**
     * This unit, kept from its forward to its backward among each so many ranks that follow each other, of which the ranks
     * that it is cut among are a multiple: whole on each host if they fit on one, else a part on each. It is not, at
     * first.
     *
     * @param ranks 2 or more; 1: not kept
     * @return another unit
     */
    public FsdpUnit keepAmong(int ranks) {
        return with(unit -> unit.reshardAfterForward(ranks));
    }

    /**
     * This unit, whose whole parameters have a type of their own instead of that of {@link FsdpOptions#paramDtype}.
     *
     * @param dtype F16, BF16, F32 or F64
     * @return another unit
     */
    public FsdpUnit paramDtype(DType dtype) {
        return with(unit -> unit.paramDtype(dtype));
    }

    /**
     * This unit, whose whole gradients are reduced in a type of their own instead of that of {@link FsdpOptions#reduceDtype}.
     *
     * @param dtype F16, BF16, F32 or F64
     * @return another unit
     */
    public FsdpUnit reduceDtype(DType dtype) {
        return with(unit -> unit.reduceDtype(dtype));
    }

    /**
     * This unit, whose parameters are cut between blocks of so many rows. At first they are cut between any rows (0), as
     * {@code torch.chunk} does.
     *
     * @param rows 0 or more
     * @return another unit
     */
    public FsdpUnit rowBlock(int rows) {
        return with(unit -> unit.rowBlock(rows));
    }

    /**
     * This unit, whose parameters of one dtype are cut together, as one row of elements, anywhere, or not: the ranks have
     * equally much of them, shards have one dimension, and parameters may be without one. Not, at first.
     *
     * @param value whether
     * @return another unit
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

    /** The name and those of the parameters. */
    @Override
    public String toString() {
        return "FsdpUnit(" + name + ", " + params.names() + ")";
    }
}
