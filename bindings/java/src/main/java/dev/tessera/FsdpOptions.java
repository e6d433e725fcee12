package dev.tessera;

/** Options of {@link Fsdp}, the same on every rank. What is not set has the library's default. */
public final class FsdpOptions extends FsdpOptionsFields<FsdpOptions> {
    /** All defaults. */
    public FsdpOptions() {}
}
