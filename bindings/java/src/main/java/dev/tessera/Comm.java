package dev.tessera;

import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.Objects;
import java.util.Optional;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Function;
import java.util.function.Supplier;
import java.util.function.ToLongFunction;

/**
 * A communicator: the ranks of a group. Its collectives are those of {@link Collectives}. One JVM may have several,
 * even those of several ranks, each in its own thread.
 */
public final class Comm extends Collectives {
    private final int rank;
    private final int worldSize;
    private final Object parent; // keeps a store or mesh reachable
    private StoreServer server; // closed with this communicator; null: none

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
     * Join the job that the environment describes, with default options: {@code tessera run}, torchrun, mpirun, srun
     * or an Indexed Job of Kubernetes; with none of them the job has one rank. Under a launcher, an exception that ends
     * the calling thread is reported to it from now on; see {@link Launch#recordError(Throwable)}.
     *
     * @return the communicator
     * @throws TesseraTimeoutException if a rank did not join in time
     * @throws TesseraPeerLostException if a rank of {@code tessera run} exited before it joined
     * @throws TesseraPermissionException if the job token is missing or wrong
     */
    public static Comm fromEnv() {
        return fromEnv(new CommOptions());
    }

    /**
     * Join the job that the environment describes. Under a launcher, an exception that ends the calling thread is
     * reported to it from now on; see {@link Launch#recordError(Throwable)}.
     *
     * @param options deadline, transport, name
     * @return the communicator
     * @throws TesseraTimeoutException if a rank did not join in time
     * @throws TesseraPeerLostException if a rank of {@code tessera run} exited before it joined
     * @throws TesseraPermissionException if the job token is missing or wrong
     */
    public static Comm fromEnv(CommOptions options) {
        Objects.requireNonNull(options, "options");
        Launch.recordUncaught(); // joining may fail
        return new Comm(ref(Native.commFromEnv(options)), null);
    }

    /**
     * Connect {@code worldSize} ranks through a common store, with default options.
     *
     * @param store stays open natively until the communicator is closed
     * @param rank 0 to worldSize - 1, unique
     * @param worldSize 1 to 4096
     * @return the communicator
     * @throws TesseraTimeoutException if a rank did not join in time
     */
    public static Comm create(Store store, int rank, int worldSize) {
        return create(store, rank, worldSize, new CommOptions());
    }

    /**
     * Connect {@code worldSize} ranks through a common store.
     *
     * @param store stays open natively until the communicator is closed
     * @param rank 0 to worldSize - 1, unique
     * @param worldSize 1 to 4096
     * @param options deadline, transport, name
     * @return the communicator
     * @throws TesseraTimeoutException if a rank did not join in time
     */
    public static Comm create(Store store, int rank, int worldSize, CommOptions options) {
        Objects.requireNonNull(options, "options");
        final long handle = store.ref.callLong(s -> Native.commCreate(s, rank, worldSize, options));
        return new Comm(ref(handle).borrow(store.ref), store);
    }

    /**
     * Connect the tasks of a barrier stage of Apache Spark, with default options; see {@link
     * #fromSpark(int, String, Function, CommOptions)}.
     *
     * @param partition {@code task.partitionId()}
     * @param address {@code task.getTaskInfos()[0].address()}
     * @param allGather {@code task::allGather}
     * @return the communicator
     * @throws TesseraTimeoutException if a task did not join in time
     */
    public static Comm fromSpark(int partition, String address, Function<String, String[]> allGather) {
        return fromSpark(partition, address, allGather, new CommOptions());
    }

    /**
     * Connect the tasks of a barrier stage of Apache Spark: each is the rank of its partition. Takes what it needs from
     * Spark's {@code BarrierTaskContext}, so that this library works with every version of Spark and Scala:
     *
     * <pre>{@code
     * BarrierTaskContext task = BarrierTaskContext.get();
     * try (Comm comm = Comm.fromSpark(task.partitionId(), task.getTaskInfos()[0].address(), task::allGather)) {
     *     ...
     *     comm.finish();
     * }
     * }</pre>
     *
     * <p>Rank 0 serves the store at which they meet until it closes the communicator, under a random token that only the
     * tasks of this attempt of the stage get. Collective; calls {@code allGather} once.
     *
     * @param partition {@code task.partitionId()}
     * @param address {@code task.getTaskInfos()[0].address()}: where the other tasks reach rank 0
     * @param allGather {@code task::allGather}, in Scala {@code task.allGather(_)}
     * @param options deadline, transport, name
     * @return the communicator
     * @throws TesseraTimeoutException if a task did not join in time
     * @throws TesseraIoException if rank 0 cannot listen on {@code address}
     */
    public static Comm fromSpark(
            int partition, String address, Function<String, String[]> allGather, CommOptions options) {
        Objects.requireNonNull(address, "address");
        Objects.requireNonNull(allGather, "allGather");
        Objects.requireNonNull(options, "options");
        if (partition != 0) {
            final String[] told = allGather.apply("");
            return joinSpark(told[0], partition, told.length, options, null);
        }
        final int colon = address.lastIndexOf(':'); // of the port of Spark's executor
        final String host = colon < 0 ? address : address.substring(0, colon);
        final String token = randomToken();
        final StoreServer server =
                StoreServer.serve(host.replaceAll("^\\[|\\]$", ""), 0, new StoreOptions().token(token));
        try {
            final String own = "tcp://" + host + ":" + server.port() + " " + token;
            return joinSpark(own, 0, allGather.apply(own).length, options, server);
        } catch (Throwable failure) {
            server.close();
            throw failure;
        }
    }

    private static Comm joinSpark(String told, int rank, int worldSize, CommOptions options, StoreServer server) {
        final String[] parts = told.split(" ");
        if (parts.length != 2) {
            throw new IllegalStateException(
                    "rank 0 of " + worldSize + " did not say where the tasks meet; call Comm.fromSpark on all of them");
        }
        try (Store store = Store.open(parts[0], new StoreOptions().token(parts[1]))) {
            final Comm comm = create(store, rank, worldSize, options);
            comm.server = server;
            return comm;
        }
    }

    private static String randomToken() {
        final byte[] bytes = new byte[32];
        new SecureRandom().nextBytes(bytes);
        final StringBuilder hex = new StringBuilder();
        for (byte one : bytes) hex.append(String.format("%02x", one));
        return hex.toString();
    }

    /** The communicator that a hook borrows from the library; it is closed when the hook returns. */
    static Comm ofHook(long handle) {
        return new Comm(new Ref("Comm", handle, h -> { }).mayLeak(), null);
    }

    /** The communicator of a mesh dimension; it belongs to the mesh and is closed with it. */
    static Comm ofMesh(Mesh mesh, long handle) {
        return new Comm(new Ref("Comm", handle, h -> { })
                .wakenBy(h -> Native.commAbort(h, Native.utf8("closed while in use", "reason")))
                .mayLeak().dependOn(mesh.ref), mesh);
    }

    /**
     * Split the ranks into groups: ranks of the same {@code color} form one, ordered by {@code key}, then rank.
     * Collective, exclusive. Uses this communicator's options.
     *
     * @param color the group; negative to join none
     * @param key order inside the group
     * @return the communicator of this rank's group; null if {@code color} is negative
     */
    public Comm split(int color, int key) {
        return splitWith(color, key, null);
    }

    /**
     * Split the ranks into groups, like {@link #split(int, int)}.
     *
     * @param color the group; negative to join none
     * @param key order inside the group
     * @param options options of the new communicator
     * @return the communicator of this rank's group; null if {@code color} is negative
     */
    public Comm split(int color, int key, CommOptions options) {
        return splitWith(color, key, orRefuse(Creation.COMM, () -> Objects.requireNonNull(options, "options")));
    }

    /** @param options null: those of this communicator */
    private Comm splitWith(int color, int key, CommOptions options) {
        final long handle = ref.callLongExclusive(h -> Native.commSplit(h, color, key, options));
        return handle == 0 ? null : new Comm(ref(handle), null);
    }

    /**
     * Continue with the surviving ranks after a failure, numbered in this communicator's order. Collective over the
     * survivors, exclusive. Ranks that died or closed this communicator are known to be gone; the call waits for other
     * ranks until the deadline, then continues without them. Objects made from this communicator can no longer be used:
     * close them, create them again, and load a checkpoint, because the failed collective left its tensors incomplete.
     * Uses this communicator's options.
     *
     * @return the communicator of the surviving ranks
     * @throws TesseraAbortedException if the other ranks have continued without this one
     * @throws TesseraIoException if the store that the ranks use is gone, because rank 0, which served it, died
     */
    public Comm shrink() {
        return shrinkWith(null);
    }

    /**
     * Continue with the surviving ranks, like {@link #shrink()}.
     *
     * @param options options of the new communicator; the timeout is also the deadline for ranks that do not come
     * @return the communicator of the surviving ranks
     */
    public Comm shrink(CommOptions options) {
        return shrinkWith(Objects.requireNonNull(options, "options"));
    }

    /** @param options null: those of this communicator */
    private Comm shrinkWith(CommOptions options) {
        return new Comm(ref(ref.callLongExclusive(h -> Native.commShrink(h, options))), null);
    }

    /**
     * Tell the other ranks that this one cannot take part in a creation. Collective, exclusive; in place of the creation. It
     * fails on them too, at once and with this rank and the reason in its message, instead of waiting for this rank until the
     * deadline. The classes of this package call it for arguments that they refuse; call it for checks of your own that one
     * rank alone may fail. The communicator stays usable.
     *
     * @param creation what the others create; of a tensor-parallel model on the communicator of its dimension
     * @param why why not; throw it afterwards. The others get the code of a {@link TesseraException}, {@link
     *     ErrorCode#INVALID_ARGUMENT} for an {@link IllegalArgumentException} or {@link NullPointerException}, and {@link
     *     ErrorCode#USER} for any other
     * @throws IllegalStateException if this communicator is closed or in use
     */
    public void refuse(Creation creation, Throwable why) {
        final boolean isOurs = why instanceof TesseraException;
        final boolean isArgument = why instanceof IllegalArgumentException || why instanceof NullPointerException;
        final ErrorCode code = isOurs ? ((TesseraException) why).code()
                : isArgument ? ErrorCode.INVALID_ARGUMENT : ErrorCode.USER;
        final String said = isOurs ? String.valueOf(why.getMessage()) : why.toString();
        final byte[] reason = said.replace('\0', ' ').getBytes(StandardCharsets.UTF_8);
        try {
            ref.runExclusive(c -> Native.commRefuse(c, creation.number(), code.number(), reason));
        } catch (TesseraException told) { // the caller's failure is the one to report
            if (told != why) {
                why.addSuppressed(told);
            }
        }
    }

    /** What `arguments` makes; if they are refused, so is the creation on the other ranks. */
    <T> T orRefuse(Creation creation, Supplier<T> arguments) {
        try {
            return arguments.get();
        } catch (Throwable why) {
            refuseFor(creation, why);
            throw why;
        }
    }

    /**
     * The handle that {@code create} makes. It sets its argument before its collective call; if it fails before that, the
     * creation is refused on the other ranks.
     *
     * @param comm null: there is no other rank, or nobody knows them
     */
    static long creating(Comm comm, Creation creation, ToLongFunction<AtomicBoolean> create) {
        final AtomicBoolean reached = new AtomicBoolean();
        try {
            return create.applyAsLong(reached);
        } catch (Throwable why) {
            if (comm != null && !reached.get()) {
                comm.refuseFor(creation, why);
            }
            throw why;
        }
    }

    private void refuseFor(Creation creation, Throwable why) {
        try {
            refuse(creation, why);
        } catch (IllegalStateException unusable) {
            why.addSuppressed(unusable);
        }
    }

    /**
     * Continue with all ranks after a failure, of which some are new processes. Collective over all ranks, exclusive. Under
     * {@code tessera run --on-loss replace} the launcher starts another process for a rank that was killed. That process
     * calls {@link #fromEnv()}, as any rank does, and the other ranks call this method: together they make the new
     * communicator, with the rank numbers and the world size of this one. If another rank dies meanwhile, its replacement is
     * waited for, too. Objects made from this communicator can no longer be used, as after {@link #shrink()}. Uses this
     * communicator's options.
     *
     * @return the communicator of all ranks
     * @throws TesseraInvalidStateException if this communicator was not made from the environment under
     *     {@code tessera run --on-loss replace}
     * @throws TesseraTimeoutException if the ranks that the message names did not come
     * @throws TesseraPeerLostException if a rank has ended and is not replaced
     * @throws TesseraAbortedException if another process has replaced this one
     * @throws TesseraIoException if the store that the ranks use is gone
     */
    public Comm grow() {
        return growWith(null);
    }

    /**
     * Continue with all ranks, like {@link #grow()}.
     *
     * @param options options of the new communicator; the timeout is also the deadline of the call
     * @return the communicator of all ranks
     */
    public Comm grow(CommOptions options) {
        return growWith(Objects.requireNonNull(options, "options"));
    }

    /** @param options null: those of this communicator */
    private Comm growWith(CommOptions options) {
        return new Comm(ref(ref.callLongExclusive(h -> Native.commGrow(h, options))), null);
    }

    /**
     * Let one rank work alone, as in an evaluation on rank 0, while the others wait for it. Collective, exclusive: until it
     * returns, this communicator refuses everything else on every rank. A rank that dies is noticed at once, as in any
     * collective.
     *
     * @param <T> what the work returns
     * @param <E> what it may throw
     * @param rank the rank whose turn it is
     * @param timeout how long the others wait for the end, or for the next {@link Turn#progress}; the timeout of the
     *     communicator does not apply to them
     * @param body the work, called on that rank only; what it throws is also thrown on the others, as a
     *     {@link TesseraException} with {@link ErrorCode#USER}
     * @return its result on that rank if it is not null; empty on the others
     * @throws E what the work throws, on that rank
     * @throws TesseraTimeoutException if that rank neither ends nor reports progress in time, or another does not come
     * @throws TesseraInvalidStateException inside another turn of this communicator
     */
    public <T, E extends Exception> Optional<T> turn(int rank, Duration timeout, Turn.Body<T, E> body) throws E {
        Objects.requireNonNull(body, "body");
        try (Turn turn = new Turn(this, rank, Native.millis(timeout, "timeout"))) {
            if (rank != this.rank) {
                turn.end(null);
                return Optional.empty();
            }
            final T result;
            try {
                result = body.run(turn);
            } catch (Throwable failure) {
                try {
                    turn.end(failure.toString());
                } catch (TesseraException | IllegalStateException ended) {
                    failure.addSuppressed(ended);
                }
                throw failure;
            }
            turn.end(null);
            return Optional.ofNullable(result);
        }
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

    /** The collectives on a stream. */
    private static final class OnStream extends Collectives {
        private final Comm comm;

        private OnStream(Comm comm, long stream) {
            super(comm, stream);
            this.comm = comm;
        }

        @Override
        public int worldSize() {
            return comm.worldSize;
        }

        /** Does nothing: the communicator is closed by its own method. */
        @Override
        public void close() {}
    }

    /**
     * The collectives of this communicator in the order of a CUDA stream, for tensors on a device. A collective returns
     * once it is on the stream: what the stream gets later sees the result. An asynchronous one runs on another stream,
     * after what this one had before; {@link Work#await()} waits for the device, and {@link Work#order} makes a stream
     * wait.
     *
     * @param stream address of a stream of this rank's device ({@code cudaStream_t}); 0 for its default stream
     * @return a view of this communicator
     */
    public Collectives onStream(long stream) {
        ref.run(h -> { }); // throws if it is closed
        return new OnStream(this, stream);
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
     * Set the deadline of the operations that this rank issues from now on; operations already issued keep theirs, so
     * the old value can be restored at once. Each rank has its own deadline; the first one that passes fails the
     * communicator on all ranks. May be called from any thread.
     *
     * @param timeout deadline of each operation from its start, rounded up to milliseconds
     */
    public void setTimeout(Duration timeout) {
        final int ms = Native.millis(timeout, "timeout");
        ref.run(h -> Native.commSetTimeout(h, ms));
    }

    /**
     * The deadline of an operation issued now. May be called from any thread.
     *
     * @return the time from the operation's start
     */
    public Duration timeout() {
        return ref.call(h -> Duration.ofMillis(Native.commTimeout(h)));
    }

    /**
     * The error that failed the communicator. May be called from any thread.
     *
     * @return the first error; null if the communicator works
     */
    public TesseraException error() {
        return ref.call(h -> (TesseraException) Native.commError(h));
    }

    /**
     * Write this rank's flight record: the last 1,024 operations and their times, as JSON lines, which {@code tessera
     * trace} reads. May be called from any thread. Under {@code tessera run --trace-dir DIR} each communicator writes
     * its own when it fails or ends.
     *
     * @param path the file to write; an existing file is replaced as a whole
     */
    public void writeTrace(Path path) {
        final byte[] text = Native.utf8(path.toString(), "path");
        ref.run(h -> Native.commWriteTrace(h, text));
    }

    /**
     * Fail every pending and later operation with ABORTED, on this rank and its peers. May be called from any thread,
     * and repeatedly.
     *
     * @param reason part of the error on every rank; may be null
     */
    public void abort(String reason) {
        final byte[] text = Native.optionalUtf8(reason, "reason");
        ref.run(h -> Native.commAbort(h, text));
    }

    /**
     * Wait for all ranks and all issued work. No collective may follow. Collective, exclusive. Call it before {@link
     * #close} at the end of a successful program.
     */
    public void finish() {
        ref.runExclusive(Native::commFinalize);
    }

    /**
     * Leave the communicator. Local: running operations are aborted, including calls of other threads, which throw
     * {@link TesseraAbortedException}.
     */
    @Override
    public void close() {
        super.close();
        if (server != null) server.close();
    }

    /** Rank, world size and, while open, the transport. */
    @Override
    public String toString() {
        return "Comm(rank " + rank + " of " + worldSize + (isClosed() ? ", closed)" : ")");
    }
}
