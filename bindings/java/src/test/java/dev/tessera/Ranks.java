package dev.tessera;

import java.nio.file.Files;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;

/**
 * Ranks as threads of this JVM, each with a store connection and a communicator of its own. A run ends with the error of
 * the lowest rank that failed of itself, and is given up after a minute.
 */
final class Ranks {
    static final Duration DEADLINE = Patience.of(Duration.ofSeconds(20));
    private static final long GIVE_UP_MS = Patience.millis(60_000);

    private Ranks() {}

    interface Body {
        void run(Comm comm) throws Exception;
    }

    interface StoreBody {
        void run(Store store, int rank) throws Exception;
    }

    static String newToken() {
        final byte[] random = new byte[32];
        new SecureRandom().nextBytes(random);
        final StringBuilder hex = new StringBuilder();
        for (byte b : random) {
            hex.append(String.format("%02x", b));
        }
        return hex.toString();
    }

    static CommOptions options() {
        return new CommOptions().timeout(DEADLINE);
    }

    static void run(int ranks, Body body) throws Exception {
        run(ranks, options(), body);
    }

    static void run(int ranks, CommOptions options, Body body) throws Exception {
        runStores(ranks, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, ranks, options)) {
                body.run(comm);
            }
        });
    }

    static void runStores(int ranks, StoreBody body) throws Exception {
        final StoreOptions options = new StoreOptions().token(newToken()).timeout(DEADLINE);
        try (StoreServer server = StoreServer.serve("127.0.0.1", 0, options)) {
            final String uri = "tcp://127.0.0.1:" + server.port();
            final Map<Integer, Throwable> errors = new ConcurrentHashMap<>();
            final List<Thread> threads = new ArrayList<>();
            for (int r = 0; r < ranks; ++r) {
                final int rank = r;
                threads.add(new Thread(() -> {
                    try (Store store = Store.open(uri, options)) {
                        body.run(store, rank);
                    } catch (Throwable error) {
                        errors.put(rank, error);
                    }
                }, "rank-" + rank));
            }
            threads.forEach(Thread::start);
            final long end = System.currentTimeMillis() + GIVE_UP_MS;
            for (Thread thread : threads) {
                thread.join(Math.max(1, end - System.currentTimeMillis()));
                if (thread.isAlive()) {
                    final AssertionError hung = new AssertionError(thread.getName() + " still runs");
                    hung.setStackTrace(thread.getStackTrace());
                    errors.values().forEach(hung::addSuppressed);
                    throw hung;
                }
            }
            rethrow(new TreeMap<>(errors));
        }
    }

    private static void rethrow(Map<Integer, Throwable> errors) throws Exception {
        if (errors.isEmpty()) {
            return;
        }
        // A rank that only heard of another's failure is not the cause.
        final Throwable first = errors.values().stream()
                .filter(e -> !(e instanceof TesseraAbortedException || e instanceof TesseraPeerLostException))
                .findFirst().orElse(errors.values().iterator().next());
        errors.values().stream().filter(e -> e != first).forEach(first::addSuppressed);
        if (first instanceof Error) {
            throw (Error) first;
        }
        throw (Exception) first;
    }

    /** Waits until {@code condition} holds; fails after the deadline. */
    static void eventually(String what, java.util.function.BooleanSupplier condition) throws InterruptedException {
        final long end = System.nanoTime() + DEADLINE.toNanos();
        while (!condition.getAsBoolean()) {
            if (System.nanoTime() > end) {
                throw new AssertionError("it did not come to pass: " + what);
            }
            Thread.yield();
        }
    }

    /** Whether a thread is inside an exclusive call. */
    static boolean isBusy(NativeObject object) {
        return object.ref.isBusy(); // asked, not tried: an attempt would get in the way of the thread that is awaited
    }

    static void collectUntil(String what, java.util.function.BooleanSupplier condition) throws InterruptedException {
        eventually(what, () -> {
            System.gc();
            return condition.getAsBoolean();
        });
    }

    static void deleteTree(Path root) throws Exception {
        try (java.util.stream.Stream<Path> paths = Files.walk(root)) {
            final List<Path> all = new ArrayList<>();
            paths.forEach(all::add);
            for (int i = all.size() - 1; i >= 0; --i) {
                Files.delete(all.get(i));
            }
        }
    }
}
