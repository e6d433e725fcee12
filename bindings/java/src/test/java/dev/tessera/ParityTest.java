package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;

/** Every exported function has its shim, and every shim its caller. */
class ParityTest {
    private static final Path PROJECT = Path.of("").toAbsolutePath();

    private static String sources(Path directory, String ending) throws Exception {
        final StringBuilder text = new StringBuilder();
        try (Stream<Path> files = Files.walk(directory)) {
            for (Path file : files.filter(f -> f.toString().endsWith(ending)).collect(Collectors.toList())) {
                text.append(Files.readString(file));
            }
        }
        return text.toString();
    }

    @Test
    void everyExportedFunctionIsCalledByAShim() throws Exception {
        final List<String> symbols = Files.readAllLines(PROJECT.resolve("../../capi/abi/symbols.txt"));
        assertTrue(symbols.size() > 100, "symbols.txt has " + symbols.size() + " lines");
        final Set<String> called = new TreeSet<>();
        final Matcher calls =
                Pattern.compile("\\btsr_[a-z0-9_]+").matcher(sources(PROJECT.resolve("src/main/native"), ".cc")
                        + sources(PROJECT.resolve("src/main/native"), ".hpp"));
        while (calls.find()) {
            called.add(calls.group());
        }
        final Set<String> missing = new TreeSet<>(symbols);
        missing.removeAll(called);
        assertEquals(Set.of(), missing);
    }

    @Test
    void everyShimIsCalledFromJava() throws Exception {
        final String java = sources(PROJECT.resolve("src"), ".java");
        final Set<String> unused = new TreeSet<>();
        for (Class<?> natives : List.of(Native.class, PlainNatives.class)) {
            for (Method method : natives.getDeclaredMethods()) {
                if (Modifier.isNative(method.getModifiers())
                        && !Pattern.compile("Native(\\.|::)" + method.getName() + "\\b").matcher(java).find()) {
                    unused.add(method.getName());
                }
            }
        }
        assertEquals(Set.of(), unused);
    }
}
