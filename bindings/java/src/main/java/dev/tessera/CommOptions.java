package dev.tessera;

/** Options of a {@link Comm}. Options that are not set have the library's defaults. */
public final class CommOptions extends CommOptionsFields<CommOptions> {
    /** All defaults. */
    public CommOptions() {}
}
