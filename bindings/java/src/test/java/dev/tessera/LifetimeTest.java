package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.lang.ref.WeakReference;
import java.nio.FloatBuffer;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicReference;
import java.util.logging.Handler;
import java.util.logging.LogRecord;
import java.util.logging.Logger;
import org.junit.jupiter.api.Test;

/** Closing, forgetting, and using while closing. */
class LifetimeTest {
    private static final class Recorder extends Handler {
        final List<String> lines = new CopyOnWriteArrayList<>();

        @Override
        public void publish(LogRecord record) {
            lines.add(new java.util.logging.SimpleFormatter().formatMessage(record));
        }

        @Override
        public void flush() {}

        @Override
        public void close() {}
    }

    private static Params params() {
        return Params.of("w", Tensor.copyOf(new float[] {1, 2, 3, 4}, 2, 2)).and("b", Tensor.copyOf(new float[] {5, 6}));
    }

    @Test
    void whatIsForgottenIsFreedAndLogged() throws Exception {
        final Logger logger = Logger.getLogger("dev.tessera");
        final Recorder recorder = new Recorder();
        logger.addHandler(recorder);
        logger.setUseParentHandlers(false);
        try {
            final Ref server = forgetAServer();
            final Ref layout = forgetALayout();
            Ranks.collectUntil("both are freed", () -> server.isDestroyed() && layout.isDestroyed());
            assertTrue(recorder.lines.stream().anyMatch(l -> l.contains("a StoreServer was garbage-collected without")),
                    recorder.lines.toString());
            assertTrue(recorder.lines.stream().noneMatch(l -> l.contains("Layout")), recorder.lines.toString());
        } finally {
            logger.removeHandler(recorder);
            logger.setUseParentHandlers(true);
        }
    }

    private static Ref forgetAServer() {
        return StoreServer.serve("127.0.0.1", 0, new StoreOptions().insecure(true)).ref;
    }

    private static Ref forgetALayout() {
        return Layout.of(new long[] {4}, new int[] {2}, Placement.shard(0)).ref;
    }

    @Test
    void viewsOutliveTheObjectThatGaveThem() throws Exception {
        Ranks.run(1, comm -> {
            final Ddp ddp = Ddp.create(comm, params());
            FloatBuffer grad = ddp.grad(0);
            grad.put(3, 42f);
            assertSame(grad, ddp.grad(0));
            final Ref ref = ddp.ref;
            ddp.close();
            assertThrows(IllegalStateException.class, () -> ddp.grad(0));
            System.gc();
            assertFalse(ref.isDestroyed(), "the view would point at nothing");
            assertEquals(42f, grad.get(3));
            grad = null;
            Ranks.collectUntil("the memory is given back", ref::isDestroyed);
        });
    }

    @Test
    void withoutViewsClosingFreesAtOnce() throws Exception {
        Ranks.run(1, comm -> {
            final Ddp ddp = Ddp.create(comm, params());
            ddp.readyAll();
            ddp.await();
            ddp.close();
            assertTrue(ddp.ref.isDestroyed());
            final Buffer buffer = Buffer.create(comm, 64);
            buffer.close();
            assertTrue(buffer.ref.isDestroyed());
        });
    }

    @Test
    void closingAModelClosesWhatWasMadeFromIt() throws Exception {
        Ranks.run(1, comm -> {
            final Ddp ddp = Ddp.create(comm, params());
            final Optimizer optimizer = Optimizer.adamW(ddp).build();
            final State state = State.of("model", ddp).with("optim", optimizer);
            ddp.close();
            assertTrue(optimizer.ref.isDestroyed() && state.ref.isDestroyed() && ddp.ref.isDestroyed());
            final String message = assertThrows(IllegalStateException.class, optimizer::step).getMessage();
            assertTrue(message.contains("Ddp that it belongs to was closed"), message);
            assertThrows(IllegalStateException.class, () -> state.put("x", 1));
            optimizer.close();
            state.close();
        });
    }

