package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Each way to the native library, in a JVM of its own. */
class LoaderTest {
    private static final Path NATIVES = Path.of(System.getProperty(Loader.PATH_PROPERTY));
    private static final String NATIVES_ROOT = System.getProperty("tessera.natives.root");
    private static final Path OTHER_ABI = Path.of(System.getProperty("tessera.natives.build"), "other", "abi");

    /** Prints where the library came from; run in the child JVMs. */
    public static final class Main {
        private Main() {}

        public static void main(String[] args) {
            System.out.println("version " + Version.library() + " from " + Version.libraryPath());
        }
    }

    private static String java(boolean withJar, String... options) throws Exception {
        final String classes = Stream.of(System.getProperty("java.class.path").split(":"))
                .filter(entry -> entry.endsWith("classes")).collect(Collectors.joining(":"));
        final List<String> command = new ArrayList<>(List.of(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(), "-Xmx64m", "-XX:TieredStopAtLevel=1"));
        command.addAll(List.of(options));
        command.addAll(List.of("-cp", classes + (withJar ? ":" + NATIVES_ROOT : ""), Main.class.getName()));
        final Path output = Files.createTempFile("tessera-loader", ".log");
        try {
            final Process process = new ProcessBuilder(command).redirectErrorStream(true)
                    .redirectOutput(output.toFile()).start();
            if (!process.waitFor(Patience.seconds(60), java.util.concurrent.TimeUnit.SECONDS)) {
                process.destroyForcibly().waitFor();
                throw new AssertionError("the child JVM hangs: " + command);
            }
            return Files.readString(output);
        } finally {
            Files.delete(output);
        }
    }

    @Test
    void anExplicitDirectoryOrFile() throws Exception {
        final String library = "version " + Version.library() + " from " + NATIVES;
        assertTrue(java(false, "-Ddev.tessera.native.path=" + NATIVES).startsWith(library));
        assertTrue(java(false, "-Ddev.tessera.native.path=" + NATIVES.resolve("libtessera_jni.so")).startsWith(library));
    }

    @Test
    void anExplicitPathThatIsNotThereIsNotReplacedByAnother() throws Exception {
        final String out = java(true, "-Ddev.tessera.native.path=/no/such/directory");
        assertTrue(out.contains("UnsatisfiedLinkError: -Ddev.tessera.native.path=/no/such/directory: /no/such/directory"), out);
        assertTrue(out.contains(" does not exist"), out);
    }

    @Test
    void theSystemPath() throws Exception {
        final String out = java(false, "-Djava.library.path=" + NATIVES);
        assertTrue(out.contains("from " + NATIVES), out);
    }

    @Test
    void theJarIsUnpackedOnceUnderItsHash(@TempDir Path directory) throws Exception {
        final String first = java(true, "-Ddev.tessera.native.dir=" + directory);
        assertTrue(first.contains("from " + directory.resolve("tessera-" + System.getProperty("user.name"))), first);
        final List<Path> files = files(directory);
        assertEquals(4, files.size(), files.toString()); // and the two that are locked
        assertTrue(files.get(0).endsWith(".lock") && files.get(1).endsWith(".used"), files.toString());
        final Path library = files.get(2);
        final Object modified = Files.getLastModifiedTime(library);
        assertEquals(first, java(true, "-Ddev.tessera.native.dir=" + directory));
        assertEquals(files, files(directory));
        assertEquals(modified, Files.getLastModifiedTime(library), "unpacked again");
        Files.write(library, new byte[] {1, 2, 3}); // damaged: replaced
        assertEquals(first, java(true, "-Ddev.tessera.native.dir=" + directory));
    }

    /** Unpacks the version that its first argument names and waits for its standard input's end. */
    public static final class Unpacking {
        private Unpacking() {}

        public static void main(String[] args) throws Exception {
            System.out.println(Loader.unpack(version(args[0]), Path.of(args[1])));
            System.in.read();
        }

        /** Here, since a child JVM lacks what the tests' own class needs. */
        static Map<String, byte[]> version(String content) {
            return Map.of("a.so", content.getBytes(StandardCharsets.UTF_8));
        }
    }

