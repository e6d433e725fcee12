package dev.tessera;

import java.util.ArrayList;
import java.util.List;

/** How a {@link Checkpoint} is loaded. What is not set has the library's default: strict and verified. */
public final class LoadOptions extends LoadOptionsFields<LoadOptions> {
    Progress progress;
    Comm comm;
    byte[][] only;
    final List<byte[]> rules = new ArrayList<>(); // a saved name, what it is here, and so on

    /** All defaults. */
    public LoadOptions() {}

    /**
     * Tell how far the load is, on the thread that loads.
     *
     * @param told called with {@link Progress.Phase#READ}; null: nobody
     * @return this
     */
    public LoadOptions progress(Progress told) {
        progress = told;
        return this;
    }

    /**
     * The ranks that load together, which makes the load collective: each of them loads the same checkpoint with the same
     * {@link #verify}; states, layouts, names and what is allowed may differ. Ranks of one host then read each byte that several
     * of them want once (from 8 MiB on), and hand it on through shared memory. All get the same
     * error. The deadline of each wait is the communicator's timeout.
     *
     * @param ranks in exclusive use during the load; null, the default: each loads for itself
     * @return this
     */
    public LoadOptions comm(Comm ranks) {
        comm = ranks;
        return this;
    }

    /**
     * Load these names of the state alone, or patterns of them: {@code *} is any characters, dots too, {@code ?} one,
     * {@code [a-c]} and {@code [!a-c]} one of a set. All other names, of the state and of the checkpoint, are left alone:
     * neither loaded nor missing nor unexpected. The default is all names; one that no name of the state fits makes the load
     * fail.
     *
     * @param patterns at least one
     * @return this
     */
    public LoadOptions only(String... patterns) {
        final byte[][] texts = new byte[patterns.length][];
        for (int i = 0; i < patterns.length; ++i) {
            texts[i] = Native.utf8(patterns[i], "pattern");
        }
        only = texts;
        return this;
    }

    /**
     * What a name of the checkpoint is in the state; with a {@code .} at the end, or empty, what names begin with there and
     * here. Called again it adds a rule: the first that fits counts. Of a value of one rank it is about the name without
     * {@code rank/<r>/}.
     *
     * @param saved "model.encoder."
     * @param here "encoder."
     * @return this
     */
    public LoadOptions rename(String saved, String here) {
        final byte[] from = Native.utf8(saved, "saved");
        final byte[] to = Native.utf8(here, "here");
        rules.add(from);
        rules.add(to);
        return this;
    }
}
