package dev.tessera;

/** Options of a {@link Comm}. What is not set has the library's default. */
public final class CommOptions extends CommOptionsFields<CommOptions> {
    /** All defaults. */
    public CommOptions() {}
}
