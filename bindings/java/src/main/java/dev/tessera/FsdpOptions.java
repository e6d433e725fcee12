package dev.tessera;

/** Options of {@link Fsdp}, the same on every rank. Options that are not set have the library's defaults. */
public final class FsdpOptions extends FsdpOptionsFields<FsdpOptions> {
    /** All defaults. */
    public FsdpOptions() {}
}
