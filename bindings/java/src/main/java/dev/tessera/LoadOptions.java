package dev.tessera;

import java.util.ArrayList;
import java.util.List;

/** How a {@link Checkpoint} is loaded. Options that are not set have the library's defaults: strict and verified. */
public final class LoadOptions extends LoadOptionsFields<LoadOptions> {
    Progress progress;
    Comm comm;
    byte[][] only;
    final List<byte[]> rules = new ArrayList<>(); // a saved name, what it is here, and so on

    /** All defaults. */
    public LoadOptions() {}

    /**
     * Set a callback for progress, called on the thread that loads.
     *
     * @param told called with {@link Progress.Phase#READ}; null for none
     * @return this
     */
    public LoadOptions progress(Progress told) {
        progress = told;
        return this;
    }

    /**
     * The ranks that load together, which makes the load collective: each loads the same checkpoint with the same
     * {@link #verify}; states, layouts, names and allowances may differ. Ranks of a host then read data that several of
     * them need once (from 8 MiB on) and share it through shared memory. All ranks get the same error. The deadline of
     * each wait is the communicator's timeout.
     *
     * @param ranks in exclusive use during the load; null, the default: each loads on its own
     * @return this
     */
    public LoadOptions comm(Comm ranks) {
        comm = ranks;
        return this;
    }

    /**
     * Load only these names of the state, or patterns: {@code *} matches any characters including dots, {@code ?}
     * matches one, {@code [a-c]} and {@code [!a-c]} match one of a set. All other names, of the state and of the
     * checkpoint, are ignored: neither loaded nor missing nor unexpected. The default is all names; a pattern that
     * matches no name of the state makes the load fail.
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
     * Map a name of the checkpoint to a name of the state; a name that ends with {@code .} or is empty replaces a
     * prefix. Further calls add rules; the first that matches applies. For a value of one rank, the name is the one
     * without {@code rank/<r>/}.
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
