package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.time.Duration;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** A JVM that ends while objects are open and work is in flight: no crash, no hang, no message of the JVM. */
class ExitTest {
    /** Leaves in the way that its argument names. */
    public static final class Main {
        private Main() {}

        public static void main(String[] args) throws Exception {
            final StoreOptions options = new StoreOptions().insecure(true);
            final StoreServer server = StoreServer.serve("127.0.0.1", 0, options);
            final String uri = "tcp://127.0.0.1:" + server.port();
            final Comm[] comms = new Comm[2];
            final Thread second = new Thread(() -> comms[1] = Comm.create(Store.open(uri, options), 1, 2));
            second.start();
            comms[0] = Comm.create(Store.open(uri, options), 0, 2);
            second.join();
            final Tensor tensor = Tensor.zeros(DType.F32, 1 << 20);
            final Work waiting = comms[0].allReduceAsync(tensor, ReduceOp.SUM); // rank 1 never comes
            waiting.toFuture().thenRun(() -> System.out.println("impossible"));
            final Thread blocked = new Thread(() -> comms[1].receive(Tensor.zeros(DType.F32, 4), 0, 1));
            blocked.setDaemon(true);
            blocked.start();
            Ranks.eventually("it blocks", () -> Ranks.isBusy(comms[1]));
            System.out.println("leaving");
            switch (args[0]) {
                case "return":
                    return;
                case "exit":
                    System.exit(0);
                    return;
                case "close":
                    comms[0].close();
                    comms[1].close();
                    return;
                default:
                    Runtime.getRuntime().halt(0);
            }
        }
    }

    /** Leaves in the way that its argument names, with a save in flight. */
    public static final class Saving {
        private Saving() {}

        public static void main(String[] args) {
            final Saver.Builder builder = Saver.at(null, Path.of(args[1])).writeBytesPerSecond(32 << 20); // half a second
            if (!args[0].equals("halt")) {
                builder.progress((phase, done, total) -> {});
            }
            final Saver saver = builder.open();
            final State state = new State().with("w", Tensor.zeros(DType.F32, 4 << 20));
            saver.saveAsync(1, state).thenRun(() -> System.out.println("saved"));
            if (args[0].equals("exit")) {
                System.exit(0);
            }
            if (args[0].equals("halt")) {
                Runtime.getRuntime().halt(0); // without hooks: the native library waits
            }
            if (args[0].equals("throw")) {
                throw new IllegalStateException("thrown");
            }
        }
    }

    @ParameterizedTest
    @ValueSource(strings = {"return", "exit", "throw", "halt"})
    void theEndOfTheJvmWaitsForASaveInFlight(String way, @TempDir Path root) throws Exception {
        Jvm.run(way.equals("throw") ? 1 : 0, Jvm.command(Saving.class.getName(), way, root.toString()));
        try (Checkpoint saved = Checkpoint.open(root)) {
            assertEquals(1, saved.step());
        }
    }

    /** A rank that waits for ever, to be killed. */
    public static final class Victim {
        private Victim() {}

        public static void main(String[] args) {
            try (Store store = Store.open(args[0], new StoreOptions().token(args[1]).timeout(Ranks.DEADLINE));
                    Comm comm = Comm.create(store, 1, 2, new CommOptions().timeout(Ranks.DEADLINE))) {
                comm.barrier();
                comm.receive(Tensor.zeros(DType.F32, 4), 0, 1); // nobody sends
            }
        }
    }

    @Test
    void aKilledJvmIsNamedByTheOthers() throws Exception {
        final String token = Ranks.newToken();
        final StoreOptions options = new StoreOptions().token(token).timeout(Ranks.DEADLINE);
        try (StoreServer server = StoreServer.serve("127.0.0.1", 0, options)) {
            final String uri = "tcp://127.0.0.1:" + server.port();
            final Process victim = new ProcessBuilder(Jvm.command(Victim.class.getName(), uri, token)).inheritIO().start();
            try (Store store = Store.open(uri, options);
                    Comm comm = Comm.create(store, 0, 2, new CommOptions().timeout(Duration.ofMinutes(10)))) {
                comm.barrier();
                final Work work = comm.allReduceAsync(Tensor.zeros(DType.F32, 1 << 16), ReduceOp.SUM);
                victim.destroyForcibly().waitFor(); // SIGKILL
                final TesseraPeerLostException error =
                        assertThrows(TesseraPeerLostException.class, () -> work.await(Ranks.DEADLINE));
                assertEquals(1, error.peer(), error.getMessage());
                assertThrows(TesseraAbortedException.class, comm::barrier);
            } finally {
                victim.destroyForcibly().waitFor();
            }
        }
    }

    @ParameterizedTest
    @ValueSource(strings = {"return", "exit", "close", "halt"})
    void theJvmEndsWell(String way) throws Exception {
        final String text = Jvm.run(0, Jvm.command(Main.class.getName(), way));
        assertTrue(text.contains("leaving") && !text.contains("impossible"), text);
    }
}
