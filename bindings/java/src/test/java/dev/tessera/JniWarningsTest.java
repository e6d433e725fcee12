package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;

/** Runs after all others, in a JVM of its own: what did -Xcheck:jni say of them? */
class JniWarningsTest {
    @Test
    void theJvmHadNothingToSayOfOurShims() throws Exception {
        final Path log = Path.of(System.getProperty("tessera.jvm.log"));
        assertTrue(Files.exists(log), "no log of the tests' JVM: " + log);
        final List<String> lines;
        try (Stream<String> all = Files.lines(log, java.nio.charset.StandardCharsets.ISO_8859_1)) {
            lines = all.collect(Collectors.toList());
        }
        assertTrue(lines.stream().anyMatch(line -> line.contains("-Xcheck:jni")), "the tests ran without -Xcheck:jni");
        final StringBuilder ours = new StringBuilder();
        for (int i = 0; i < lines.size(); ++i) {
            if (!lines.get(i).startsWith("WARNING") && !lines.get(i).startsWith("FATAL ERROR in native")) {
                continue;
            }
            final List<String> warning = lines.subList(i, Math.min(lines.size(), i + 6));
            if (warning.stream().anyMatch(line -> line.contains("dev.tessera"))) {
                ours.append(String.join("\n", warning)).append('\n');
            }
        }
        assertEquals("", ours.toString());
    }
}
