package dev.tessera;

/** Options of a {@link Store} and a {@link StoreServer}. Options that are not set have the library's defaults. */
public final class StoreOptions extends StoreOptionsFields<StoreOptions> {
    /** All defaults. */
    public StoreOptions() {}
}
