package dev.tessera;

import java.time.Duration;
import java.util.Objects;

/** How {@link Checkpoint#export} writes. What is not set has the library's default: all tensors, in one safetensors file. */
public final class ExportOptions {
    String format;
    long maxFileBytes;
    String under;
    int timeoutMs;
    Progress progress;

    /** All defaults. */
    public ExportOptions() {}

    /**
     * The format; the default is "safetensors".
     *
     * @param name "safetensors": whole tensors as Hugging Face has them; "torch_dcp": what an unmodified PyTorch loads by
     *     torch.distributed.checkpoint; "torch_save": what it loads by torch.load(), one file model.pt;
     *     "npz": what numpy.load() loads, one file model.npz
     * @return this
     */
    public ExportOptions format(String name) {
        format = Objects.requireNonNull(name, "format");
        return this;
    }

    /**
     * Of safetensors: cut into files of about this size, with an index; the default is 0, one file.
     *
     * @param bytes of data in a file; 0: one file
     * @return this
     */
    public ExportOptions maxFileBytes(long bytes) {
        maxFileBytes = bytes;
        return this;
    }

    /**
     * Only what has a name that begins so, and without it; by default all.
     *
     * @param begin such as "model."
     * @return this
     */
    public ExportOptions under(String begin) {
        under = Objects.requireNonNull(begin, "under");
        return this;
    }

    /**
     * Deadline of each wait for the other ranks; the default is 600 s, or the environment's TESSERA_TIMEOUT_MS.
     *
     * @param timeout rounded up to milliseconds
     * @return this
     */
    public ExportOptions timeout(Duration timeout) {
        timeoutMs = Native.millis(timeout, "timeout");
        return this;
    }

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
