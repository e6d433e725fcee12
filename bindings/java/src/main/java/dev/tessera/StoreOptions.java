package dev.tessera;

/** Options of a {@link Store} and a {@link StoreServer}. What is not set has the library's default. */
public final class StoreOptions extends StoreOptionsFields<StoreOptions> {
    /** All defaults. */
    public StoreOptions() {}
}
