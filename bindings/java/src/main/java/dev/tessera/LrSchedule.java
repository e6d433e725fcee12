package dev.tessera;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.OptionalDouble;

/**
 * A learning-rate schedule: it computes the rate of any step, and sets optimizers. docs/SCHEDULES.md has the formulas.
 *
 * <pre>{@code
 * try (LrSchedule schedule = LrSchedule.sequential(
 *         List.of(LrSchedule.linear(0.1, 1, 100), LrSchedule.cosine(900, 0)), 100)) {
 *     schedule.attach(optimizer);
 *     for (...) {
 *         optimizer.step();
 *         schedule.step();
 *     }
 * }
 * }</pre>
 *
 * <p>Steps count from 0, the optimizer's first. {@code baseLr} is an optimizer's own rate when it is attached. A {@link
 * State} saves and loads the step and the base rates. {@link #attach}, {@link #step} and {@link #setSteps} are
 * exclusive, also of the attached optimizers. The garbage collector frees a schedule that is not closed.
 */
public final class LrSchedule extends NativeObject {
    LrSchedule(long handle) {
        super(new Ref("LrSchedule", handle, Native::lrScheduleDestroy).mayLeak());
    }

    /** How {@link #wsd} decays, by the share u of the decay that is done. The ordinals are the library's numbers. */
    public enum Decay {
        /** 1 - u. */
        LINEAR,
        /** (1 + cos(pi u)) / 2. */
        COSINE,
        /** 1 - sqrt(u). */
        SQRT
    }

    /** How the warm-ups of DeepSpeed rise. The ordinals are the library's numbers. */
    public enum WarmupType {
        /** With the logarithm of the step. */
        LOG,
        /** In a line. */
        LINEAR
    }

    /**
     * baseLr times a factor for the first steps, then baseLr (PyTorch's ConstantLR).
     *
     * @param factor finite, not negative
     * @param totalSteps at least 1
     * @return the schedule
     * @throws TesseraInvalidArgumentException if an argument is out of range; so do all that follow
     */
    public static LrSchedule constant(double factor, long totalSteps) {
        return new LrSchedule(Native.lrConstant(factor, totalSteps));
    }

    /**
     * baseLr times a factor that changes linearly, then stays (PyTorch's LinearLR).
     *
     * @param startFactor finite, not negative
     * @param endFactor finite, not negative
     * @param totalSteps at least 1
     * @return the schedule
     */
    public static LrSchedule linear(double startFactor, double endFactor, long totalSteps) {
        return new LrSchedule(Native.lrLinear(startFactor, endFactor, totalSteps));
    }

    /**
     * baseLr times gamma to the power of step / stepSize, rounded down (PyTorch's StepLR).
     *
     * @param stepSize at least 1
     * @param gamma finite, not negative
     * @return the schedule
     */
    public static LrSchedule stepDecay(long stepSize, double gamma) {
        return new LrSchedule(Native.lrStepDecay(stepSize, gamma));
    }

    /**
     * baseLr times gamma for each milestone that was reached (PyTorch's MultiStepLR).
     *
     * @param gamma finite, not negative
     * @param milestones in ascending order, from 1
     * @return the schedule
     */
    public static LrSchedule multiStepDecay(double gamma, long... milestones) {
        return new LrSchedule(Native.lrMultiStepDecay(Objects.requireNonNull(milestones, "milestones"), gamma));
    }

    /**
     * baseLr times gamma to the power of the step (PyTorch's ExponentialLR).
     *
     * @param gamma finite, not negative
     * @return the schedule
     */
    public static LrSchedule exponential(double gamma) {
        return new LrSchedule(Native.lrExponential(gamma));
    }

    /**
     * baseLr times (1 - step / totalSteps) to a power, then 0 (PyTorch's PolynomialLR).
     *
     * @param totalSteps at least 1
     * @param power finite, not negative
     * @return the schedule
     */
    public static LrSchedule polynomial(long totalSteps, double power) {
        return new LrSchedule(Native.lrPolynomial(totalSteps, power));
    }

    /**
     * From baseLr to minLr along half a cosine, and back in as many steps, repeatedly (PyTorch's CosineAnnealingLR):
     * the rate rises again after {@code totalSteps}.
     *
     * @param totalSteps from baseLr to minLr; at least 1
     * @param minLr finite, not negative
     * @return the schedule
     */
    public static LrSchedule cosine(long totalSteps, double minLr) {
        return new LrSchedule(Native.lrCosine(totalSteps, minLr));
    }

