package dev.tessera;

import java.lang.ref.Reference;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Objects;

/**
 * A committed checkpoint, opened for reading. Opening one needs no job, whatever the number of ranks that saved it. All
 * methods may be called from any thread.
 */
public final class Checkpoint extends NativeObject {
    private Checkpoint(long handle) {
        super(new Ref("Checkpoint", handle, Native::checkpointDestroy));
    }

    /** Name, dtype and global shape of a tensor in a checkpoint. */
    public static final class Entry {
        private final String name;
        private final DType dtype;
        private final long[] shape;

        Entry(String name, long[] words) {
            this.name = name;
            dtype = DType.of(words[0]);
            shape = Arrays.copyOfRange(words, 1, words.length);
        }

        /**
         * The name.
         *
         * @return "model.fc1.weight"
         */
        public String name() {
            return name;
        }

        /**
         * The element type.
         *
         * @return the dtype
         */
        public DType dtype() {
            return dtype;
        }

        /**
         * The shape of the complete tensor.
         *
         * @return a copy
         */
        public long[] shape() {
            return shape.clone();
        }

        /** Name, dtype and shape. */
        @Override
        public String toString() {
            return name + " " + dtype + Arrays.toString(shape);
        }
    }

    /** What {@link #verify} reads. */
    public enum Verify {
        /** Sizes and headers. */
        HEADERS,
        /** Every byte. */
        FULL
    }

    /**
     * Open a checkpoint.
     *
     * @param path its directory; a root, or a root's "latest", for the newest checkpoint; a root's "best" for the best
     *     by {@link Saver.Builder#bestMetric}; a directory of torch.distributed.checkpoint; a file of torch.save (or
     *     the directory of a model.pt); safetensors in the layout of Hugging Face; or a directory that DeepSpeed's
     *     engine wrote. No saver removes a Tessera checkpoint while it is open
     * @return the checkpoint
     * @throws TesseraNotFoundException if there is no manifest, so this is not a committed checkpoint
     * @throws TesseraCorruptException if the manifest is damaged
     */
    public static Checkpoint open(Path path) {
        return new Checkpoint(Native.checkpointOpen(Native.utf8(path.toString(), "path")));
    }

    /**
     * Open a checkpoint in a storage.
     *
     * @param storage kept until the checkpoint is closed
     * @param key like the path of {@link #open(Path)}
     * @return the checkpoint
     * @throws TesseraNotFoundException if there is no manifest, so this is not a committed checkpoint
     * @throws TesseraCorruptException if the manifest is damaged
     */
    public static Checkpoint open(Storage storage, String key) {
        final byte[] path = Native.utf8(key, "key");
        return new Checkpoint(StorageCalls.with(storage, place -> Native.checkpointOpenWith(path, place)));
    }

    /**
     * The directory that was opened.
     *
     * @return its path
     */
    public Path path() {
        final String text = ref.call(h -> Native.text(Native.checkpointPath(h)));
        return Path.of(text);
    }

    /**
     * The manifest, as in the file.
     *
     * @return JSON
     */
    public String manifest() {
        return ref.call(h -> Native.text(Native.checkpointManifest(h)));
    }

    /**
     * The step it was saved at.
     *
     * @return steps completed
     */
    public long step() {
        return ref.callLong(Native::checkpointStep);
    }

    /**
     * Its tensors, including aliases.
     *
     * @return sorted by name
     */
    public List<Entry> tensors() {
        return ref.call(h -> {
            final List<Entry> entries = new ArrayList<>();
            final long count = Native.checkpointTensorCount(h);
            for (long i = 0; i < count; ++i) {
                entries.add(new Entry(
                        Native.text(Native.checkpointTensorName(h, i)), Native.checkpointTensorShape(h, i)));
            }
            return Collections.unmodifiableList(entries);
        });
    }

    /**
     * Read a complete tensor, whichever ranks wrote it, and verify its checksums.
     *
     * @param name of the tensor
     * @return in its own memory
     * @throws TesseraNotFoundException if the tensor does not exist
     * @throws TesseraCorruptException if a checksum fails
     */
    public Tensor read(String name) {
        for (Entry entry : tensors()) {
            if (entry.name.equals(name)) {
                final Tensor tensor = Tensor.zeros(entry.dtype, entry.shape);
                read(name, tensor);
                return tensor;
            }
        }
        // The library's own words for a name that is not there.
        read(name, Tensor.zeros(DType.U8, 0));
        throw new IllegalStateException("the library lists no tensor \"" + name + "\"");
    }

