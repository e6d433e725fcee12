package dev.tessera;

import java.io.IOException;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;

/**
 * Writes checkpoints under one root directory, which one live job at a time may own. A checkpoint exists when its manifest
 * is durable; until then the one before it is untouched. All methods are exclusive and, but {@link #await}, collective.
 */
public final class Saver extends NativeObject {
    private final Path root;

    private Saver(long handle, Path root) {
        super(new Ref("Saver", handle, Native::saverDestroy));
        this.root = root;
    }

    /**
     * Begin a saver of the ranks of {@code comm}.
     *
     * @param comm the ranks, in exclusive use during {@link Builder#open}; null: one rank
     * @param root a directory, the same on every rank; created if absent
     * @return a builder with the library's defaults
     */
    public static Builder at(Comm comm, Path root) {
        return new Builder(comm, root);
    }

    /** Settings of a saver; what is not set has the library's default. */
    public static final class Builder {
        private final Comm comm;
        private final Path root;
        private int given;
        private int keepLatest;
        private int timeoutMs;
        private String format = "tessera";
        private String version = System.getProperty("java.version", "");

        private Builder(Comm comm, Path root) {
            this.comm = comm;
            this.root = Objects.requireNonNull(root, "root");
        }

        /**
         * How many of the newest checkpoints to keep; the default is 0, all.
         *
         * @param count not negative
         * @return this
         */
        public Builder keepLatest(int count) {
            keepLatest = count;
            given |= 1;
            return this;
        }

        /**
         * Deadline of the votes; the default is 600 s, or the environment's TESSERA_TIMEOUT_MS.
         *
         * @param timeout rounded up to milliseconds
         * @return this
         */
        public Builder timeout(Duration timeout) {
            timeoutMs = Native.millis(timeout, "timeout");
            given |= 2;
            return this;
        }

        /**
         * How saves are written: "tessera", or "torch_dcp", which an unmodified PyTorch loads by
         * torch.distributed.checkpoint. The default is "tessera".
         *
         * @param name of the format
         * @return this
         */
        public Builder format(String name) {
            format = Objects.requireNonNull(name, "format");
            return this;
        }

        /**
         * What stands in manifests as the writer's version; the default is that of the JVM. The writer's language is
         * "java".
         *
         * @param text any text
         * @return this
         */
        public Builder writerVersion(String text) {
            version = Objects.requireNonNull(text, "version");
            return this;
        }

        /**
         * Open the root. Collective.
         *
         * @return the saver
         * @throws TesseraInvalidStateException if another live job saves there; names its host and pid
         */
        public Saver open() {
            final byte[] path = Native.utf8(root.toString(), "root");
            final byte[] text = Native.utf8(version, "version");
            final byte[] form = Native.utf8(format, "format");
            if (comm == null) {
                return new Saver(Native.saverCreate(0, path, given, keepLatest, timeoutMs, text, form), root);
            }
            return new Saver(comm.ref.callLongExclusive(
                    c -> Native.saverCreate(c, path, given, keepLatest, timeoutMs, text, form)), root);
        }
    }

    /** A checkpoint that a save has committed. */
    public static final class Commit {
        private final Path root;
        private final long step;

        private Commit(Path root, long step) {
            this.root = root;
            this.step = step;
        }

        /**
         * The step it was saved at.
         *
         * @return steps completed
         */
        public long step() {
            return step;
        }

        /**
         * The saver's root directory.
         *
         * @return its path
         */
        public Path root() {
            return root;
        }

        /**
         * Open it for reading.
         *
         * @return to be closed by the caller
         * @throws TesseraNotFoundException if retention has deleted it meanwhile
         */
        public Checkpoint open() {
            final Checkpoint newest = Checkpoint.open(root);
            if (newest.step() == step) {
                return newest;
            }
            newest.close();
            try (DirectoryStream<Path> found = Files.newDirectoryStream(root, String.format("step-%08d-*", step))) {
                for (Path directory : found) {
                    if (Files.exists(directory.resolve("manifest.json"))) {
                        return Checkpoint.open(directory);
                    }
                }
            } catch (IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
            return Checkpoint.open(root.resolve(String.format("step-%08d", step))); // throws: it is no longer there
        }

        /** Step and root. */
        @Override
        public String toString() {
            return "Commit(step " + step + " in " + root + ")";
        }
    }

    /**
     * The root directory.
     *
     * @return its path
     */
    public Path root() {
        return root;
    }

    /**
     * Save, and return when the checkpoint is durable and committed on every rank.
     *
     * @param step steps completed, not negative, the same on every rank
     * @param state the same names, dtypes, shapes and layouts on every rank
     * @return the checkpoint
     * @throws TesseraMismatchException if states or steps differ between ranks
     * @throws TesseraIoException if a rank cannot write; all ranks get the same error
     */
    public Commit save(long step, State state) {
        ref.runExclusive(h -> state.ref.runExclusive(s -> Native.saverSave(h, step, s)));
        return new Commit(root, step);
    }

    /**
     * Copy the state, return, and save the copy in the background. A save still running is waited for first; its error is
     * thrown here. An error that nobody has looked at comes up in the next {@link #saveAsync}, {@link #await} or
     * {@link #close}.
     *
     * @param step as {@link #save}
     * @param state free for the trainer again when this returns
     * @return completes on the common pool when the checkpoint is committed on every rank, or with a
     *     {@link TesseraException}
     */
    public CompletableFuture<Commit> saveAsync(long step, State state) {
        final CompletableFuture<Void> done = ref.callExclusive(h -> {
            final long handle = state.ref.callLongExclusive(s -> Native.saverSaveAsync(h, step, s));
            return new Work(handle, this).toFuture();
        });
        return done.thenApply(nothing -> new Commit(root, step));
    }

    /**
     * Wait for the save in flight, if there is one.
     *
     * @throws TesseraException the save's error, once
     */
    public void await() {
        ref.runExclusive(Native::saverWait);
    }

    /**
     * Load the newest committed checkpoint of the root into {@code state}, strictly; nothing is loaded if there is none.
     *
     * @param state in exclusive use during the call
     * @return its step, or 0
     * @throws TesseraMismatchException if names, dtypes or shapes differ: lists all
     * @throws TesseraCorruptException if a checksum fails
     */
    public long resume(State state) {
        return ref.callLongExclusive(h -> state.ref.callLongExclusive(s -> Native.saverResume(h, s)));
    }

    /**
     * Wait for the save in flight and give the root free.
     *
     * @throws TesseraException the error of the last asynchronous save, unless {@link #await} or {@link #saveAsync} has thrown
     *     it; the saver is closed all the same
     */
    @Override
    public void close() {
        try {
            ref.runExclusiveIfFree(Native::saverWait);
        } finally {
            super.close();
        }
    }
}