    /**
     * From baseLr to minLr along half a cosine, then again from baseLr (PyTorch's CosineAnnealingWarmRestarts).
     *
     * @param firstSteps of the first cycle; at least 1
     * @param multiplier how many times longer each cycle is than the previous one; at least 1
     * @param minLr finite, not negative
     * @return the schedule
     */
    public static LrSchedule cosineRestarts(long firstSteps, long multiplier, double minLr) {
        return new LrSchedule(Native.lrCosineRestarts(firstSteps, multiplier, minLr));
    }

    /**
     * baseLr times min(s / w, sqrt(w / s)), where s is the step + 1 and w the number of warm-up steps (Vaswani et al.
     * 2017).
     *
     * @param warmupSteps at least 1
     * @return the schedule
     */
    public static LrSchedule inverseSqrt(long warmupSteps) {
        return new LrSchedule(Native.lrInverseSqrt(warmupSteps));
    }

    /**
     * Warm-up, stable, decay (Hu et al. 2024): baseLr times a factor that rises linearly from minRatio to 1, stays,
     * falls to minRatio, and stays.
     *
     * @param warmupSteps at least 0
     * @param stableSteps at least 0
     * @param decaySteps at least 1
     * @param decay its shape
     * @param minRatio finite, not negative
     * @return the schedule
     */
    public static LrSchedule wsd(long warmupSteps, long stableSteps, long decaySteps, Decay decay, double minRatio) {
        Objects.requireNonNull(decay, "decay");
        return new LrSchedule(Native.lrWsd(warmupSteps, stableSteps, decaySteps, decay.ordinal(), minRatio));
    }

    /**
     * Start building DeepSpeed's WarmupLR or, with {@code totalNumSteps}, its WarmupDecayLR. Its iteration number is
     * the step - 1.
     *
     * @return a builder with the library's defaults, which are DeepSpeed's
     */
    public static Warmup warmup() {
        return new Warmup();
    }

    /** Settings of {@link LrSchedule#warmup}. */
    public static final class Warmup extends LrWarmupOptionsFields<Warmup> {
        private Warmup() {}

        /**
         * Create the schedule.
         *
         * @return the schedule
         * @throws TesseraInvalidArgumentException if a setting is invalid
         */
        public LrSchedule build() {
            return new LrSchedule(Native.lrWarmup(this));
        }
    }

    /**
     * Start building DeepSpeed's WarmupCosineLR. Its iteration number is the step - 1; at step 0 the rate is 0.
     *
     * @return a builder with the library's defaults, which are DeepSpeed's; totalNumSteps has none
     */
    public static WarmupCosine warmupCosine() {
        return new WarmupCosine();
    }

    /** Settings of {@link LrSchedule#warmupCosine}. */
    public static final class WarmupCosine extends LrWarmupCosineOptionsFields<WarmupCosine> {
        private WarmupCosine() {}

        /**
         * Create the schedule.
         *
         * @return the schedule
         * @throws TesseraInvalidArgumentException if a setting is invalid
         */
        public LrSchedule build() {
            return new LrSchedule(Native.lrWarmupCosine(this));
        }
    }

    /**
     * Start building DeepSpeed's OneCycle, which sets the rate whatever baseLr is, and the momentum: that of SGD, or
     * the first beta of Adam and AdamW.
     *
     * @return a builder with the library's defaults, which are DeepSpeed's; the two rates have none
     */
    public static OneCycle oneCycle() {
        return new OneCycle();
    }

    /** Settings of {@link LrSchedule#oneCycle}. */
    public static final class OneCycle extends LrOneCycleOptionsFields<OneCycle> {
        private OneCycle() {}

        /**
         * Create the schedule.
         *
         * @return the schedule
         * @throws TesseraInvalidArgumentException if a setting is invalid
         */
        public LrSchedule build() {
            return new LrSchedule(Native.lrOneCycle(this));
        }
    }

    /**
     * minLr times 1 + stepRate * step / stepSize, whatever baseLr is (DeepSpeed's LRRangeTest).
     *
     * @param minLr finite, not negative
     * @param stepSize at least 1
     * @param stepRate finite, not negative
     * @param staircase whether step / stepSize is rounded down
     * @return the schedule
     */
    public static LrSchedule rangeTest(double minLr, long stepSize, double stepRate, boolean staircase) {
        return new LrSchedule(Native.lrRangeTest(minLr, stepSize, stepRate, staircase));
    }

    /**
     * One schedule after the other (PyTorch's SequentialLR). Each begins with its step 0.
     *
     * @param schedules at least 1; at most 1000 with all that they are composed of, nested at most 16 deep; only their
     *     values count, not their steps
     * @param milestones the steps at which the second to last schedule begin, strictly ascending
     * @return the schedule
     */
    public static LrSchedule sequential(List<LrSchedule> schedules, long... milestones) {
        Objects.requireNonNull(milestones, "milestones");
        return new LrSchedule(withHandles(schedules, handles -> Native.lrSequential(handles, milestones)));
    }

