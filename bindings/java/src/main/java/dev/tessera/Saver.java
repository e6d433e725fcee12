package dev.tessera;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Objects;
import java.util.Set;
import java.util.WeakHashMap;
import java.util.concurrent.CompletableFuture;
import java.util.function.LongUnaryOperator;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * Writes checkpoints under one root directory, which one live job at a time may own. A checkpoint exists when its manifest
 * is durable; until then the one before it is untouched. All methods are exclusive and, but {@link #await}, collective.
 * A JVM that ends waits for saves in flight, each at most its deadline; one that is halted waits for those that need nothing
 * of it any more (progress, a storage, a log handler), and one that is killed loses them.
 */
public final class Saver extends NativeObject {
    /** Savers that the end of the JVM waits for. */
    private static final Set<Ref> OPEN = Collections.synchronizedSet(Collections.newSetFromMap(new WeakHashMap<>()));

    static {
        try {
            Runtime.getRuntime().addShutdownHook(new Thread(Saver::finishAll, "tessera-savers"));
        } catch (IllegalStateException endsAlready) {
            System.getLogger("dev.tessera").log(System.Logger.Level.DEBUG, "no save is waited for: the JVM ends already");
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
        /** Waits until it is done. */
        WAIT,
        /** Throws a {@link TesseraException} with {@link ErrorCode#NOT_READY}. */
        REFUSE,
        /** Queues behind it; a save that is queued and has not begun gives way, and ends with ABORTED. */
        REPLACE
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

    /**
     * Settings of a saver; what is not set has the library's default. What stays under the root is the union of
     * {@link #keepLatest}, {@link #keepBest} and {@link #keepEvery}; the newest save, the best one and what is open for
     * reading always stay.
     */
    public static final class Builder {
        private final Comm comm;
        private final Path root;
        private int given; // bit i: numbers[i] was set; in the order of saver_create in checkpoint.cc
        private final long[] numbers = new long[11];
        private String bestMetric;
        private Progress progress;
        private String format = "tessera";
        private Storage storage;
        private String version = System.getProperty("java.version", "");

        private Builder(Comm comm, Path root) {
            this.comm = comm;
            this.root = Objects.requireNonNull(root, "root");
        }

        /**
         * How many of the newest checkpoints to keep; the default is 0, all, whatever else is said.
         *
         * @param count not negative
         * @return this
         */
        public Builder keepLatest(int count) {
            return set(0, count);
        }

        /**
         * Deadline of the votes; the default is 600 s, or the environment's TESSERA_TIMEOUT_MS.
         *
         * @param timeout rounded up to milliseconds
         * @return this
         */
        public Builder timeout(Duration timeout) {
            return set(1, Native.millis(timeout, "timeout"));
        }

        /**
         * The metric of rank 0's saves ({@link State#metric}) by which they are compared, lower is better, as of a loss; the
         * best save is opened by the path "best" in the root.
         *
         * @param name of the metric
         * @return this
         */
        public Builder bestMetric(String name) {
            bestMetric = Objects.requireNonNull(name, "bestMetric");
            return this;
        }

        /**
         * Whether a higher {@link #bestMetric} is better, as of an accuracy.
         *
         * @param higher the default is false
         * @return this
         */
        public Builder bestIsHigher(boolean higher) {
            return set(2, higher ? 1 : 0);
        }

        /**
         * How many of the best checkpoints to keep; needs {@link #bestMetric} and {@link #keepLatest}.
         *
         * @param count not negative; the default is 0
         * @return this
         */
        public Builder keepBest(int count) {
            return set(3, count);
        }

        /**
         * Keep for ever the steps that are multiples of {@code steps}; needs {@link #keepLatest}.
         *
         * @param steps not negative; the default is 0, none
         * @return this
         */
        public Builder keepEvery(long steps) {
            return set(4, steps);
        }

        /**
         * What {@link Saver#saveAsync} does while another save is in flight; the same on every rank.
         *
         * @param what the default is WAIT
         * @return this
         */
        public Builder whenBusy(WhenBusy what) {
            return set(5, what.ordinal());
        }

        /**
         * Whether saves in the background yield CPU and disk to the trainer.
         *
         * @param low the default is false
         * @return this
         */
        public Builder lowPriority(boolean low) {
            return set(6, low ? 1 : 0);
        }

        /**
         * Bound of the memory for copies of the state on this rank. For a larger state, or one larger than this rank's share
         * of the memory that is free, {@link Saver#saveAsync} writes a part before it returns.
         *
         * @param bytes at least 8 MiB; the default is 0, what the state needs
         * @return this
         */
        public Builder stagingBytes(long bytes) {
            return set(7, bytes);
        }

        /**
         * Limit of this rank's writing.
         *
         * @param bytes a second; the default is 0, no limit
         * @return this
         */
        public Builder writeBytesPerSecond(long bytes) {
            return set(8, bytes);
        }

        /**
         * Whether what an optimizer of the state updates, its parameters and moments, is copied after
         * {@link Saver#saveAsync} has returned: by the saver's threads, or just before the optimizer's next step, its close
         * or a load into the state needs the memory. Nobody else may write there from the call to the end of that step, or
         * until {@link Save#staged}: neither the trainer, nor a load of another state or a collective into the same memory.
         * If the state is larger than {@link #stagingBytes}, or than what is free, all is copied at once.
         *
         * @param late the default is false
         * @return this
         */
        public Builder copyOnDemand(boolean late) {
            return set(9, late ? 1 : 0);
        }

        /**
         * Whether a save compares what several ranks hold, tensors, shards and values, byte by byte (-0.0 is not 0.0), and is
         * a {@link TesseraMismatchException} that names the first that differs and the ranks; the same on every rank. Each
         * rank reads all that is replicated. Else large replicas are written in parts by several ranks, and have to be
         * equal; values are rank 0's.
         *
         * @param check the default is false
         * @return this
         */
        public Builder checkReplicas(boolean check) {
            return set(10, check ? 1 : 0);
        }

        /**
         * Tell how far each save and {@link Saver#resume} is.
         *
         * @param told called on the thread of the call, and of saves in the background on a thread of the library
         * @return this
         */
        public Builder progress(Progress told) {
            progress = Objects.requireNonNull(told, "progress");
            return this;
        }

        private Builder set(int field, long value) {
            numbers[field] = value;
            given |= 1 << field;
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
         * Save into a storage, where the root is a key, in place of a directory of this machine.
         *
         * @param place kept until the saver is closed
         * @return this
         */
        public Builder storage(Storage place) {
            storage = Objects.requireNonNull(place, "storage");
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
         * @throws TesseraInvalidStateException if another live job saves there; names its host and pid, and says when
         *     its lease lapses if its process cannot be seen
         */
        public Saver open() {
            final byte[] path = Native.utf8(root.toString(), "root");
            final byte[] text = Native.utf8(version, "version");
            final byte[] form = Native.utf8(format, "format");
            final byte[] metric = Native.optionalUtf8(bestMetric, "bestMetric");
            final ProgressRelay told = ProgressRelay.of(progress);
            final long kept = Native.progressKeep(told);
            try {
                final long[] values = numbers.clone();
                final LongUnaryOperator open = place -> {
                    final LongUnaryOperator create =
                            c -> Native.saverCreate(c, path, given, values, text, form, metric, kept, place);
                    return comm == null ? create.applyAsLong(0) : comm.ref.callLongExclusive(create);
                };
                final long handle = storage == null ? open.applyAsLong(0) : StorageCalls.with(storage, open);
                return new Saver(handle, root, told, kept, storage);
            } catch (Throwable failed) {
                Native.progressDrop(kept);
                throw failed;
            }
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
         * The fence before that one: complete when nothing of the state is left to copy, so that anybody may write there.
         * Without {@link Builder#copyOnDemand} that is so when {@link Saver#saveAsync} returns.
         *
         * @return completes on the common pool, of a save that fails earlier with its {@link TesseraException}
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
         * @return to be closed by the caller
         * @throws TesseraNotFoundException if retention has deleted it meanwhile
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
     * Copy the state, return, and save the copy in the background. What happens while another save is in flight
     * {@link Builder#whenBusy} says. An error that nobody has looked at comes up in the next {@link #saveAsync}, which then
     * saves nothing, {@link #await} or {@link #close}.
     *
     * @param step as {@link #save}
     * @param state free for the trainer again when this returns; with {@link Builder#copyOnDemand} what an optimizer owns is
     *     the optimizer's alone until its next step, or until {@link Save#staged}
     * @return completes on the common pool when the checkpoint is committed on every rank, or with a
     *     {@link TesseraException}; {@link Save#staged} when nothing of the state is left to copy
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
     * Wait for the saves in flight, if there are any.
     *
     * @throws TesseraException the first error, once
     */
    public void await() {
        ref.runExclusive(Native::saverWait);
        ProgressRelay.settle(progress);
    }

    /**
     * Whether all ranks shall save now and stop, as {@link #shouldStop(long, boolean)} of what the launcher says.
     *
     * @param step the same on every rank
     * @return true on every rank from the same step on
     * @throws TesseraMismatchException if the ranks are at different steps
     */
    public boolean shouldStop(long step) {
        return shouldStop(step, false);
    }

    /**
     * Whether all ranks shall save now and stop. Call it on every rank at each step: as soon as one rank was told to stop, by
     * the launcher ({@link Launch#preemptRequested}) or by {@code told}, all get true at the same step, and from then on. It
     * costs one small all-reduce.
     *
     * @param step the same on every rank
     * @param told this rank was told to stop in another way than by the launcher
     * @return true on every rank from the same step on
     * @throws TesseraMismatchException if the ranks are at different steps
     */
    public boolean shouldStop(long step, boolean told) {
        return ref.callExclusive(h -> Native.saverShouldStop(h, step, told));
    }

    /** Free the staging memory that no save in flight uses; it is kept from save to save, since fresh memory is slow. */
    public void trim() {
        ref.runExclusive(Native::saverTrim);
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
        final long step = ref.callLongExclusive(h -> state.use(s -> Native.saverResume(h, s)));
        ProgressRelay.settle(progress);
        return step;
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
            ProgressRelay.settle(progress);
        } finally {
            super.close();
        }
    }
}