    /**
     * Read a complete tensor in place, like {@link #read(String)}.
     *
     * @param name of the tensor
     * @param tensor of its dtype and shape
     * @throws TesseraMismatchException if dtype or shape differ
     */
    public void read(String name, Tensor tensor) {
        final byte[] text = Native.utf8(name, "name");
        final long[] descriptor = tensor.descriptor();
        try {
            ref.run(h -> Native.checkpointRead(h, text, descriptor));
        } finally {
            Reference.reachabilityFence(tensor);
        }
    }

    /**
     * Load this rank's part into {@code state}, strictly.
     *
     * @param state in exclusive use during the call
     * @return whether it was verified
     * @throws TesseraMismatchException if names, dtypes or shapes differ; the message lists all differences, and
     *     nothing was overwritten
     * @throws TesseraCorruptException if a checksum fails; parts of the state may have been overwritten
     */
    public LoadReport load(State state) {
        return load(state, new LoadOptions());
    }

    /**
     * Load this rank's part into {@code state}, in place, from a save of any world size and layout. Collective if the
     * options have a {@link LoadOptions#comm communicator}.
     *
     * @param state in exclusive use during the call
     * @param options which names to load, what may differ, and which ranks load together
     * @return how the load deviated from a strict one
     * @throws TesseraMismatchException if names, dtypes or shapes differ; the message lists all differences, and
     *     nothing was overwritten. With a communicator also: the ranks load different checkpoints, or one makes a
     *     different call
     * @throws TesseraInvalidArgumentException if {@link LoadOptions#rename} maps two names to the same one; the message
     *     names them
     * @throws TesseraCorruptException if a checksum fails; parts of the state may have been overwritten
     * @throws TesseraTimeoutException if a rank of the communicator did not arrive; the message names it
     */
    public LoadReport load(State state, LoadOptions options) {
        final ProgressRelay told = ProgressRelay.of(options.progress);
        final Comm comm = options.comm;
        final byte[] report = comm == null
                ? ref.call(h -> load(h, state, options, told, 0))
                : ref.call(h -> comm.ref.callExclusive(c -> load(h, state, options, told, c)));
        ProgressRelay.settle(told);
        return LoadReport.of(Native.text(report));
    }

    private static byte[] load(long handle, State state, LoadOptions options, ProgressRelay told, long comm) {
        return state.use(s -> Native.checkpointLoad(handle, s, options, told, comm, options.only,
                options.rules.toArray(new byte[0][])));
    }

    /**
     * Verify the checkpoint without loading it.
     *
     * @param how much to read
     * @throws TesseraCorruptException naming file and offset; causes list the others
     */
    public void verify(Verify how) {
        final boolean full = Objects.requireNonNull(how, "how") == Verify.FULL;
        ref.run(h -> Native.checkpointVerify(h, full));
    }

    /**
     * Verify the checkpoint like {@link #verify(Verify)}, and report progress.
     *
     * @param how much to read
     * @param progress called with {@link Progress.Phase#VERIFY} on this thread
     * @throws TesseraCorruptException naming file and offset; causes list the others
     */
    public void verify(Verify how, Progress progress) {
        final boolean full = Objects.requireNonNull(how, "how") == Verify.FULL;
        final ProgressRelay told = ProgressRelay.of(Objects.requireNonNull(progress, "progress"));
        ref.run(h -> Native.checkpointVerifyProgress(h, full, told));
        ProgressRelay.settle(told);
    }

    /**
     * Write the tensors into a new directory in another format, in bounded memory, by this process alone. Parts that
     * cannot be read ({@code unreadable} in the manifest) are skipped, with a warning in the log.
     *
     * @param directory must not exist; it appears once everything is durable
     * @param options format, size of files
     */
    public void export(Path directory, ExportOptions options) {
        export(null, directory, options);
    }

    /**
     * Write the tensors into a new directory in another format, in bounded memory. Collective: all ranks write. Parts
     * that cannot be read ({@code unreadable} in the manifest) are skipped, with a warning in the log.
     *
     * @param comm the ranks, each of which has opened the same checkpoint; null for this process alone
     * @param directory must not exist; the same on every rank, on a shared file system
     * @param options the same on every rank
     * @throws TesseraMismatchException if the ranks differ in what they export
     */
    public void export(Comm comm, Path directory, ExportOptions options) {
        final byte[] path = Native.utf8(directory.toString(), "directory");
        final ProgressRelay told = ProgressRelay.of(options.progress);
        if (comm == null) {
            ref.run(h -> Native.checkpointExport(
                    h, 0, path, options, told));
        } else {
            ref.run(h -> comm.ref.runExclusive(c -> Native.checkpointExport(
                    h, c, path, options, told)));
        }
        ProgressRelay.settle(told);
    }
}
