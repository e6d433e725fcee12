package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.Stream;
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

    @ParameterizedTest
    @ValueSource(strings = {"return", "exit", "close", "halt"})
    void theJvmEndsWell(String way) throws Exception {
        final String classes = Stream.of(System.getProperty("java.class.path").split(":"))
                .filter(entry -> entry.endsWith("classes")).collect(Collectors.joining(":"));
        final List<String> command = new ArrayList<>(List.of(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(), "-Xmx128m", "-XX:TieredStopAtLevel=1",
                "-XX:-CreateCoredumpOnCrash", "-D" + Loader.PATH_PROPERTY + "=" + System.getProperty(Loader.PATH_PROPERTY),
                "-cp", classes, Main.class.getName(), way));
        final Path output = Files.createTempFile("tessera-exit", ".log");
        try {
            final Process process = new ProcessBuilder(command).redirectErrorStream(true)
                    .redirectOutput(output.toFile()).start();
            if (!process.waitFor(40, TimeUnit.SECONDS)) {
                process.destroyForcibly().waitFor();
                throw new AssertionError("hangs after: " + Files.readString(output));
            }
            final String text = Files.readString(output);
            assertEquals(0, process.exitValue(), text);
            assertTrue(text.contains("leaving") && !text.contains("impossible"), text);
        } finally {
            Files.delete(output);
        }
    }
}
