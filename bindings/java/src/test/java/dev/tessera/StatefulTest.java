package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.lang.ref.WeakReference;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class StatefulTest {
    @TempDir
    Path root;

    /** An action in a callback. */
    private interface Action {
        void run() throws Exception;
    }

    /** Values and a log of the calls; each call does something else before, if it is said. */
    private static final class Feed implements Stateful {
        Map<String, Object> values = new HashMap<>();
        final List<String> calls = new ArrayList<>();
        final List<Thread> threads = new ArrayList<>();
        Action onCollect = () -> {};
        Action onCheck = () -> {};
        Action onLoad = () -> {};

        private void called(String name, Action action) throws Exception {
            calls.add(name);
            threads.add(Thread.currentThread());
            action.run();
        }

        @Override
        public Map<String, Object> stateDict() throws Exception {
            called("collect", onCollect);
            return values;
        }

        @Override
        public void checkStateDict(Map<String, Object> given) throws Exception {
            called("check", onCheck);
        }

        @Override
        public void loadStateDict(Map<String, Object> given) throws Exception {
            called("load", onLoad);
            values = new HashMap<>(given);
        }
    }

    private static Feed feed(long epoch) {
        final Feed feed = new Feed();
        feed.values.put("epoch", epoch);
        return feed;
    }

    @Test
    void valuesOfEveryKindAreCollectedAtASaveAndComeBackAtALoad() {
        final Feed feed = new Feed();
        feed.values.put("epoch", 3L);
        feed.values.put("rate", Double.NaN);
        feed.values.put("note", "größe");
        feed.values.put("nothing", null);
        feed.values.put("nested", Map.of("on", true, "list", List.of(1L, "two")));
        feed.values.put("bytes", new byte[] {0, -1});
        final Map<String, Object> saved = Map.copyOf(withoutNull(feed.values));
        try (Saver saver = Saver.at(null, root).open(); State state = new State().with("loader", feed)) {
            saver.save(1, state);
            assertEquals(List.of("collect"), feed.calls);
            feed.values.replaceAll((name, value) -> "changed");
            assertEquals(1, saver.resume(state));
            assertEquals(List.of("collect", "collect", "check", "load"), feed.calls);
            assertTrue(feed.threads.stream().allMatch(thread -> thread == Thread.currentThread()));
            assertEquals(3L, state.getLong("loader.epoch"));
            assertEquals("größe", state.get("loader.note"));
        }
        assertTrue(feed.values.containsKey("nothing"));
        assertNull(feed.values.get("nothing"));
        assertArrayEquals(new byte[] {0, -1}, (byte[]) feed.values.get("bytes"));
        for (String name : List.of("epoch", "rate", "note", "nested")) {
            assertEquals(saved.get(name), feed.values.get(name), name);
        }
    }

    private static Map<String, Object> withoutNull(Map<String, Object> values) {
        final Map<String, Object> rest = new HashMap<>(values);
        rest.values().removeIf(value -> value == null);
        return rest;
    }

    @Test
    void aSaveInTheBackgroundCollectsBeforeItReturns() throws Exception {
        final Feed feed = feed(3);
        try (Saver saver = Saver.at(null, root).open(); State state = new State().with("loader", feed)) {
            final var done = saver.saveAsync(1, state);
            feed.values.put("epoch", 4L);
            assertEquals(List.of(Thread.currentThread()), feed.threads);
            done.get(Patience.seconds(20), TimeUnit.SECONDS);
            saver.resume(state);
        }
        assertEquals(3L, feed.values.get("epoch"));
    }

    @Test
    void whatItThrowsBecomesTheErrorAndIsCarriedByIt() {
        final Feed feed = feed(3);
        try (Saver saver = Saver.at(null, root).open(); State state = new State().with("loader", feed)) {
            final RuntimeException lost = new RuntimeException("the queue is gone");
            feed.onCollect = () -> {
                throw lost;
            };
            TesseraException error = assertThrows(TesseraException.class, () -> saver.save(1, state));
            assertEquals(ErrorCode.USER, error.code());
            assertTrue(error.getMessage().contains(
                    "collecting the values of 'loader' failed: RuntimeException: the queue is gone"), error.getMessage());
            assertSame(lost, error.getSuppressed()[0]);
            error = assertThrows(TesseraException.class, () -> saver.saveAsync(1, state));
            assertSame(lost, error.getSuppressed()[0]);
            error = assertThrows(TesseraException.class, () -> state.getLong("loader.epoch"));
            assertSame(lost, error.getSuppressed()[0]);
            // What came of another call before is not meant.
            error = assertThrows(TesseraException.class, () -> state.getLong("nothing"));
            assertEquals(0, error.getSuppressed().length);

            feed.onCollect = () -> {
                throw new IOException("the disk is gone");
            };
            assertThrows(TesseraIoException.class, () -> saver.save(1, state));
            feed.onCollect = () -> {
                throw new StackOverflowError();
            };
            error = assertThrows(TesseraException.class, () -> saver.save(1, state));
            assertTrue(error.getMessage().contains("StackOverflowError"), error.getMessage());
            feed.onCollect = () -> {};
            saver.save(1, state);
        }
    }

    @Test
    void whatCannotBeSavedIsRefusedByName() {
        final Feed feed = feed(3);
        try (Saver saver = Saver.at(null, root).open(); State state = new State().with("loader", feed)) {
            feed.values.put("thread", Thread.currentThread());
            TesseraException error = assertThrows(TesseraException.class, () -> saver.save(1, state));
            assertTrue(error.getMessage().contains("java.lang.Thread cannot be saved in a checkpoint"), error.getMessage());
            feed.values = null;
            error = assertThrows(TesseraException.class, () -> saver.save(1, state));
            assertTrue(error.getMessage().contains("stateDict() returned null"), error.getMessage());
            feed.values = new HashMap<>();
            feed.values.put("", 1L);
            error = assertThrows(TesseraInvalidArgumentException.class, () -> saver.save(1, state));
            assertTrue(error.getMessage().contains("is empty"), error.getMessage());
            feed.values = new HashMap<>();
            feed.values.put(null, 1L);
            assertThrows(TesseraException.class, () -> saver.save(1, state));
        }
    }

    @Test
    void onePrefixHasOneObject() {
        try (State state = new State().with("loader", feed(1)).put("data.x", 1L)) {
            for (String taken : List.of("loader", "loader.inner", "data", "")) {
                assertThrows(TesseraInvalidArgumentException.class, () -> state.with(taken, feed(2)), taken);
            }
            assertThrows(NullPointerException.class, () -> state.with("x", (Stateful) null));
            assertThrows(TesseraInvalidArgumentException.class, () -> state.put("loader.other", 1L));
            assertEquals(1L, state.getLong("loader.epoch"));
        }
    }

    @Test
    void aCheckThatRefusesLeavesAllAsItWas() {
        final Feed feed = feed(3);
        final Tensor weights = Tensor.zeros(DType.F32, 4);
        try (Saver saver = Saver.at(null, root).open();
             State state = State.of("w", weights).with("loader", feed)) {
            saver.save(1, state);
            feed.values.put("epoch", 9L);
            weights.floats().put(0, 7f);
            feed.onCheck = () -> {
                throw new IllegalArgumentException("epoch 3 is too early");
            };
            final TesseraException error = assertThrows(TesseraException.class, () -> saver.resume(state));
            assertTrue(error.getMessage().contains("'loader' refused the values of the checkpoint: "
                    + "IllegalArgumentException: epoch 3 is too early"), error.getMessage());
            assertEquals(7f, weights.floats().get(0));
            assertEquals(9L, feed.values.get("epoch"));
            feed.onCheck = () -> {};
            feed.onLoad = () -> {
                throw new IOException("no room");
            };
            try (Checkpoint checkpoint = Checkpoint.open(root)) {
                final TesseraIoException late =
                        assertThrows(TesseraIoException.class, () -> checkpoint.load(state));
                assertEquals("no room", late.getSuppressed()[0].getMessage());
            }
        }
    }

    @Test
    void whatALoadAllowsToBeMissingStays() {
        final Feed feed = feed(3);
        try (Saver saver = Saver.at(null, root).open(); State state = new State().with("loader", feed)) {
            saver.save(1, state);
            feed.values.put("epoch", 4L);
            feed.values.put("new", 5L);
            try (Checkpoint checkpoint = Checkpoint.open(root)) {
                final TesseraMismatchException error =
                        assertThrows(TesseraMismatchException.class, () -> checkpoint.load(state));
                assertTrue(error.getMessage().contains("'loader.new' is missing"), error.getMessage());
                checkpoint.load(state, new LoadOptions().allowMissing(true));
            }
        }
        assertEquals(Map.of("epoch", 3L, "new", 5L), feed.values);
    }

    @Test
    void stateAndSaverAreInUseMeanwhile() {
        final Feed feed = feed(3);
        final List<Throwable> refused = new ArrayList<>();
        try (Saver saver = Saver.at(null, root).open(); State state = new State().with("loader", feed)) {
            feed.onCollect = () -> {
                refused.add(assertThrows(IllegalStateException.class, () -> state.put("x", 1L)));
                refused.add(assertThrows(IllegalStateException.class, () -> state.getLong("loader.epoch")));
                refused.add(assertThrows(IllegalStateException.class, () -> saver.save(2, state)));
                refused.add(assertThrows(IllegalStateException.class, () -> saver.resume(new State())));
                // Another state and saver are nobody's.
                try (Saver other = Saver.at(null, root.resolve("other")).open()) {
                    other.save(1, new State().put("x", 1L));
                }
            };
            saver.save(1, state);
            assertEquals(4, refused.size());
            assertTrue(refused.get(0).getMessage().contains("in use"), refused.get(0).getMessage());
        }
        assertTrue(Files.exists(root.resolve("other/latest")));
    }

    @Test
    void aStateThatItClosesEndsAfterTheSave() {
        final Feed feed = feed(3);
        try (Saver saver = Saver.at(null, root).open()) {
            final State state = new State().with("loader", feed);
            feed.onCollect = state::close;
            saver.save(1, state);
            assertTrue(state.isClosed());
            assertTrue(state.ref.isDestroyed());
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            assertEquals(1, checkpoint.step());
        }
    }

    @Test
    void itIsReachableAsLongAsTheStateAndNoLonger() throws Exception {
        final State state = new State();
        final WeakReference<Feed> gone = added(state);
        System.gc();
        assertEquals(3L, state.getLong("loader.epoch"));
        state.close();
        final WeakReference<Feed> refused = refused();
        for (long end = System.nanoTime() + Ranks.DEADLINE.toNanos(); gone.get() != null || refused.get() != null;) {
            assertFalse(System.nanoTime() > end, "the library still holds the object");
            System.gc();
            Thread.onSpinWait();
        }
    }

    private static WeakReference<Feed> added(State state) {
        final Feed feed = feed(3);
        state.with("loader", feed);
        return new WeakReference<>(feed);
    }

    private static WeakReference<Feed> refused() {
        final Feed feed = feed(3);
        try (State state = new State()) {
            assertThrows(TesseraInvalidArgumentException.class, () -> state.with("", feed));
        }
        return new WeakReference<>(feed);
    }

    @Test
    void oneRanksFailureIsTheSameErrorOnAll() throws Exception {
        Ranks.run(2, comm -> {
            final Feed feed = feed(3);
            final boolean fails = comm.rank() == 1;
            try (Saver saver = Saver.at(comm, root).open(); State state = new State().with("loader", feed)) {
                final Action fail = () -> {
                    if (fails) {
                        throw new IOException("the queue is gone");
                    }
                };
                feed.onCollect = fail;
                TesseraIoException error = assertThrows(TesseraIoException.class, () -> saver.save(1, state));
                assertTrue(error.getMessage().startsWith("rank 1: collecting the values of 'loader' failed"),
                        error.getMessage());
                assertEquals(fails ? 1 : 0, error.getSuppressed().length);
                feed.onCollect = () -> {};
                saver.save(1, state);
                feed.onCheck = fail;
                feed.values.put("epoch", 9L);
                error = assertThrows(TesseraIoException.class, () -> saver.resume(state));
                assertTrue(error.getMessage().startsWith("rank 1: 'loader' refused"), error.getMessage());
                assertEquals(9L, feed.values.get("epoch"));
            }
        });
    }
}
