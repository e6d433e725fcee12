package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Ranks as processes, started by {@code tessera run}, and what a process tells its launcher. */
class LaunchTest {
    private static final Path TESSERA = Path.of(System.getProperty("tessera.prefix"), "bin", "tessera");

    /** A rank: sums its number over the job, or fails if it is told to. */
    public static final class Rank {
        private Rank() {}

        public static void main(String[] args) throws Exception {
            Launch.record(() -> {
                try (Comm comm = Comm.fromEnv()) {
                    final Tensor sum = Tensor.copyOf(new float[] {comm.rank()});
                    comm.allReduce(sum, ReduceOp.SUM);
                    if (args.length > 0 && comm.rank() == 1) {
                        throw new IllegalStateException(args[0]);
                    }
                    comm.finish();
                    System.out.println("rank " + comm.rank() + " of " + comm.worldSize() + " sum "
                            + sum.floats().get(0) + " preempted " + Launch.preemptRequested());
                }
            });
        }
    }

    private static List<String> java(String... args) {
        final String classes = Stream.of(System.getProperty("java.class.path").split(":"))
                .filter(entry -> entry.endsWith("classes")).collect(Collectors.joining(":"));
        final List<String> command = new ArrayList<>(List.of(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(), "-Xmx64m", "-XX:TieredStopAtLevel=1",
                "-D" + Loader.PATH_PROPERTY + "=" + System.getProperty(Loader.PATH_PROPERTY), "-cp", classes,
                Rank.class.getName()));
        command.addAll(List.of(args));
        return command;
    }

    private static String run(Path directory, int expected, List<String> command, String... environment)
            throws Exception {
        final Path output = directory.resolve("output.log");
        final ProcessBuilder builder =
                new ProcessBuilder(command).redirectErrorStream(true).redirectOutput(output.toFile());
        for (String entry : environment) {
            builder.environment().put(entry.substring(0, entry.indexOf('=')), entry.substring(entry.indexOf('=') + 1));
        }
        final Process process = builder.start();
        if (!process.waitFor(90, TimeUnit.SECONDS)) {
            process.destroyForcibly().waitFor();
            throw new AssertionError("hangs: " + command + "\n" + Files.readString(output));
        }
        final String text = Files.readString(output);
        assertEquals(expected, process.exitValue(), text);
        return text;
    }

    @Test
    void ranksAsProcesses(@TempDir Path directory) throws Exception {
        assertTrue(Files.isExecutable(TESSERA), TESSERA + " is not there: build with the command-line tool");
        final List<String> command = new ArrayList<>(List.of(TESSERA.toString(), "run", "-n", "2"));
        command.addAll(java());
        final String out = run(directory, 0, command);
        assertTrue(out.contains("rank 0 of 2 sum 1.0 preempted false"), out);
        assertTrue(out.contains("rank 1 of 2 sum 1.0 preempted false"), out);
    }

    @Test
    void theLauncherHearsOfAFailure(@TempDir Path directory) throws Exception {
        final List<String> command = new ArrayList<>(List.of(TESSERA.toString(), "run", "-n", "2"));
        command.addAll(java("a failure of the test"));
        final String out = run(directory, 1, command);
        assertTrue(out.contains("IllegalStateException: a failure of the test"), out);
    }

    @Test
    void theErrorFileHasMessageAndTrace(@TempDir Path directory) throws Exception {
        final Path file = directory.resolve("error.json");
        final Path script = directory.resolve("Fails.java");
        Files.writeString(script, "public class Fails { public static void main(String[] a) throws Exception {"
                + " dev.tessera.Launch.recordError(\"first\");"
                + " dev.tessera.Launch.record(() -> { throw new java.io.IOException(\"second\"); }); } }");
        final List<String> command = java();
        command.set(command.size() - 1, script.toString());
        run(directory, 1, command, "TESSERA_ERROR_FILE=" + file);
        final String text = Files.readString(file);
        assertTrue(text.contains("first"), text);
        assertFalse(text.contains("second"), "only the first error counts: " + text);
    }

    @Test
    void outsideALauncherNothingHappens() {
        assertFalse(Launch.preemptRequested());
        Launch.recordError("nobody listens");
        assertThrows(IllegalArgumentException.class,
                () -> Launch.record(() -> {
                    throw new IllegalArgumentException("thrown on");
                }));
        assertThrows(NullPointerException.class, () -> Launch.recordError((String) null));
    }
}