    /**
     * Several schedules at once (PyTorch's ChainedScheduler): each takes the rate of the previous one as its baseLr, so
     * factors multiply.
     *
     * @param schedules as for {@link #sequential}; one that sets the rate whatever baseLr is can only be the first
     * @return the schedule
     */
    public static LrSchedule chained(List<LrSchedule> schedules) {
        return new LrSchedule(withHandles(schedules, Native::lrChained));
    }

    /**
     * The schedule of the {@code "scheduler"} of a DeepSpeed configuration, for trainers without an {@link Engine}.
     *
     * @param config the text of a {@code ds_config}: JSON, comments and trailing commas allowed
     * @return the schedule
     * @throws TesseraInvalidArgumentException if the configuration is malformed, or has no {@code "scheduler"}; the message
     *     has the key, its line, its value and what to do
     * @throws TesseraException with {@link ErrorCode#UNSUPPORTED} for a type of schedule that this library does not have
     */
    public static LrSchedule fromConfig(String config) {
        return new LrSchedule(Native.engineConfigSchedule(Native.utf8(config, "config")));
    }

    /**
     * As {@link #fromConfig(String)}.
     *
     * @param config a file; its path has no brace
     * @return the schedule
     * @throws TesseraException with {@link ErrorCode#NOT_FOUND} or {@link ErrorCode#IO} if the file cannot be read
     */
    public static LrSchedule fromConfig(Path config) {
        return new LrSchedule(Native.engineConfigSchedule(Engine.pathOf(config)));
    }

    private interface Call {
        long of(long[] handles);
    }

    private static long withHandles(List<LrSchedule> schedules, Call call) {
        final List<Ref> held = new ArrayList<>();
        try {
            for (LrSchedule each : Objects.requireNonNull(schedules, "schedules")) {
                Objects.requireNonNull(each, "schedule " + held.size()).ref.retain();
                held.add(each.ref);
            }
            return call.of(held.stream().mapToLong(ref -> ref.callRetained(h -> h)).toArray());
        } finally {
            held.forEach(Ref::release);
        }
    }

    /**
     * The learning rate of a step. It depends on nothing else and changes nothing.
     *
     * @param step from 0
     * @param baseLr finite, not negative; some kinds ignore it
     * @return the rate
     * @throws TesseraInvalidArgumentException if an argument is invalid, or the rate is not finite at this step
     */
    public double lrAt(long step, double baseLr) {
        return ref.call(h -> Native.lrScheduleLrAt(h, step, baseLr));
    }

    /**
     * The momentum of a step: that of SGD, or the first beta of Adam and AdamW.
     *
     * @param step from 0
     * @return the momentum, or empty if the schedule leaves it unchanged
     */
    public OptionalDouble momentumAt(long step) {
        final double momentum = ref.call(h -> Native.lrScheduleMomentumAt(h, step));
        return Double.isNaN(momentum) ? OptionalDouble.empty() : OptionalDouble.of(momentum);
    }

    /**
     * Set an optimizer from now on: its learning rate, whose value so far becomes its base rate, and its momentum if
     * the schedule has one. Attach it before a checkpoint is loaded. It may be closed before the schedule.
     *
     * @param optimizer not kept reachable
     * @throws TesseraInvalidStateException if it is attached already
     * @throws TesseraInvalidArgumentException if it has no momentum, but the schedule sets one
     */
    public void attach(Optimizer optimizer) {
        Objects.requireNonNull(optimizer, "optimizer");
        ref.runExclusive(h -> optimizer.ref.runExclusive(o -> Native.lrScheduleAttach(h, o)));
    }

    /** Move on to the next step and set the attached optimizers. Call it after their step, if it was not skipped. */
    public void step() {
        ref.runExclusive(Native::lrScheduleStep);
    }

    /**
     * Number of steps made, including those before a loaded checkpoint.
     *
     * @return the step that the optimizers are set for
     */
    public long steps() {
        return ref.callLong(Native::lrScheduleSteps);
    }

    /**
     * Go to a step and set the attached optimizers.
     *
     * @param steps not negative
     */
    public void setSteps(long steps) {
        ref.runExclusive(h -> Native.lrScheduleSetSteps(h, steps));
    }

    @Override
    public String toString() {
        return "LrSchedule(" + (isClosed() ? "closed" : "steps " + steps()) + ")";
    }
}
