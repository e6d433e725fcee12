package dev.tessera;

import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.attribute.PosixFilePermissions;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;

/**
 * Finds and loads {@code libtessera_jni.so} and, beside it, {@code libtessera.so}: first where the property
 * {@value #PATH_PROPERTY} says (a directory or the file), then on {@code java.library.path}, then out of the jar
 * {@code tessera-<version>-natives-<platform>.jar}, which is unpacked once into a directory named after its content's
 * hash, under {@value #DIR_PROPERTY} (default: {@code java.io.tmpdir}). Then the ABI of the library is compared with that
 * of the headers that the shims were compiled with.
 */
final class Loader {
    static final String PATH_PROPERTY = "dev.tessera.native.path";
    static final String DIR_PROPERTY = "dev.tessera.native.dir";
    private static final String SHIM = "libtessera_jni.so";

    private Loader() {}

    static void load() {
        final String from = loadShim();
        final int compiled = Native.headerAbiVersion();
        final int loaded = Native.abiVersion();
        if (compiled != loaded) {
            throw new UnsatisfiedLinkError("Tessera's Java binding (" + from + ") was built for ABI " + compiled
                    + ", but the library it found is ABI " + loaded + ", version " + Native.text(Native.version())
                    + ", loaded from " + Native.text(Native.libraryPath()) + ". Use a binding and a library of one release;"
                    + " -D" + PATH_PROPERTY + "=DIR names a directory that holds both.");
        }
    }

    private static String loadShim() {
        final String explicit = System.getProperty(PATH_PROPERTY);
        if (explicit != null) {
            Path path = Path.of(explicit).toAbsolutePath();
            if (Files.isDirectory(path)) {
                path = path.resolve(SHIM);
            }
            if (!Files.isRegularFile(path)) {
                throw new UnsatisfiedLinkError("-D" + PATH_PROPERTY + "=" + explicit + ": there is no file " + path);
            }
            return loadFile(path, "named by -D" + PATH_PROPERTY);
        }
        try {
            System.loadLibrary("tessera_jni");
            return "from java.library.path";
        } catch (UnsatisfiedLinkError error) {
            if (!String.valueOf(error.getMessage()).startsWith("no tessera_jni in java.library.path")) {
                throw error; // it is there and does not load
            }
        }
        return loadFromJar();
    }

    private static String loadFile(Path path, String how) {
        try {
            System.load(path.toString());
            return path.toString();
        } catch (UnsatisfiedLinkError error) {
            throw explain(error, path, how);
        }
    }

    static UnsatisfiedLinkError explain(UnsatisfiedLinkError error, Path path, String how) {
        final String text = String.valueOf(error.getMessage());
        String hint = "";
        if (text.contains("failed to map segment") || text.contains("Operation not permitted")) {
            hint = " The file system of " + path.getParent() + " is probably mounted noexec: name a directory that is not,"
                    + " with -D" + DIR_PROPERTY + "=DIR.";
        } else if (text.contains("cannot open shared object file")) {
            hint = " Install the library that the message names.";
        }
        return (UnsatisfiedLinkError) new UnsatisfiedLinkError(
                "Tessera's native library " + path + " (" + how + ") does not load: " + text + "." + hint).initCause(error);
    }

    private static String loadFromJar() {
        final String platform = platform();
        final String folder = "dev/tessera/native/" + platform + "/";
        final Map<String, byte[]> files = new LinkedHashMap<>();
        for (String name : new String(resource(folder + "libraries.txt", platform), StandardCharsets.UTF_8).split("\\s+")) {
            files.put(name, resource(folder + name, platform));
        }
        final Path base = Path.of(System.getProperty(DIR_PROPERTY, System.getProperty("java.io.tmpdir")));
        final Path directory;
        try {
            directory = unpack(files, base);
        } catch (IOException | UncheckedIOException error) {
            throw (UnsatisfiedLinkError) new UnsatisfiedLinkError("Tessera's native libraries cannot be unpacked into "
                    + base + ": " + error + ". Name another directory with -D" + DIR_PROPERTY + "=DIR.").initCause(error);
        }
        return loadFile(directory.resolve(SHIM), "unpacked from the jar tessera-natives-" + platform);
    }

    private static String platform() {
        final String arch = System.getProperty("os.arch").toLowerCase(Locale.ROOT);
        return System.getProperty("os.name").toLowerCase(Locale.ROOT) + "-" + (arch.equals("amd64") ? "x86_64" : arch);
    }

    private static byte[] resource(String name, String platform) {
        try (InputStream in = Loader.class.getClassLoader().getResourceAsStream(name)) {
            if (in == null) {
                throw new UnsatisfiedLinkError("Tessera's native library was not found: " + PATH_PROPERTY
                        + " is not set, java.library.path (" + System.getProperty("java.library.path")
                        + ") has no " + SHIM + ", and the class path has no " + name
                        + ". Add the jar dev.tessera:tessera:" + Version.JAVA_BINDING + ":natives-" + platform + ".");
            }
            return in.readAllBytes();
        } catch (IOException error) {
            throw (UnsatisfiedLinkError) new UnsatisfiedLinkError(name + " cannot be read: " + error).initCause(error);
        }
    }

    /** The directory of the unpacked files: owned by this user alone, named after what is in it. */
    static Path unpack(Map<String, byte[]> files, Path base) throws IOException {
        Files.createDirectories(base);
        final Path home = base.resolve("tessera-" + System.getProperty("user.name"));
        if (!Files.isDirectory(home, LinkOption.NOFOLLOW_LINKS)) {
            try {
                Files.createDirectory(home,
                        PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rwx------")));
            } catch (java.nio.file.FileAlreadyExistsException other) {
                if (!Files.isDirectory(home, LinkOption.NOFOLLOW_LINKS)) {
                    throw other;
                }
            }
        }
        checkPrivate(home);
        final Path directory = home.resolve(hash(files));
        Files.createDirectories(directory);
        for (Map.Entry<String, byte[]> file : files.entrySet()) {
            final Path target = directory.resolve(file.getKey());
            if (Files.isRegularFile(target) && Arrays.equals(Files.readAllBytes(target), file.getValue())) {
                continue;
            }
            final Path part = Files.createTempFile(directory, file.getKey(), ".part"); // others may unpack at this moment
            try {
                Files.write(part, file.getValue());
                Files.move(part, target, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
            } finally {
                Files.deleteIfExists(part);
            }
        }
        return directory;
    }

    /** Code is loaded from it: nobody else may have made it, or write into it. */
    private static void checkPrivate(Path home) throws IOException {
        final Path probe = Files.createTempFile("tessera", ".owner");
        try {
            if (!Files.getOwner(home, LinkOption.NOFOLLOW_LINKS).equals(Files.getOwner(probe))) {
                throw new IOException(home + " belongs to another user");
            }
        } finally {
            Files.delete(probe);
        }
        final String mode = PosixFilePermissions.toString(
                Files.getPosixFilePermissions(home, LinkOption.NOFOLLOW_LINKS));
        if (mode.charAt(4) == 'w' || mode.charAt(7) == 'w') {
            throw new IOException(home + " is writable by others (" + mode + ")");
        }
    }

    private static String hash(Map<String, byte[]> files) {
        try {
            final MessageDigest digest = MessageDigest.getInstance("SHA-256");
            files.values().forEach(digest::update);
            final StringBuilder text = new StringBuilder();
            for (byte b : Arrays.copyOf(digest.digest(), 8)) {
                text.append(String.format("%02x", b));
            }
            return text.toString();
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException("every JVM has SHA-256", error);
        }
    }
}
