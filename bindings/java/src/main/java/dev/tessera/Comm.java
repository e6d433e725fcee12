package dev.tessera;

import java.nio.file.Path;
import java.time.Duration;
import java.util.Objects;

/**
 * The ranks of a group: joining, splitting, parting; its collectives are those of {@link Collectives}. It is an object:
 * several may live in one JVM, also those of several ranks, one thread each.
 */
public final class Comm extends Collectives {
    private final int rank;
    private final int worldSize;
    private final Object parent; // keeps a store or mesh reachable

    private Comm(Ref ref, Object parent) {
        super(ref);
        this.parent = parent;
        rank = (int) ref.callLong(Native::commRank);
        worldSize = (int) ref.callLong(Native::commWorldSize);
    }

    private static Ref ref(long handle) {
        return new Ref("Comm", handle, Native::commDestroy)
                .wakenBy(h -> Native.commAbort(h, Native.utf8("closed while in use", "reason")));
    }

    /**
     * Join the job that the environment describes, with default options: {@code tessera run}, torchrun, mpirun or srun; with
     * none of them a communicator of one rank. Under a launcher, an exception that ends the calling thread is told to it from
     * now on; see {@link Launch#recordError(Throwable)}.
     *
     * @return the communicator
     * @throws TesseraTimeoutException if a rank never came
     * @throws TesseraPeerLostException if a rank of {@code tessera run} ended without coming
     * @throws TesseraPermissionException if the job token is missing or wrong
     */
    public static Comm fromEnv() {
        return fromEnv(new CommOptions());
    }

    /**
     * Join the job that the environment describes. Under a launcher, an exception that ends the calling thread is told to
     * it from now on; see {@link Launch#recordError(Throwable)}.
     *
     * @param options deadline, transport, name
     * @return the communicator
     * @throws TesseraTimeoutException if a rank never came
     * @throws TesseraPeerLostException if a rank of {@code tessera run} ended without coming
     * @throws TesseraPermissionException if the job token is missing or wrong
     */
    public static Comm fromEnv(CommOptions options) {
        Objects.requireNonNull(options, "options");
        Launch.recordUncaught(); // joining may fail
        return new Comm(ref(Native.commFromEnv(options)), null);
    }

    /**
     * Join {@code worldSize} ranks that use the same store, with default options.
     *
     * @param store stays open natively until the communicator is closed
     * @param rank 0 to worldSize - 1, each once
     * @param worldSize 1 to 4096
     * @return the communicator
     * @throws TesseraTimeoutException if a rank never came
     */
    public static Comm create(Store store, int rank, int worldSize) {
        return create(store, rank, worldSize, new CommOptions());
    }

    /**
     * Join {@code worldSize} ranks that use the same store.
     *
     * @param store stays open natively until the communicator is closed
     * @param rank 0 to worldSize - 1, each once
     * @param worldSize 1 to 4096
     * @param options deadline, transport, name
     * @return the communicator
     * @throws TesseraTimeoutException if a rank never came
     */
    public static Comm create(Store store, int rank, int worldSize, CommOptions options) {
        Objects.requireNonNull(options, "options");
        final long handle = store.ref.callLong(s -> Native.commCreate(s, rank, worldSize, options));
        return new Comm(ref(handle).borrow(store.ref), store);
    }

    /** The communicator that a hook is lent: the library's, closed by us when the hook has returned. */
    static Comm ofHook(long handle) {
        return new Comm(new Ref("Comm", handle, h -> { }).mayLeak(), null);
    }

    /** The communicator of a mesh's dimension: the mesh's own, closed with it. */
    static Comm ofMesh(Mesh mesh, long handle) {
        return new Comm(new Ref("Comm", handle, h -> { })
                .wakenBy(h -> Native.commAbort(h, Native.utf8("closed while in use", "reason")))
                .mayLeak().dependOn(mesh.ref), mesh);
    }

    /**
     * Divide the ranks into groups: those of one {@code color} form one, ordered by {@code key}, then by rank. Collective,
     * exclusive. The options are this communicator's.
     *
     * @param color negative: this rank joins no group
     * @param key order inside the group
     * @return the communicator of this rank's group; null if {@code color} is negative
     */
    public Comm split(int color, int key) {
        return splitWith(color, key, null);
    }

    /**
     * Divide the ranks into groups, as {@link #split(int, int)}.
     *
     * @param color negative: this rank joins no group
     * @param key order inside the group
     * @param options those of the new communicator
     * @return the communicator of this rank's group; null if {@code color} is negative
     */
    public Comm split(int color, int key, CommOptions options) {
        return splitWith(color, key, Objects.requireNonNull(options, "options"));
    }

