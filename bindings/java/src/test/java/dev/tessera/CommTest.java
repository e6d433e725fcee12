package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class CommTest {
    private static Tensor floats(float... values) {
        return Tensor.copyOf(values);
    }

    private static float[] values(Tensor tensor) {
        final float[] out = new float[(int) tensor.numel()];
        tensor.floats().get(out);
        return out;
    }

    private static void assertValues(Tensor tensor, float... expected) {
        assertArrayEquals(expected, values(tensor));
    }

    @ParameterizedTest
    @ValueSource(strings = {"shm", "gloo"})
    void everyCollective(String backend) throws Exception {
        Ranks.run(3, Ranks.options().backend(backend).name("three").spinCount(10), comm -> {
            final int r = comm.rank();
            assertEquals(3, comm.worldSize());
            assertEquals(backend, comm.transport());

            final Tensor sum = floats(r, 10 + r);
            comm.allReduce(sum, ReduceOp.SUM);
            assertValues(sum, 3, 33);
            final Tensor avg = floats(r);
            final Tensor avg2 = floats(3 * r);
            comm.allReduce(List.of(avg, avg2), ReduceOp.AVG);
            assertValues(avg, 1);
            assertValues(avg2, 3);
            final Tensor max = Tensor.zeros(DType.I64, 1);
            max.longs().put(0, r);
            comm.allReduce(max, ReduceOp.MAX);
            assertEquals(2, max.longs().get(0));
            comm.allReduce(max, ReduceOp.MIN);
            assertEquals(2, max.longs().get(0));
            final Tensor product = Tensor.zeros(DType.F64, 1);
            product.doubles().put(0, r + 1);
            comm.allReduce(product, ReduceOp.PROD);
            assertEquals(6, product.doubles().get(0));

            final Tensor part = floats(0, 0);
            comm.reduceScatter(floats(r, r, r, r, r, 1), part, ReduceOp.SUM);
            assertValues(part, r < 2 ? new float[] {3, 3} : new float[] {3, 3});

            final Tensor all = floats(0, 0, 0);
            comm.allGather(floats(r + 1), all);
            assertValues(all, 1, 2, 3);

            final List<Tensor> ragged = List.of(floats(0), floats(0, 0), floats(0, 0, 0));
            final float[] mine = new float[r + 1];
            java.util.Arrays.fill(mine, r + 1);
            comm.allGather(floats(mine), ragged);
            assertValues(ragged.get(0), 1);
            assertValues(ragged.get(1), 2, 2);
            assertValues(ragged.get(2), 3, 3, 3);

            final Tensor both = floats(0, 0, 0);
            final Tensor tens = floats(0, 0, 0);
            comm.allGatherCoalesced(List.of(floats(r + 1), floats(10 * r)), List.of(both, tens));
            assertValues(both, 1, 2, 3);
            assertValues(tens, 0, 10, 20);
            final Tensor own = floats(0);
            final Tensor ten = floats(0);
            comm.reduceScatterCoalesced(List.of(both, tens), List.of(own, ten), ReduceOp.SUM);
            assertValues(own, 3 * (r + 1));
            assertValues(ten, 30 * r);
            assertThrows(IllegalArgumentException.class, () -> comm.allGatherCoalesced(List.of(own), List.of(both, tens)));

            final Tensor from1 = floats(r, r);
            comm.broadcast(from1, 1);
            assertValues(from1, 1, 1);
            final Tensor a = floats(r);
            final Tensor b = floats(-r);
            comm.broadcast(List.of(a, b), 2);
            assertValues(a, 2);
            assertValues(b, -2);

            final Tensor reduced = r == 0 ? floats(0) : null;
            comm.reduce(floats(r), reduced, ReduceOp.SUM, 0);
            if (r == 0) {
                assertValues(reduced, 3);
            }

            final Tensor gathered = r == 2 ? floats(0, 0, 0) : null;
            comm.gather(floats(r * r), gathered, 2);
            if (r == 2) {
                assertValues(gathered, 0, 1, 4);
            }

            final Tensor scattered = floats(0);
            comm.scatter(r == 1 ? floats(5, 6, 7) : null, scattered, 1);
            assertValues(scattered, 5 + r);

            final Tensor exchanged = floats(0, 0, 0);
            comm.allToAll(floats(10 * r, 10 * r + 1, 10 * r + 2), exchanged);
            assertValues(exchanged, r, 10 + r, 20 + r);

            if (r == 0) {
                comm.send(floats(1.5f, 2.5f), 2, 7);
            } else if (r == 2) {
                final Tensor received = floats(0, 0);
                comm.receive(received, 0, 7);
                assertValues(received, 1.5f, 2.5f);
            }
            comm.barrier();
            assertNull(comm.error());
            comm.finish();
        });
    }

    /** Threads in place of Spark's tasks: an all-gather of strings is all that is taken from Spark. */
    @Test
    void tasksOfABarrierStageJoin() throws Exception {
        final String[] messages = new String[3];
        final CyclicBarrier meeting = new CyclicBarrier(3);
        final List<Thread> tasks = new ArrayList<>();
        final Map<Integer, Throwable> errors = new ConcurrentHashMap<>();
        for (int task = 0; task < 3; ++task) {
            final int partition = task;
            tasks.add(new Thread(() -> {
                try (Comm comm = Comm.fromSpark(partition, "127.0.0.1:4711", message -> {
                    messages[partition] = message;
                    try {
                        meeting.await(Patience.seconds(20), TimeUnit.SECONDS);
                    } catch (Exception error) {
                        throw new IllegalStateException(error);
                    }
                    return messages;
                }, Ranks.options())) {
                    assertEquals(partition, comm.rank());
                    assertEquals(3, comm.worldSize());
                    final Tensor sum = floats(partition + 1);
                    comm.allReduce(sum, ReduceOp.SUM);
                    assertValues(sum, 6);
                    comm.finish();
                } catch (Throwable error) {
                    errors.put(partition, error);
                }
            }));
        }
        tasks.forEach(Thread::start);
        for (Thread task : tasks) {
            task.join(Patience.millis(60_000));
            assertFalse(task.isAlive());
        }
        assertEquals(Map.of(), errors);
        final String[] told = messages[0].split(" ");
        assertEquals(64, told[1].length());
        assertEquals(List.of("", ""), List.of(messages[1], messages[2]));
        final StoreOptions options = new StoreOptions().token(told[1]).timeout(Duration.ofMillis(50));
        assertThrows(TesseraTimeoutException.class, () -> Store.open(told[0], options), "the store goes with rank 0");
        assertTrue(assertThrows(IllegalStateException.class,
                () -> Comm.fromSpark(1, "127.0.0.1:1", message -> new String[] {"", ""})).getMessage()
                .startsWith("rank 0 of 2 did not say where the tasks meet"));
        assertThrows(NullPointerException.class, () -> Comm.fromSpark(0, "127.0.0.1:1", message -> messages, null));
    }

    @Test
    void theFlightRecordHoldsWhatWasDone(@TempDir Path directory) throws Exception {
        final Path file = directory.resolve("flight.jsonl");
        try (Comm comm = Comm.fromEnv()) {
            comm.allReduce(floats(1, 2), ReduceOp.SUM);
            comm.writeTrace(file);
            final List<String> lines = Files.readAllLines(file);
            assertTrue(lines.get(0).startsWith("{\"tessera_flight\":1,\"name\":\"world\""), lines.get(0));
            assertTrue(lines.get(1).contains("\"operation\":\"all_reduce\",\"state\":\"finished\""), lines.get(1));
            final TesseraException refused = assertThrows(
                    TesseraException.class, () -> comm.writeTrace(directory.resolve("none").resolve("x")));
            assertEquals(ErrorCode.IO, refused.code());
        }
    }

    @Test
    void everyCollectiveInTheBackground() throws Exception {
        Ranks.run(2, comm -> {
            final int r = comm.rank();
            final Tensor sum = floats(r);
            final Tensor list = floats(r);
            final Tensor part = floats(0);
            final Tensor all = floats(0, 0);
            final List<Tensor> ragged = List.of(floats(0), floats(0));
            final Tensor broadcast = floats(r + 5);
            final Tensor broadcast2 = floats(r + 5);
            final Tensor reduced = floats(0);
            final Tensor gathered = floats(0, 0);
            final Tensor scattered = floats(0);
            final Tensor exchanged = floats(0, 0);
            final Tensor received = floats(0);
            final List<Work> works = List.of(
                    comm.allReduceAsync(sum, ReduceOp.SUM),
                    comm.allReduceAsync(List.of(list), ReduceOp.MAX),
                    comm.reduceScatterAsync(floats(1, 2), part, ReduceOp.SUM),
                    comm.allGatherAsync(floats(r), all),
                    comm.allGatherAsync(floats(r), ragged),
                    comm.allGatherCoalescedAsync(List.of(floats(r), floats(r)), List.of(floats(0, 0), floats(0, 0))),
                    comm.reduceScatterCoalescedAsync(List.of(floats(1, 2)), List.of(floats(0)), ReduceOp.SUM),
                    comm.broadcastAsync(broadcast, 0),
                    comm.broadcastAsync(List.of(broadcast2), 1),
                    comm.reduceAsync(floats(1), r == 0 ? reduced : null, ReduceOp.SUM, 0),
                    comm.gatherAsync(floats(r + 1), r == 0 ? gathered : null, 0),
                    comm.scatterAsync(r == 0 ? floats(3, 4) : null, scattered, 0),
                    comm.allToAllAsync(floats(10 * r, 10 * r + 1), exchanged),
                    r == 0 ? comm.sendAsync(floats(9), 1, 0) : comm.receiveAsync(received, 0, 0),
                    comm.barrierAsync());
            for (Work work : works) {
                work.toFuture().get(Patience.seconds(20), TimeUnit.SECONDS);
                assertTrue(work.isDone());
                assertNull(work.error());
                work.await();
                work.close();
                assertThrows(IllegalStateException.class, work::isDone);
            }
            assertValues(sum, 1);
            assertValues(list, 1);
            assertValues(part, 2 * (r + 1));
            assertValues(all, 0, 1);
            assertValues(ragged.get(1), 1);
            assertValues(broadcast, 5);
            assertValues(broadcast2, 6);
            assertValues(exchanged, r, 10 + r);
            assertValues(scattered, 3 + r);
            if (r == 0) {
                assertValues(reduced, 2);
                assertValues(gathered, 1, 2);
            } else {
                assertValues(received, 9);
            }
        });
    }

    @Test
    void futuresCompleteOffTheLibrarysThread() throws Exception {
        Ranks.run(2, comm -> {
            final Work work = comm.barrierAsync();
            final CompletableFuture<Void> future = work.toFuture();
            assertSame(future, work.toFuture());
            // A stage that calls the communicator would hang the library's own thread.
            final CompletableFuture<Float> next = future.thenApply(nothing -> {
                final Tensor one = floats(1);
                comm.allReduce(one, ReduceOp.SUM);
                return one.floats().get(0);
            });
            assertEquals(2f, next.get(Patience.seconds(20), TimeUnit.SECONDS));
        });
    }

    @Test
    void aWaitMayExpireAndTheWorkLivesOn() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options())) {
                if (rank == 1) {
                    store.await("rank 0 has waited");
                    comm.barrier();
                    return;
                }
                try (Work work = comm.barrierAsync()) {
                    assertFalse(work.await(Duration.ofMillis(20)));
                    assertFalse(work.isDone());
                    assertEquals(ErrorCode.NOT_READY, assertThrows(TesseraException.class, work::error).code());
                    store.set("rank 0 has waited", new byte[0]);
                    work.await();
                    assertTrue(work.isDone());
                }
            }
        });
    }

    @Test
    void groupsAreCommunicatorsOfTheirOwn() throws Exception {
        Ranks.run(4, comm -> {
            final int r = comm.rank();
            try (Comm pair = comm.split(r / 2, -r);
                    Comm named = comm.split(0, r, new CommOptions().name("again").timeout(Ranks.DEADLINE))) {
                assertEquals(2, pair.worldSize());
                assertEquals(1 - r % 2, pair.rank(), "ordered by key");
                final Tensor sum = floats(r);
                pair.allReduce(sum, ReduceOp.SUM);
                assertValues(sum, r < 2 ? 1 : 5);
                assertEquals(r, named.rank());
            }
            final Comm none = comm.split(r == 0 ? -1 : 0, 0);
            if (r == 0) {
                assertNull(none);
            } else {
                assertEquals(3, none.worldSize());
                none.close();
            }
        });
    }

    @Test
    void plansAreLaunchedAgainAndAgain() throws Exception {
        Ranks.run(2, comm -> {
            final Tensor sum = floats(comm.rank() + 1);
            try (Plan plan = Plan.of(comm, Plan.Collective.ALL_REDUCE, List.of(), List.of(sum), ReduceOp.SUM, 0)) {
                plan.await();
                plan.run();
                assertValues(sum, 3);
                plan.start();
                plan.await();
                assertTrue(plan.await(java.time.Duration.ofSeconds(1)));
                assertValues(sum, 6);
            }
            assertThrows(TesseraInvalidArgumentException.class,
                    () -> Plan.of(comm, Plan.Collective.BROADCAST, List.of(), List.of(sum), ReduceOp.SUM, 5));
        });
    }

    @Test
    void thoseThatAreLeftGoOn() throws Exception {
        Ranks.run(3, comm -> {
            final int rank = comm.rank();
            if (rank == 1) {
                comm.close();
                return;
            }
            try (Comm rest = comm.shrink(); Comm again = rest.shrink(new CommOptions().name("again"))) {
                assertEquals(2, again.worldSize());
                assertEquals(rank / 2, again.rank());
                again.barrier();
            }
        });
    }

    @Test
    void onlyACommunicatorOfALauncherThatReplacesRanksGrows() throws Exception {
        Ranks.run(2, comm -> {
            final var error = assertThrows(TesseraInvalidStateException.class, comm::grow);
            assertTrue(error.getMessage().contains("tessera run --on-loss replace"), error.getMessage());
            assertThrows(TesseraInvalidStateException.class, () -> comm.grow(new CommOptions().name("again")));
            comm.barrier();
        });
    }

    @Test
    void meshesHaveACommunicatorPerDimension() throws Exception {
        Ranks.run(4, comm -> {
            final Comm dp;
            try (Mesh mesh = Mesh.over(comm).dim("dp", 2).dim("tp", 2).build()) {
                assertEquals(2, mesh.ndim());
                assertEquals(2, mesh.size("dp"));
                assertEquals(comm.rank() / 2, mesh.coordinate("dp"));
                assertEquals(comm.rank() % 2, mesh.coordinate("tp"));
                dp = mesh.comm("dp");
                assertSame(dp, mesh.comm("dp"));
                final Tensor sum = floats(comm.rank());
                dp.allReduce(sum, ReduceOp.SUM);
                assertValues(sum, comm.rank() % 2 == 0 ? 2 : 4);
                final Mesh part = mesh.slice("tp");
                assertSame(mesh.comm("tp"), part.comm("tp"));
                assertEquals(1, part.ndim());
                assertThrows(TesseraNotFoundException.class, () -> part.comm("dp"));
                assertThrows(TesseraInvalidArgumentException.class, () -> mesh.slice("tp", "dp"));
                try (Mesh flat = mesh.flatten(comm, null); Mesh named = part.flatten(comm, "model")) {
                    assertEquals(comm.rank(), flat.coordinate("dp_tp"));
                    flat.comm("dp_tp").barrier();
                    assertEquals(2, named.comm("model").worldSize());
                }
                assertThrows(TesseraNotFoundException.class, () -> mesh.size("pp"));
                assertThrows(TesseraNotFoundException.class, () -> mesh.comm("pp"));
                comm.barrier(); // nobody leaves while others still talk
            }
            assertTrue(dp.isClosed());
            final String message = assertThrows(IllegalStateException.class, () -> dp.barrier()).getMessage();
            assertTrue(message.contains("Mesh that it belongs to"), message);
            assertThrows(IllegalArgumentException.class, () -> Mesh.over(comm).dim("a", 2).dim("a", 2));
            final String size = assertThrows(TesseraInvalidArgumentException.class,
                    () -> Mesh.over(comm).dim("dp", 2).dim("tp", 3).build()).getMessage();
            assertTrue(size.contains("(dp 2, tp 3) needs 6 ranks, but the communicator has 4"), size);
        });
    }

    @Test
    void buffersAreReachedWithoutCopies() throws Exception {
        Ranks.run(2, comm -> {
            try (Buffer buffer = Buffer.create(comm, 4096)) {
                assertEquals(4096, buffer.sizeBytes());
                assertEquals(4096, buffer.bytes().remaining());
                final Tensor tensor = buffer.tensor(64, DType.F32, 4);
                assertEquals(0, (tensor.address() - 64) % 4096);
                tensor.floats().put(0, comm.rank() + 1);
                comm.allReduce(tensor, ReduceOp.SUM);
                assertEquals(3f, tensor.floats().get(0));
                assertEquals(3f, buffer.bytes().getFloat(64));
                assertThrows(IndexOutOfBoundsException.class, () -> buffer.tensor(4090, DType.F32, 2));
                assertThrows(IndexOutOfBoundsException.class, () -> buffer.tensor(2, DType.F32, 2));
                assertThrows(IndexOutOfBoundsException.class, () -> buffer.tensor(-4, DType.F32, 1));
            }
            assertThrows(IllegalArgumentException.class, () -> Buffer.create(comm, -1));
        });
    }

    @Test
    void ranksThatDisagreeAreNamed() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options())) {
                final Tensor tensor = Tensor.zeros(DType.F32, 4 + rank);
                tensor.floats().put(3, 7);
                final TesseraException error =
                        assertThrows(TesseraMismatchException.class, () -> comm.allReduce(tensor, ReduceOp.SUM));
                assertEquals(ErrorCode.MISMATCH, error.code());
                assertTrue(error.getMessage().contains(
                        "rank 0 called all_reduce of 4 f32 (sum), rank 1 all_reduce of 5 f32 (sum)"), error.getMessage());
                assertEquals(7, tensor.floats().get(3), "nothing was overwritten");
                // Poisoned: what comes after is aborted, with the first error as its cause.
                final TesseraAbortedException later = assertThrows(TesseraAbortedException.class, comm::barrier);
                assertEquals(TesseraMismatchException.class, later.getCause().getClass());
                assertEquals(ErrorCode.MISMATCH, comm.error().code());
                store.set("failed on " + rank, new byte[0]);
                store.await("failed on " + (1 - rank));
            }
        });
    }

    @Test
    void aRankThatNeverComesIsNamedAtTheDeadline() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, new CommOptions().timeout(Duration.ofSeconds(2)))) {
                if (rank == 0) {
                    final TesseraTimeoutException error =
                            assertThrows(TesseraTimeoutException.class, comm::barrier);
                    assertEquals(1, error.peer(), error.getMessage());
                    assertEquals("barrier", error.operation());
                    assertTrue(error.getMessage().contains("rank 1"), error.getMessage());
                    store.set("timed out", new byte[0]);
                }
                store.await("timed out");
            }
        });
    }

    @Test
    void aTimeoutCountsFromWhenItIsSet() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            final CommOptions options = new CommOptions().heartbeatTimeout(Duration.ofSeconds(5));
            try (Comm comm = Comm.create(store, rank, 2, options)) {
                comm.barrier();
                if (rank == 0) {
                    comm.setTimeout(Duration.ofMillis(250));
                    assertEquals(Duration.ofMillis(250), comm.timeout());
                    final TesseraTimeoutException error =
                            assertThrows(TesseraTimeoutException.class, comm::barrier);
                    assertTrue(error.getMessage().contains("0.25 s"), error.getMessage());
                    store.set("timed out", new byte[0]);
                }
                store.await("timed out");
            }
        });
    }

    @Test
    void aCommunicatorWithoutItsPeersTimesOut() throws Exception {
        Ranks.runStores(1, (store, rank) -> assertThrows(TesseraTimeoutException.class,
                () -> Comm.create(store, 0, 2, new CommOptions().timeout(Duration.ofMillis(200)))));
    }

    @Test
    void interruptionEndsACollectiveAndItsFuture() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options())) {
                if (rank == 0) {
                    final Thread self = Thread.currentThread();
                    final Thread interrupter = new Thread(self::interrupt);
                    interrupter.start();
                    final TesseraInterruptedException error =
                            assertThrows(TesseraInterruptedException.class, comm::barrier);
                    assertEquals(ErrorCode.INTERRUPTED, error.code());
                    assertTrue(Thread.interrupted(), "the interrupted status is kept");
                    interrupter.join();
                    store.set("interrupted", new byte[0]);
                } else {
                    store.await("interrupted");
                }
            }
        });
    }

    @Test
    void anAbortReachesThePeers() throws Exception {
        Ranks.run(2, comm -> {
            if (comm.rank() == 0) {
                comm.abort("the test says so");
                comm.abort(null);
                assertThrows(TesseraAbortedException.class, comm::barrier);
            } else {
                final TesseraAbortedException error = assertThrows(TesseraAbortedException.class, comm::barrier);
                assertTrue(chain(error).contains("the test says so"), chain(error));
            }
        });
    }

    private static String chain(Throwable error) {
        final StringBuilder text = new StringBuilder();
        for (Throwable e = error; e != null; e = e.getCause()) {
            text.append(e.getMessage()).append(" <- ");
        }
        return text.toString();
    }

    @Test
    void aFailedOperationFailsItsFuture() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options())) {
                if (rank == 0) {
                    final Work work = comm.barrierAsync();
                    final CompletableFuture<Void> future = work.toFuture();
                    work.close(); // forgotten: the future still hears of it
                    comm.abort("enough");
                    final Throwable cause = assertThrows(CompletionException.class,
                            () -> future.orTimeout(Patience.seconds(20), TimeUnit.SECONDS).join()).getCause();
                    assertEquals(TesseraAbortedException.class, cause.getClass(), cause::toString);
                }
                store.set("done " + rank, new byte[0]);
                store.await("done " + (1 - rank));
            }
        });
    }

    @Test
    void aFutureAskedForAfterTheFailure() throws Exception {
        Ranks.run(1, comm -> {
            comm.abort("before");
            final AtomicReference<Work> work = new AtomicReference<>();
            try {
                work.set(comm.barrierAsync());
            } catch (TesseraAbortedException atOnce) {
                return; // as good
            }
            Ranks.eventually("it is done", work.get()::isDone);
            assertTrue(work.get().toFuture().isCompletedExceptionally());
        });
    }

    @Test
    void badArgumentsAreRefusedBeforeAnythingMoves() throws Exception {
        Ranks.run(1, comm -> {
            assertThrows(TesseraInvalidArgumentException.class, () -> comm.broadcast(floats(1), 1));
            assertThrows(TesseraInvalidArgumentException.class, () -> comm.allGather(floats(1), floats(1, 2)));
            for (final Tensor tensor : List.of(Tensor.zeros(DType.BOOL, 2), Tensor.zeros(DType.I16, 2),
                    Tensor.ofAddress(4096, DType.F32, Device.cuda(0), 4))) {
                final TesseraException error = assertThrows(TesseraException.class,
                        () -> comm.allReduce(tensor, ReduceOp.SUM));
                assertEquals(ErrorCode.UNSUPPORTED, error.code(), error.getMessage());
            }
            assertThrows(IllegalArgumentException.class, () -> comm.allGather(floats(1), List.of()));
            assertThrows(NullPointerException.class, () -> comm.allReduce((Tensor) null, ReduceOp.SUM));
            assertThrows(NullPointerException.class, () -> comm.allReduce(floats(1), null));
            assertThrows(NullPointerException.class, () -> comm.allGather(null, floats(1)));
            assertThrows(TesseraException.class, () -> comm.send(floats(1), 0, 0));
            comm.barrier(); // as good as before
        });
        assertThrows(NullPointerException.class, () -> Comm.create(null, 0, 1));
        assertThrows(IllegalArgumentException.class, () -> new CommOptions().timeout(Duration.ofMillis(-5)));
        assertThrows(IllegalArgumentException.class, () -> new CommOptions().heartbeatTimeout(Duration.ofMillis(-5)));
        Ranks.run(1, comm -> {
            assertThrows(TesseraInvalidArgumentException.class, () -> comm.setTimeout(Duration.ZERO));
            assertThrows(IllegalArgumentException.class, () -> comm.setTimeout(Duration.ofMillis(-5)));
            assertThrows(NullPointerException.class, () -> comm.setTimeout(null));
        });
        Ranks.runStores(1, (store, rank) -> {
            assertThrows(TesseraInvalidArgumentException.class, () -> Comm.create(store, 2, 1));
            assertThrows(TesseraInvalidArgumentException.class, () -> Comm.create(store, 0, 0));
            assertThrows(TesseraInvalidArgumentException.class,
                    () -> Comm.create(store, 0, 1, new CommOptions().backend("carrier pigeon")));
        });
    }

    @ParameterizedTest
    @ValueSource(strings = {"nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"})
    void aBackendForGpusIsUnsupportedWithoutADriver(String backend) {
        final TesseraException error = assertThrows(TesseraException.class,
                () -> Comm.fromEnv(Ranks.options().backend(backend)));
        assertEquals(ErrorCode.UNSUPPORTED, error.code());
        assertTrue(error.getMessage().contains("there is no NVIDIA driver"), error.getMessage());
    }

    @Test
    void withoutALauncherThereIsOneRank() {
        try (Comm comm = Comm.fromEnv(Ranks.options())) {
            assertEquals(1, comm.worldSize());
            assertEquals(0, comm.rank());
            assertEquals("self", comm.transport());
            final Tensor same = floats(4);
            comm.allReduce(same, ReduceOp.SUM);
            assertValues(same, 4);
        }
        Comm.fromEnv().close();
    }

    @Test
    void oneRankHasATurnWhileTheOthersWait() throws Exception {
        Ranks.run(3, comm -> {
            final Optional<String> made = comm.turn(1, Ranks.DEADLINE, (Turn turn) -> {
                turn.progress(1, 2);
                turn.progress(2, 2);
                return "done";
            });
            assertEquals(comm.rank() == 1 ? Optional.of("done") : Optional.empty(), made);
            comm.barrier();
        });
    }

    @Test
    void aTurnThatFailsFailsEverywhere() throws Exception {
        Ranks.run(2, comm -> {
            if (comm.rank() == 0) {
                final java.io.IOException own = assertThrows(java.io.IOException.class, () -> comm.turn(0, Ranks.DEADLINE, turn -> {
                    throw new java.io.IOException("no data");
                }));
                assertEquals("no data", own.getMessage());
            } else {
                final TesseraException other =
                        assertThrows(TesseraException.class, () -> comm.turn(0, Ranks.DEADLINE, turn -> null));
                assertEquals(ErrorCode.USER, other.code());
                assertTrue(other.getMessage().contains("rank 0 failed in its turn: java.io.IOException: no data"));
            }
            comm.barrier();
            assertThrows(TesseraInvalidArgumentException.class, () -> comm.turn(2, Ranks.DEADLINE, turn -> null));
            assertThrows(TesseraInvalidArgumentException.class, () -> comm.turn(0, Duration.ZERO, turn -> null));
            assertThrows(NullPointerException.class, () -> comm.turn(0, Ranks.DEADLINE, null));
            comm.turn(1, Ranks.DEADLINE, turn -> {
                final TesseraException inner = assertThrows(
                        TesseraInvalidStateException.class, () -> comm.turn(0, Ranks.DEADLINE, again -> null));
                assertTrue(inner.getMessage().contains("begins inside the turn of rank 1"), inner.getMessage());
                assertThrows(TesseraInvalidStateException.class, comm::barrier);
                return null;
            });
            comm.barrier();
        });
    }

    /** Arguments that one rank refuses are refused on all; nobody waits. */
    @Test
    void whatOneRankRefusesIsRefusedOnAll() throws Exception {
        final String config = "{\"train_micro_batch_size_per_gpu\": 1, \"optimizer\": {\"type\": \"SGD\"}}";
        Ranks.run(3, comm -> {
            final boolean isBad = comm.rank() == 1;
            final Params params = Params.of("w", Tensor.zeros(DType.F32, 4));
            final List<Runnable> creations = List.of(
                    () -> Ddp.create(comm, params, isBad ? null : new DdpOptions()),
                    () -> Fsdp.create(comm, List.of(FsdpUnit.of("u", params)), isBad ? null : new FsdpOptions()),
                    () -> Engine.on(comm).unit("u", params).build(isBad ? config + '\0' : config),
                    () -> Mesh.over(comm).dim(isBad ? "d\0" : "dp", 3).build());
            for (int i = 0; i < creations.size(); ++i) {
                final Runnable creation = creations.get(i);
                final String which = "creation " + i;
                if (isBad) {
                    assertThrows(RuntimeException.class, creation::run, which);
                } else {
                    final TesseraException error =
                            assertThrows(TesseraInvalidArgumentException.class, creation::run, which);
                    assertEquals(1, error.peer(), which + ": " + error);
                }
            }
            if (isBad) {
                comm.refuse(Creation.MODEL, new IllegalStateException("no file"));
            } else {
                final TesseraException error = assertThrows(TesseraException.class, () -> Ddp.create(comm, params));
                assertEquals(ErrorCode.USER, error.code());
                assertTrue(error.getMessage().contains("rank 1: java.lang.IllegalStateException: no file"),
                        error.getMessage());
            }
            comm.barrier();
        });
    }

    /** So are objects that one rank has closed and values that fail when they are read. What C refuses is refused once. */
    @Test
    void whatOneRankCannotReadIsRefusedOnAll(@TempDir Path root) throws Exception {
        final String config = "{\"train_micro_batch_size_per_gpu\": 1, \"optimizer\": {\"type\": \"SGD\"}}";
        final Storage shared = new StorageTest.MapStorage(true);
        final Storage broken = new StorageTest.MapStorage(true) {
            @Override
            public long partBytes() {
                throw new IllegalStateException("no size");
            }
        };
        Ranks.run(2, comm -> {
            final boolean isBad = comm.rank() == 1;
            final Params params = Params.of("w", Tensor.zeros(DType.F32, 4));
            try (Mesh mesh = Mesh.over(comm).dim("dp", 2).dim("tp", 1).build();
                    Layout layout = Layout.of(new long[] {4}, new int[] {2}, Placement.shard(0));
                    LrSchedule schedule = LrSchedule.exponential(0.5);
                    TensorParallel tp = TensorParallel.over(mesh, "tp").params(params).rule("w", TensorParallel.Style.REPLICATE)
                            .build()) {
                final Comm rows = mesh.comm("dp");
                final Params slices = Params.of("w", tp.slice("w"));
                if (isBad) {
                    List.of(layout, schedule, tp).forEach(NativeObject::close);
                }
                final Map<ErrorCode, List<Runnable>> creations = Map.of(
                        ErrorCode.INVALID_ARGUMENT, List.of(
                                () -> Saver.at(comm, root).writerVersion(isBad ? "1\0" : "1").open(),
                                () -> comm.split(0, 0, isBad ? null : Ranks.options())),
                        ErrorCode.USER, List.of(
                                () -> Saver.at(comm, Path.of("r")).storage(isBad ? broken : shared).open(),
                                () -> TensorParallel.over(mesh, "dp").params(params)
                                        .rule("w", TensorParallel.Style.layout(layout)).build(),
                                () -> Ddp.create(rows, slices, new DdpOptions().tp(tp)),
                                () -> Fsdp.create(rows, List.of(FsdpUnit.of("u", slices)), new FsdpOptions().tp(tp)),
                                () -> Engine.on(comm).unit("u", params).schedule(schedule).build(config)));
                for (ErrorCode code : List.of(ErrorCode.INVALID_ARGUMENT, ErrorCode.USER)) {
                    for (int i = 0; i < creations.get(code).size(); ++i) {
                        final Runnable creation = creations.get(code).get(i);
                        final String which = "creation " + i + " of " + code;
                        if (isBad) {
                            final RuntimeException own = assertThrows(RuntimeException.class, creation::run, which);
                            assertFalse(own instanceof TesseraException, which + ": " + own);
                        } else {
                            final TesseraException error = assertThrows(TesseraException.class, creation::run, which);
                            assertEquals(code, error.code(), which + ": " + error);
                            assertEquals(1, error.peer(), which + ": " + error);
                        }
                    }
                }
                assertThrows(TesseraInvalidArgumentException.class,
                        () -> Saver.at(comm, root).format(isBad ? "unknown" : "tessera").open());
                comm.barrier(); // which a second refusal would meet
                rows.barrier();
                Saver.at(comm, root).open().close();
            }
            comm.barrier();
        });
    }
}
