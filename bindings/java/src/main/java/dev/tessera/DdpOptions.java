package dev.tessera;

/** Options of {@link Ddp}. What is not set has the library's default. */
public final class DdpOptions extends DdpOptionsFields<DdpOptions> {
    /** What reduces a bucket; {@link Ddp#setHook} brings one's own. The ordinals are the library's numbers. */
    public enum Hook {
        /** An all-reduce. */
        ALL_REDUCE,
        /** Products of low rank stand for matrices, with error feedback. */
        POWER_SGD,
        /** Nothing: each rank keeps its own gradients. */
        NOOP
    }

    /** Whether ranks may have different numbers of steps, and by what their sum is divided when some have joined. */
    public enum Join {
        /** All ranks make equally many steps. */
        OFF,
        /** By the number of ranks. */
        DIVIDE_BY_WORLD,
        /** By the number of ranks that have not joined. */
        DIVIDE_BY_ACTIVE
    }

    /** All defaults. */
    public DdpOptions() {}
}
