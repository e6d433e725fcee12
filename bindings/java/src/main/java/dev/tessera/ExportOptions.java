package dev.tessera;

/**
 * How {@link Checkpoint#export} writes. Options that are not set have the library's defaults: all tensors, in one
 * safetensors file.
 */
public final class ExportOptions extends ExportOptionsFields<ExportOptions> {
    Progress progress;

    /** All defaults. */
    public ExportOptions() {}

    /**
     * Set a callback for progress.
     *
     * @param told called with {@link Progress.Phase#WRITE} on the thread of the call; null for none
     * @return this
     */
    public ExportOptions progress(Progress told) {
        progress = told;
        return this;
    }
}
