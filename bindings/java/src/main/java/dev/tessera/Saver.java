package dev.tessera;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Objects;
import java.util.Set;
import java.util.WeakHashMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.LongUnaryOperator;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * Saves checkpoints under a root directory, which only one live job may own at a time. A checkpoint exists once its
 * manifest is durable; until then the previous one is untouched. All methods are exclusive and, except {@link #await},
 * collective. The JVM waits for saves in flight before it exits, each at most until its deadline. If it is halted, it
 * waits for those that no longer need it (for progress, a storage or a log handler); if it is killed, they are lost.
 */
public final class Saver extends NativeObject {
    /** Savers that the JVM waits for before it exits. */
    private static final Set<Ref> OPEN = Collections.synchronizedSet(Collections.newSetFromMap(new WeakHashMap<>()));

    static {
        try {
            Runtime.getRuntime().addShutdownHook(new Thread(Saver::finishAll, "tessera-savers"));
        } catch (IllegalStateException endsAlready) {
            System.getLogger("dev.tessera").log(System.Logger.Level.DEBUG, "cannot wait for saves: the JVM is shutting down");
        }
    }

    private final Path root;
    private final ProgressRelay progress; // null: nobody is told
    private final Storage storage; // null: a directory

    /** @param kept the native half's reference to {@code progress}; 0 if there is none */
    private Saver(long handle, Path root, ProgressRelay progress, long kept, Storage storage) {
        super(new Ref("Saver", handle, h -> destroy(h, kept)));
        this.root = root;
        this.progress = progress;
        this.storage = storage;
        OPEN.add(ref);
    }

    private static void finishAll() {
        final List<Ref> open;
        synchronized (OPEN) {
            open = new ArrayList<>(OPEN);
        }
        for (Ref saver : open) {
            try {
                saver.runExclusiveIfFree(Native::saverWait);
            } catch (RuntimeException failed) {
                continue; // a save has failed: the library's log tells how
            }
        }
    }

    private static void destroy(long handle, long kept) {
        Native.saverDestroy(handle);
        Native.progressDrop(kept); // no earlier: a save in flight was waited for, and told of its progress
    }

    /** What {@link #saveAsync} does while another save is in flight. */
    public enum WhenBusy {
        /** Wait until it is done. */
        WAIT,
        /** Throw a {@link TesseraException} with {@link ErrorCode#NOT_READY}. */
        REFUSE,
        /** Queue behind it, replacing a queued save that has not begun, which ends with ABORTED. */
        REPLACE
    }

    /**
     * Start building a saver of the ranks of {@code comm}.
     *
     * @param comm the ranks, in exclusive use during {@link Builder#open}; null for one rank
     * @param root a directory, the same on every rank; created if absent
     * @return a builder with the library's defaults
     */
    public static Builder at(Comm comm, Path root) {
        return new Builder(comm, root);
    }

    /**
     * Settings of a saver; options that are not set have the library's defaults. The checkpoints kept under the root
     * are the union of {@link #keepLatest}, {@link #keepBest} and {@link #keepEvery}; the newest, the best and any that
     * are open for reading are always kept.
     */
    public static final class Builder extends SaverOptionsFields<Builder> {
        private final Comm comm;
        private final Path root;
        private Progress progress;
        private Storage storage;
        private String version = System.getProperty("java.version", "");

        private Builder(Comm comm, Path root) {
            this.comm = comm;
            this.root = Objects.requireNonNull(root, "root");
        }

        /**
         * Set a callback for the progress of saves and {@link Saver#resume}.
         *
         * @param told called on the thread of the call, and for saves in the background on a thread of the library
         * @return this
         */
        public Builder progress(Progress told) {
            progress = Objects.requireNonNull(told, "progress");
            return this;
        }

        /**
         * Save into a storage, where the root is a key, instead of a local directory.
         *
         * @param place kept until the saver is closed
         * @return this
         */
        public Builder storage(Storage place) {
            storage = Objects.requireNonNull(place, "storage");
            return this;
        }

        /**
         * The writer's version in manifests; the default is the version of the JVM. The writer's language is "java".
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
         * @throws TesseraInvalidStateException if another live job saves there; the message names its host and pid,
         *     and, if its process cannot be seen, when its lease expires
         */
        public Saver open() {
            final ProgressRelay told = ProgressRelay.of(progress);
            final long kept = Native.progressKeep(told);
            try {
                final long handle = Comm.creating(comm, Creation.COMM, reached -> create(kept, reached));
                return new Saver(handle, root, told, kept, storage);
            } catch (Throwable failed) {
                Native.progressDrop(kept);
                throw failed;
            }
        }

        private long create(long kept, AtomicBoolean reached) {
            final byte[] path = Native.utf8(root.toString(), "root");
            final byte[] text = Native.utf8(version, "version");
            final LongUnaryOperator open = place -> {
                final LongUnaryOperator create = c -> {
                    reached.set(true);
                    return Native.saverCreate(c, path, this, text, kept, place);
                };
                return comm == null ? create.applyAsLong(0) : comm.ref.callLongExclusive(create);
            };
            return storage == null ? open.applyAsLong(0) : StorageCalls.with(storage, open);
        }
    }

    /** A save in the background: complete when the checkpoint is durable. */
    public static final class Save extends CompletableFuture<Commit> {
        private final CompletableFuture<Void> staged;

        private Save(CompletableFuture<Void> staged) {
            this.staged = staged;
        }

        private void end(Commit commit, Throwable failed) {
            if (failed == null) {
                complete(commit);
            } else {
                completeExceptionally(failed);
            }
        }

        /**
         * Complete when the whole state is copied, so that it may be written again. Without {@link
         * Builder#copyOnDemand} that is when {@link Saver#saveAsync} returns.
         *
         * @return completes on the common pool, with the {@link TesseraException} of a save that fails earlier
         */
        public CompletableFuture<Void> staged() {
            return staged;
        }
    }

    /** A checkpoint that a save has committed. */
    public static final class Commit {
        private final Path root;
        private final long step;
        private final Storage storage;

        private Commit(Path root, long step, Storage storage) {
            this.root = root;
            this.step = step;
            this.storage = storage;
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
         * @return the checkpoint, to be closed by the caller
         * @throws TesseraNotFoundException if retention has deleted it in the meantime
         */
        public Checkpoint open() {
            final Checkpoint newest = openAt(root);
            if (newest.step() == step) {
                return newest;
            }
            newest.close();
            final String begin = String.format("step-%08d-", step);
            for (String name : names()) {
                if (name.startsWith(begin)) {
                    try {
                        return openAt(root.resolve(name));
                    } catch (TesseraNotFoundException cutShort) {
                        continue;
                    }
                }
            }
            return openAt(root.resolve(String.format("step-%08d", step))); // throws: it is no longer there
        }

        private Checkpoint openAt(Path path) {
            return storage == null ? Checkpoint.open(path) : Checkpoint.open(storage, path.toString());
        }

        private List<String> names() {
            try {
                if (storage != null) {
                    return storage.list(root.toString().replaceFirst("^/+", ""));
                }
                try (Stream<Path> found = Files.list(root)) {
                    return found.map(path -> path.getFileName().toString()).collect(Collectors.toList());
                }
            } catch (IOException error) {
                throw new java.io.UncheckedIOException(error);
            } catch (RuntimeException error) {
                throw error;
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
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
        ref.runExclusive(h -> state.use(s -> {
            Native.saverSave(h, step, s);
            return null;
        }));
        ProgressRelay.settle(progress);
        return new Commit(root, step, storage);
    }

    /**
     * Copy the state, return, and save the copy in the background. {@link Builder#whenBusy} decides what happens while
     * another save is in flight. An error that was not thrown yet is thrown by the next {@link #saveAsync}, which then
     * saves nothing, {@link #await} or {@link #close}.
     *
     * @param step as for {@link #save}
     * @param state may be changed again when this returns; with {@link Builder#copyOnDemand} only the optimizer may
     *     change what it owns, until its next step or {@link Save#staged}
     * @return completes on the common pool when the checkpoint is committed on every rank, or with a {@link
     *     TesseraException}; {@link Save#staged} when the whole state is copied
     */
    public Save saveAsync(long step, State state) {
        final Work work = ref.callExclusive(
                h -> new Work(state.use(s -> Native.saverSaveAsync(h, step, s)), this));
        final Save save = new Save(new Work(work.ref.callLong(Native::workStaged), null).toFuture());
        ProgressRelay.settle(progress);
        work.toFuture().thenApply(nothing -> new Commit(root, step, storage)).whenComplete(save::end);
        return save;
    }

    /**
     * Wait for the saves in flight, if any.
     *
     * @throws TesseraException the first error, once
     */
    public void await() {
        ref.runExclusive(Native::saverWait);
        ProgressRelay.settle(progress);
    }

    /**
     * Whether all ranks should save now and stop, like {@link #shouldStop(long, boolean)} with only the launcher's
     * request.
     *
     * @param step the same on every rank
     * @return true on every rank from the same step on
     * @throws TesseraMismatchException if the ranks are at different steps
     */
    public boolean shouldStop(long step) {
        return shouldStop(step, false);
    }

    /**
     * Whether all ranks should save now and stop. Call it on every rank at each step: once one rank was asked to stop,
     * by the launcher ({@link Launch#preemptRequested}) or by {@code told}, all ranks get true at the same step and
     * from then on. Costs one small all-reduce.
     *
     * @param step the same on every rank
     * @param told whether this rank was asked to stop by something other than the launcher
     * @return true on every rank from the same step on
     * @throws TesseraMismatchException if the ranks are at different steps
     */
    public boolean shouldStop(long step, boolean told) {
        return ref.callExclusive(h -> Native.saverShouldStop(h, step, told));
    }

    /** Free the staging memory that no save in flight uses; it is kept between saves because new memory is slow. */
    public void trim() {
        ref.runExclusive(Native::saverTrim);
    }

    /**
     * Load the newest committed checkpoint of the root into {@code state}, strictly. Loads nothing if there is none.
     *
     * @param state in exclusive use during the call
     * @return its step, or 0
     * @throws TesseraMismatchException if names, dtypes or shapes differ; the message lists all differences
     * @throws TesseraCorruptException if a checksum fails
     */
    public long resume(State state) {
        final long step = ref.callLongExclusive(h -> state.use(s -> Native.saverResume(h, s)));
        ProgressRelay.settle(progress);
        return step;
    }

    /**
     * Wait for the save in flight and release the root.
     *
     * @throws TesseraException the error of the last asynchronous save, unless {@link #await} or {@link #saveAsync} has
     *     thrown it; the saver is closed in any case
     */
    @Override
    public void close() {
        try {
            ref.runExclusiveIfFree(Native::saverWait);
            ProgressRelay.settle(progress);
        } finally {
            super.close();
        }
    }
}
