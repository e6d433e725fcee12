package dev.tessera;

import java.util.Map;
import java.util.Objects;

/**
 * DeepSpeed's loss scale, which an {@link Engine} with {@code "fp16"} has. Use it if your trainer checks the gradients and
 * makes the steps; otherwise use an engine or a {@link GradScaler}. Multiply the loss by {@link #value}, and report
 * after each step whether the gradients of any rank had an infinity or NaN. A dynamic scale halves after {@link
 * Builder#hysteresis} overflows and doubles after {@link Builder#window} steps without one.
 *
 * <p>Exclusive: one thread at a time. Each rank has its own scale; they stay equal if all ranks report the same. Add it to a
 * {@link State} to save it.
 */
public final class LossScale extends NativeObject implements Stateful {
    private static final String SCALE = "scale";
    private static final String ITERATION = "iteration";
    private static final String LAST_OVERFLOW = "last_overflow";
    private static final String HYSTERESIS = "hysteresis";

    private LossScale(long handle) {
        super(new Ref("LossScale", handle, Native::lossScaleDestroy).mayLeak());
    }

    /**
     * Start building a loss scale.
     *
     * @return a builder with the library's defaults
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Settings of a loss scale, the same on every rank; options that are not set have the library's defaults, which are
     * DeepSpeed's. Scales are positive normal F32 numbers.
     */
    public static final class Builder extends LossScaleOptionsFields<Builder> {
        private Builder() {}

        /**
         * Create the loss scale.
         *
         * @return the loss scale
         * @throws TesseraInvalidArgumentException if a setting is invalid
         */
        public LossScale build() {
            return new LossScale(Native.lossScaleCreate(this));
        }
    }

    /**
     * The factor for losses.
     *
     * @return a positive number
     */
    public double value() {
        return ref.callExclusive(Native::lossScaleValue);
    }

    /**
     * End a step.
     *
     * @param overflow whether the gradients of any rank had an infinity or NaN; the same on every rank
     * @return the next scale
     * @throws TesseraInvalidStateException if the scale must halve, but is at its minimum; nothing has changed
     */
    public double update(boolean overflow) {
        return ref.callExclusive(h -> Native.lossScaleUpdate(h, overflow));
    }

    /**
     * What a checkpoint keeps.
     *
     * @return "scale"; "iteration": the number of updates; "last_overflow": the iteration of the last overflow, or -1;
     *     "hysteresis": the overflows left until it halves
     */
    @Override
    public Map<String, Object> stateDict() {
        final long[] state = ref.callExclusive(Native::lossScaleGetState);
        return Map.of(SCALE, Double.longBitsToDouble(state[0]), ITERATION, state[1], LAST_OVERFLOW, state[2], HYSTERESIS,
                state[3]);
    }

    @Override
    public void checkStateDict(Map<String, Object> values) {
        try (LossScale scratch = builder().build()) {
            scratch.loadStateDict(values);
        }
    }

    /**
     * Continue from a state. A fixed scale stays as it was built.
     *
     * @param values of {@link #stateDict}
     * @throws IllegalArgumentException if a value is missing or not a number
     * @throws TesseraInvalidArgumentException if a value is out of range; nothing has changed
     */
    @Override
    public void loadStateDict(Map<String, Object> values) {
        ref.runExclusive(h -> Native.lossScaleSetState(h, number(values, SCALE).doubleValue(),
                integer(values, ITERATION), integer(values, LAST_OVERFLOW), integer(values, HYSTERESIS)));
    }

    private static Number number(Map<String, Object> values, String name) {
        final Object value = Objects.requireNonNull(values, "values").get(name);
        if (value instanceof Double || value instanceof Long) {
            return (Number) value;
        }
        throw new IllegalArgumentException("the saved '" + name + "' is " + value + ", not a number");
    }

    private static long integer(Map<String, Object> values, String name) {
        final Number number = number(values, name);
        if (number instanceof Long) {
            return (Long) number;
        }
        throw new IllegalArgumentException("the saved '" + name + "' is " + number + ", not an integer");
    }
}