    @Test
    void closingACommunicatorEndsACallOfAnotherThread() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            final Comm comm = Comm.create(store, rank, 2, Ranks.options());
            if (rank == 1) { // takes no part; leaves when rank 0's call has failed
                store.await("done");
                comm.close();
                return;
            }
            final CountDownLatch inside = new CountDownLatch(1);
            final AtomicReference<Throwable> thrown = new AtomicReference<>();
            final Thread caller = new Thread(() -> {
                inside.countDown();
                try {
                    comm.barrier();
                } catch (Throwable error) {
                    thrown.set(error);
                }
            });
            caller.start();
            inside.await();
            Ranks.eventually("the barrier has begun", () -> Ranks.isBusy(comm));
            assertThrows(IllegalStateException.class, () -> comm.barrier(), "two threads at once");
            comm.close();
            caller.join(Patience.millis(10_000));
            assertFalse(caller.isAlive());
            assertEquals(TesseraAbortedException.class, thrown.get().getClass(), () -> String.valueOf(thrown.get()));
            assertTrue(comm.ref.isDestroyed());
            assertThrows(IllegalStateException.class, () -> comm.barrier());
            store.set("done", new byte[0]);
        });
    }

    @Test
    void closingACommunicatorEndsALaunchOfItsPlan() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            final Comm comm = Comm.create(store, rank, 2, Ranks.options().timeout(Patience.of(Duration.ofSeconds(60))));
            final Plan plan = Plan.of(comm, Plan.Collective.BARRIER, List.of(), List.of(), ReduceOp.SUM, 0);
            if (rank == 1) { // takes no part
                store.await("done");
                comm.close();
                return;
            }
            plan.start();
            final Thread closing = new Thread(comm::close);
            closing.start();
            closing.join(Patience.millis(20_000));
            store.set("done", new byte[0]);
            assertFalse(closing.isAlive(), "it waits for the deadline of what was launched");
            assertTrue(comm.ref.isDestroyed() && plan.ref.isDestroyed());
        });
    }

    @Test
    void closingACommunicatorEndsABackwardOfAnotherThread() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            final Comm comm = Comm.create(store, rank, 2, Ranks.options());
            final Ddp ddp = Ddp.create(comm, params());
            if (rank == 1) { // its backward never ends
                store.await("done");
            } else {
                ddp.readyAll();
                final AtomicReference<Throwable> thrown = new AtomicReference<>();
                final Thread caller = new Thread(() -> {
                    try {
                        ddp.await();
                    } catch (Throwable error) {
                        thrown.set(error);
                    }
                });
                caller.start();
                Ranks.eventually("it waits", () -> Ranks.isBusy(ddp));
                comm.close();
                caller.join(Patience.millis(10_000));
                assertFalse(caller.isAlive());
                assertEquals(TesseraAbortedException.class, thrown.get().getClass(), () -> String.valueOf(thrown.get()));
                assertThrows(TesseraException.class, ddp::readyAll);
                store.set("done", new byte[0]);
            }
            ddp.close();
            comm.close();
            assertTrue(ddp.ref.isDestroyed() && comm.ref.isDestroyed());
        });
    }

    @Test
    void manyThreadsClosingAndUsingNeverMeetFreedMemory() throws Exception {
        for (int round = 0; round < 50; ++round) {
            final Layout layout = Layout.of(new long[] {8, 8}, new int[] {4}, Placement.shard(0));
            final CountDownLatch go = new CountDownLatch(1);
            final List<Throwable> wrong = new CopyOnWriteArrayList<>();
            final Thread[] users = new Thread[3];
            for (int t = 0; t < users.length; ++t) {
                users[t] = new Thread(() -> {
                    try {
                        go.await();
                        for (;;) {
                            assertEquals(1, layout.boxes(1).size());
                        }
                    } catch (IllegalStateException closed) {
                        // the expected end
                    } catch (Throwable error) {
                        wrong.add(error);
                    }
                });
                users[t].start();
            }
            go.countDown();
            layout.close();
            for (Thread user : users) {
                user.join(Patience.millis(10_000));
                assertFalse(user.isAlive());
            }
            assertEquals(List.of(), wrong);
            assertTrue(layout.ref.isDestroyed());
        }
    }

    @Test
    void aBufferClosedUnderAnOperationIsFreedWhenThatIsDone() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options())) {
                final Buffer buffer = Buffer.create(comm, 4096);
                if (rank == 1) {
                    store.await("closed");
                    comm.allReduce(buffer.tensor(0, DType.F32, 1024), ReduceOp.SUM);
                    buffer.close();
                    return;
                }
                final Work work = comm.allReduceAsync(buffer.tensor(0, DType.F32, 1024), ReduceOp.SUM);
                buffer.close();
                buffer.close();
                System.gc();
                assertFalse(buffer.ref.isDestroyed(), "freed while the library may write to it");
                store.set("closed", new byte[0]);
                work.await();
                Ranks.collectUntil("it is freed in the end", buffer.ref::isDestroyed);
            }
        });
    }

    @Test
    void memoryOfAListStaysAlthoughTheListIsCleared() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options())) {
                final List<Tensor> list = new java.util.ArrayList<>(List.of(Tensor.zeros(DType.F32, 1 << 16)));
                if (rank == 1) {
                    store.await("cleared");
                    comm.allReduce(list, ReduceOp.SUM);
                    return;
                }
                final WeakReference<Tensor> tensor = new WeakReference<>(list.get(0));
                final WeakReference<Object> other = new WeakReference<>(new Object());
                final Work work = comm.allReduceAsync(list, ReduceOp.SUM);
                list.clear();
                Ranks.collectUntil("garbage is collected", () -> other.get() == null);
                System.gc();
                assertTrue(tensor.get() != null, "freed while the library may write to it");
                store.set("cleared", new byte[0]);
                work.await();
                Ranks.collectUntil("it is freed in the end", () -> tensor.get() == null);
            }
        });
    }

    @Test
    void memoryOfForgottenWorkStaysUntilItIsDone() throws Exception {
        Ranks.run(2, comm -> {
            for (int i = 0; i < 20; ++i) {
                comm.allReduceAsync(Tensor.copyOf(new float[4096]), ReduceOp.SUM); // both work and tensor are dropped
                if (i % 5 == 0) {
                    System.gc();
                }
            }
            final Tensor last = Tensor.copyOf(new float[] {comm.rank() + 1});
            try (Work work = comm.allReduceAsync(last, ReduceOp.SUM)) {
                assertTrue(work.await(Patience.of(Duration.ofSeconds(20))));
            }
            assertEquals(3f, last.floats().get(0));
        });
    }
}