    /** @param options null: those of this communicator */
    private Comm splitWith(int color, int key, CommOptions options) {
        final long handle = ref.callLongExclusive(h -> Native.commSplit(h, color, key, options));
        return handle == 0 ? null : new Comm(ref(handle), null);
    }

    /**
     * Go on with the ranks that are left after a failure, numbered in this communicator's order. Collective of those,
     * exclusive. Ranks that died, or closed this communicator, are known to be gone; for others it waits until the deadline,
     * then goes on without them. All that was made from this communicator is out of use: close it, make it anew, and load a
     * checkpoint, since a collective that failed left its tensors half done. The options are this communicator's.
     *
     * @return the communicator of those that are left
     * @throws TesseraAbortedException if the others have gone on without this rank
     * @throws TesseraIoException if the store at which the ranks met is gone, as with a rank 0 that served it
     */
    public Comm shrink() {
        return shrinkWith(null);
    }

    /**
     * Go on with the ranks that are left, as {@link #shrink()}.
     *
     * @param options those of the new communicator; the timeout is also the deadline for ranks that do not come
     * @return the communicator of those that are left
     */
    public Comm shrink(CommOptions options) {
        return shrinkWith(Objects.requireNonNull(options, "options"));
    }

    /** @param options null: those of this communicator */
    private Comm shrinkWith(CommOptions options) {
        return new Comm(ref(ref.callLongExclusive(h -> Native.commShrink(h, options))), null);
    }

    /**
     * This rank's number.
     *
     * @return 0 to worldSize - 1
     */
    public int rank() {
        return rank;
    }

    /**
     * The number of ranks.
     *
     * @return at least 1
     */
    @Override
    public int worldSize() {
        return worldSize;
    }

    /**
     * The transport in use.
     *
     * @return "shm", "gloo", "hierarchical" (several hosts, on some several ranks) or "self"
     */
    public String transport() {
        return ref.call(h -> Native.text(Native.commTransport(h)));
    }

    /**
     * Set the deadline of the operations that this rank issues from here on; those that were issued keep theirs, so that it
     * may be set back at once. Each rank has its own; the first that passes fails the communicator on all. May be called from
     * any thread.
     *
     * @param timeout of each operation, counted from when it starts; rounded up to milliseconds
     */
    public void setTimeout(Duration timeout) {
        final int ms = Native.millis(timeout, "timeout");
        ref.run(h -> Native.commSetTimeout(h, ms));
    }

    /**
     * The deadline of an operation issued now. May be asked from any thread.
     *
     * @return counted from when the operation starts
     */
    public Duration timeout() {
        return ref.call(h -> Duration.ofMillis(Native.commTimeout(h)));
    }

    /**
     * What failed the communicator. May be asked from any thread.
     *
     * @return the first error; null while the communicator is well
     */
    public TesseraException error() {
        return ref.call(h -> (TesseraException) Native.commError(h));
    }

    /**
     * Write this rank's flight record: the last 1,024 operations and their times, as JSON lines, which
     * {@code tessera trace} reads. May be called from any thread. Under {@code tessera run --trace-dir DIR} each
     * communicator writes its own when it fails, or else at its end.
     *
     * @param path the file to write; one that is there is replaced whole
     */
    public void writeTrace(Path path) {
        final byte[] text = Native.utf8(path.toString(), "path");
        ref.run(h -> Native.commWriteTrace(h, text));
    }

    /**
     * Fail every waiting and later operation with ABORTED, here and at the peers. May be called from any thread, and again.
     *
     * @param reason told to the peers; may be null
     */
    public void abort(String reason) {
        final byte[] text = Native.optionalUtf8(reason, "reason");
        ref.run(h -> Native.commAbort(h, text));
    }

    /**
     * Wait for all ranks and all issued work; no collective may follow. Collective, exclusive. A program that ends well
     * calls it before {@link #close}.
     */
    public void finish() {
        ref.runExclusive(Native::commFinalize);
    }

    /**
     * Leave the communicator. Local: what is still running is aborted, also calls of other threads, which throw
     * {@link TesseraAbortedException}.
     */
    @Override
    public void close() {
        super.close();
    }

    /** Rank, world size and, while open, the transport. */
    @Override
    public String toString() {
        return "Comm(rank " + rank + " of " + worldSize + (isClosed() ? ", closed)" : ")");
    }
}
