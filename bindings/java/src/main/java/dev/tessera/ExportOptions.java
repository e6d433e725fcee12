package dev.tessera;

/** How {@link Checkpoint#export} writes. What is not set has the library's default: all tensors, in one safetensors file. */
public final class ExportOptions extends ExportOptionsFields<ExportOptions> {
    Progress progress;

    /** All defaults. */
    public ExportOptions() {}

    /**
     * Who is told how far it is.
     *
     * @param told called with {@link Progress.Phase#WRITE} on the thread of the call; null: nobody
     * @return this
     */
    public ExportOptions progress(Progress told) {
        progress = told;
        return this;
    }
}
