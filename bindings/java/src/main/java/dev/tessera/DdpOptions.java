package dev.tessera;

/** Options of {@link Ddp}. Options that are not set have the library's defaults. */
public final class DdpOptions extends DdpOptionsFields<DdpOptions> {
    /** How a bucket is reduced; {@link Ddp#setHook} sets a custom hook. The ordinals are the library's numbers. */
    public enum Hook {
        /** An all-reduce. */
        ALL_REDUCE,
        /** Products of low rank stand for matrices, with error feedback. */
        POWER_SGD,
        /** Nothing: each rank keeps its own gradients. */
        NOOP
    }

    /** Whether ranks may have different numbers of steps, and what sums are divided by once some ranks have joined. */
    public enum Join {
        /** All ranks make the same number of steps. */
        OFF,
        /** By the number of ranks. */
        DIVIDE_BY_WORLD,
        /** By the number of ranks that have not joined. */
        DIVIDE_BY_ACTIVE
    }

    /** All defaults. */
    public DdpOptions() {}
}
