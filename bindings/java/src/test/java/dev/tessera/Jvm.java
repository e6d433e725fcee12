package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/** Programs in JVMs of their own. */
final class Jvm {
    private static final Path TESSERA = Path.of(System.getProperty("tessera.prefix"), "bin", "tessera");

    private Jvm() {}

    /** The command that runs a class of the tests, or a source file. */
    static List<String> command(String program, String... arguments) {
        final String classes = Stream.of(System.getProperty("java.class.path").split(":"))
                .filter(entry -> entry.endsWith("classes")).collect(Collectors.joining(":"));
        final List<String> command = new ArrayList<>(List.of(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(), "-Xmx128m", "-XX:TieredStopAtLevel=1",
                "-XX:-CreateCoredumpOnCrash", "-D" + Loader.PATH_PROPERTY + "=" + System.getProperty(Loader.PATH_PROPERTY),
                "-cp", classes, program));
        command.addAll(Arrays.asList(arguments));
        return command;
    }

    /** The same as two ranks of {@code tessera run}. */
    static List<String> launched(String program, String... arguments) {
        assertTrue(Files.isExecutable(TESSERA), TESSERA + " is not there: build with the command-line tool");
        final List<String> command = new ArrayList<>(List.of(TESSERA.toString(), "run", "-n", "2"));
        command.addAll(command(program, arguments));
        return command;
    }

    /** Runs a command to its end; what it printed, on both streams. Environment: "NAME=value". */
    static String run(int expected, List<String> command, String... environment) throws Exception {
        final Path output = Files.createTempFile("tessera-test", ".log");
        try {
            final ProcessBuilder builder =
                    new ProcessBuilder(command).redirectErrorStream(true).redirectOutput(output.toFile());
            for (String entry : environment) {
                builder.environment().put(entry.substring(0, entry.indexOf('=')), entry.substring(entry.indexOf('=') + 1));
            }
            final Process process = builder.start();
            if (!process.waitFor(Patience.seconds(90), TimeUnit.SECONDS)) {
                process.destroyForcibly().waitFor();
                throw new AssertionError("hangs: " + command + "\n" + Files.readString(output));
            }
            final String text = Files.readString(output);
            assertEquals(expected, process.exitValue(), text);
            return text;
        } finally {
            Files.delete(output);
        }
    }
}