    @Test
    void versionsThatNoProcessUsesAreRemoved(@TempDir Path base) throws Exception {
        final Path stranger = Files.createDirectories(base.resolve("tessera-" + System.getProperty("user.name")))
                .resolve("0123456789abcdef"); // of a version that said nothing of its use
        Files.setPosixFilePermissions(stranger.getParent(), PosixFilePermissions.fromString("rwx------"));
        Files.createDirectory(stranger);
        final Process user = new ProcessBuilder(Jvm.command(Unpacking.class.getName(), "one", base.toString()))
                .redirectError(ProcessBuilder.Redirect.INHERIT).start();
        try {
            final Path one;
            try (BufferedReader lines =
                    new BufferedReader(new InputStreamReader(user.getInputStream(), StandardCharsets.UTF_8))) {
                one = Path.of(lines.readLine());
                final Path two = Loader.unpack(Unpacking.version("two"), base); // used by this JVM from here on
                assertTrue(Files.exists(one.resolve("a.so")), "removed while a process uses it");
                user.getOutputStream().close();
                assertTrue(user.waitFor(Patience.seconds(60), java.util.concurrent.TimeUnit.SECONDS), "it does not end");
                final Path three = Loader.unpack(Unpacking.version("three"), base);
                assertFalse(Files.exists(one), "nobody uses it any more");
                assertTrue(Files.exists(two.resolve("a.so")), "this JVM uses it");
                assertTrue(Files.exists(three.resolve("a.so")));
                assertEquals(two, Loader.unpack(Unpacking.version("two"), base));
                assertTrue(Files.exists(stranger), "removed without knowing of its use");
            }
        } finally {
            user.destroyForcibly().waitFor();
        }
    }

    private static List<Path> files(Path directory) throws IOException {
        try (Stream<Path> paths = Files.walk(directory)) {
            return paths.filter(Files::isRegularFile).sorted().collect(Collectors.toList());
        }
    }

    @Test
    void withoutAnyLibraryTheMessageSaysWhereItLooked() throws Exception {
        final String out = java(false, "-Djava.library.path=/empty/place");
        assertTrue(out.contains("/empty/place"), out);
        assertTrue(out.contains("Add the jar dev.tessera:tessera:0.1.0:natives-linux-x86_64"), out);
    }

    @Test
    void aLibraryOfAnotherVersionIsRefused(@TempDir Path directory) throws Exception {
        Files.copy(NATIVES.resolve("libtessera_jni.so"), directory.resolve("libtessera_jni.so"));
        try (Stream<Path> others = Files.list(OTHER_ABI)) {
            for (Path other : others.collect(Collectors.toList())) {
                Files.copy(other, directory.resolve(other.getFileName()));
            }
        }
        final String out = java(false, "-Ddev.tessera.native.path=" + directory);
        assertTrue(out.contains("was built for ABI " + Native.headerAbiVersion()), out);
        assertTrue(out.contains("ABI 999, version 9.9.9, loaded from /somewhere/libtessera.so"), out);
        assertTrue(out.contains(directory.toString()), out);
    }

    @Test
    void aDirectoryThatOthersCanWriteIsRefused(@TempDir Path base) throws Exception {
        final Path home = base.resolve("tessera-" + System.getProperty("user.name"));
        Files.createDirectory(home);
        Files.setPosixFilePermissions(home, PosixFilePermissions.fromString("rwxrwxrwx"));
        final Map<String, byte[]> files = Map.of("a.so", "content".getBytes(StandardCharsets.UTF_8));
        assertTrue(assertThrows(IOException.class, () -> Loader.unpack(files, base)).getMessage().contains("writable"));
        Files.setPosixFilePermissions(home, PosixFilePermissions.fromString("rwx------"));
        assertEquals("content", Files.readString(Loader.unpack(files, base).resolve("a.so")));
        final Path elsewhere = Files.createDirectory(base.resolve("elsewhere"));
        final Path linked = Files.createDirectory(base.resolve("linked"));
        Files.createSymbolicLink(linked.resolve(home.getFileName()), elsewhere);
        assertThrows(IOException.class, () -> Loader.unpack(files, linked));
        assertFalse(Files.list(elsewhere).findAny().isPresent(), "wrote through a link");
    }

    @Test
    void aDirectoryWhereNothingMayRunIsNamed() {
        final UnsatisfiedLinkError error = Loader.explain(
                new UnsatisfiedLinkError("/tmp/x/libtessera_jni.so: failed to map segment from shared object"),
                Path.of("/tmp/x/libtessera_jni.so"), "unpacked");
        assertTrue(error.getMessage().contains("/tmp/x is probably mounted noexec"), error.getMessage());
        assertTrue(error.getMessage().contains("-Ddev.tessera.native.dir"), error.getMessage());
    }
}
