package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.net.ServerSocket;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Random;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class StoreTest {
    private final StoreOptions options = new StoreOptions().token(Ranks.newToken()).timeout(Ranks.DEADLINE);
    private StoreServer server;
    private Store store;

    @BeforeEach
    void open() {
        server = StoreServer.serve("127.0.0.1", 0, options);
        store = Store.open(uri(), options);
    }

    @AfterEach
    void close() {
        store.close();
        server.close();
    }

    private String uri() {
        return "tcp://127.0.0.1:" + server.port();
    }

    private static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    @Test
    void keepsWhatIsSet() {
        store.set("greeting", bytes("hello"));
        store.set("nothing", new byte[0]);
        final byte[] large = new byte[100_000];
        new Random(1).nextBytes(large);
        store.set("large", large);
        assertEquals("hello", new String(store.get("greeting"), StandardCharsets.UTF_8));
        assertArrayEquals(new byte[0], store.get("nothing"));
        assertArrayEquals(large, store.get("large"));
        assertTrue(store.delete("greeting"));
        assertFalse(store.delete("greeting"));
        assertThrows(TesseraNotFoundException.class, () -> store.get("greeting"));
    }

    @Test
    void addsAndSwapsAtomically() {
        assertEquals(5, store.add("counter", 5));
        assertEquals(-2, store.add("counter", -7));
        assertTrue(store.compareSet("leader", null, bytes("a")));
        assertFalse(store.compareSet("leader", null, bytes("b")));
        assertFalse(store.compareSet("leader", bytes("x"), bytes("b")));
        assertTrue(store.compareSet("leader", bytes("a"), bytes("b")));
        assertArrayEquals(bytes("b"), store.get("leader"));
        store.set("word", bytes("abc"));
        assertEquals(ErrorCode.INVALID_ARGUMENT,
                assertThrows(TesseraException.class, () -> store.add("word", 1)).code());
    }

    @Test
    void waitsForAKeyOfAnother() throws Exception {
        final AtomicReference<Throwable> failure = new AtomicReference<>();
        final Thread waiter = new Thread(() -> {
            try (Store other = Store.open(uri(), options)) {
                other.await("late");
                other.await("late", Duration.ofMillis(1));
            } catch (Throwable error) {
                failure.set(error);
            }
        });
        waiter.start();
        store.set("late", bytes("here"));
        waiter.join(Patience.millis(20_000));
        assertFalse(waiter.isAlive());
        assertEquals(null, failure.get());
    }

    @Test
    void aWaitEndsAtItsDeadline() {
        final TesseraTimeoutException error = assertThrows(TesseraTimeoutException.class,
                () -> store.await("never", Duration.ofMillis(30)));
        assertEquals(ErrorCode.TIMEOUT, error.code());
        assertTrue(error.getMessage().contains("never"), error.getMessage());
    }

    @Test
    void interruptionEndsAWait() throws Exception {
        final AtomicReference<Throwable> thrown = new AtomicReference<>();
        final AtomicReference<Boolean> stillInterrupted = new AtomicReference<>();
        final Thread waiter = new Thread(() -> {
            try {
                store.await("never");
            } catch (Throwable error) {
                thrown.set(error);
                stillInterrupted.set(Thread.currentThread().isInterrupted());
            }
        });
        waiter.start();
        waiter.interrupt(); // before or in the middle of the wait: both must end it
        waiter.join(Patience.millis(5_000));
        assertFalse(waiter.isAlive(), "the wait goes on");
        assertEquals(TesseraInterruptedException.class, thrown.get().getClass(), () -> String.valueOf(thrown.get()));
        assertTrue(stillInterrupted.get());
        store.set("after", bytes("well")); // the store is as good as before
        assertArrayEquals(bytes("well"), store.get("after"));
    }

    @Test
    void refusesAWrongTokenAndAnotherEpoch() {
        assertThrows(TesseraPermissionException.class,
                () -> Store.open(uri(), new StoreOptions().token(Ranks.newToken()).timeout(Ranks.DEADLINE)).close());
        final StoreOptions stale = new StoreOptions().timeout(Ranks.DEADLINE).epoch(7);
        final String token = Ranks.newToken();
        try (StoreServer fresh = StoreServer.serve("127.0.0.1", 0,
                new StoreOptions().token(token).jobId("job").epoch(8))) {
            final String address = "tcp://127.0.0.1:" + fresh.port();
            assertThrows(TesseraException.class, () -> Store.open(address, stale.token(token).jobId("job")).close());
            assertThrows(TesseraException.class, () -> Store.open(address,
                    new StoreOptions().timeout(Ranks.DEADLINE).token(token).jobId("other").epoch(8)).close());
            Store.open(address, new StoreOptions().token(token).jobId("job").epoch(8)).close();
        }
    }

    @Test
    void withoutATokenThereIsAdvice() {
        final TesseraException error = assertThrows(TesseraPermissionException.class,
                () -> Store.open("tcp://192.0.2.1:1", new StoreOptions().timeout(Ranks.DEADLINE)));
        assertTrue(error.getMessage().contains("TESSERA_TOKEN_FILE"), error.getMessage());
    }

    @Test
    void insecureStoresNeedNoToken() {
        final StoreOptions open = new StoreOptions().insecure(true);
        try (StoreServer bare = StoreServer.serve("127.0.0.1", 0, open);
                Store client = Store.open("tcp://127.0.0.1:" + bare.port(), open)) {
            assertEquals(1, client.add("n", 1));
        }
    }

    @Test
    void nobodyAnswers() throws Exception {
        final int port;
        try (ServerSocket probe = new ServerSocket(0)) {
            port = probe.getLocalPort();
        }
        final TesseraException error = assertThrows(TesseraException.class, () -> Store.open(
                "tcp://127.0.0.1:" + port, new StoreOptions().token(Ranks.newToken()).timeout(Duration.ofMillis(200))));
        assertEquals(ErrorCode.TIMEOUT, error.code());
        assertEquals(ErrorCode.IO, assertThrows(TesseraException.class,
                () -> StoreServer.serve("127.0.0.1", server.port(), options)).code());
    }

    @Test
    void filesServeAsAStore(@TempDir Path directory) {
        try (Store files = Store.open("file://" + directory, options)) {
            files.set("k", bytes("v"));
            assertArrayEquals(bytes("v"), files.get("k"));
        }
    }

    @Test
    void badArgumentsAreNamed() {
        assertThrows(NullPointerException.class, () -> store.get(null));
        assertThrows(NullPointerException.class, () -> store.set("k", null));
        assertThrows(IllegalArgumentException.class, () -> store.get("a\0b"));
        assertThrows(IllegalArgumentException.class, () -> StoreServer.serve("127.0.0.1", 70_000));
        assertThrows(IllegalArgumentException.class, () -> store.await("k", Duration.ofMillis(-1)));
        assertThrows(TesseraInvalidArgumentException.class, () -> Store.open("http://x"));
        assertThrows(TesseraInvalidArgumentException.class, () -> store.set("", bytes("x")));
    }

    @Test
    void closedObjectsSaySo() {
        store.close();
        store.close();
        assertTrue(store.isClosed());
        assertTrue(assertThrows(IllegalStateException.class, () -> store.get("k")).getMessage().contains("Store is closed"));
        server.close();
        assertThrows(IllegalStateException.class, () -> server.port());
    }
}
