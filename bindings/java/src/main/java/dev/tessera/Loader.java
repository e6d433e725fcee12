package dev.tessera;

import static java.nio.file.StandardOpenOption.CREATE;
import static java.nio.file.StandardOpenOption.READ;
import static java.nio.file.StandardOpenOption.WRITE;

import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.channels.FileChannel;
import java.nio.channels.OverlappingFileLockException;
import java.nio.charset.StandardCharsets;
import java.nio.file.DirectoryIteratorException;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.attribute.PosixFilePermissions;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.locks.LockSupport;

/**
 * Finds and loads {@code libtessera_jni.so} and, next to it, {@code libtessera.so}: first where the property {@value
 * #PATH_PROPERTY} points (a directory or the file), then on {@code java.library.path}, then from the jar {@code
 * tessera-<version>-natives-<platform>.jar}, which is unpacked once into a directory named after its content's hash,
 * under {@value #DIR_PROPERTY} (default: {@code java.io.tmpdir}); unpacked files of other versions that no process uses
 * any more are removed. Then the ABI of the library is compared with that of the headers that the shims were compiled
 * with.
 */
final class Loader {
    static final String PATH_PROPERTY = "dev.tessera.native.path";
    static final String DIR_PROPERTY = "dev.tessera.native.dir";
    private static final String SHIM = "libtessera_jni.so";
    private static final String DOOR = ".lock"; // of the directory of all versions: held while one is unpacked or removed
    private static final String MARK = ".used"; // of a version's: held, shared, by each process that has loaded it
    private static final long PATIENCE_NS = 5_000_000_000L;
    /** Channels of marks, which stay open until the process ends. */
    private static final List<FileChannel> USED = Collections.synchronizedList(new ArrayList<>());

    private Loader() {}

    static void load() {
        final String from = loadShim();
        final int compiled = Native.headerAbiVersion();
        final int loaded = Native.abiVersion();
        if (compiled != loaded) {
            throw new UnsatisfiedLinkError("Tessera's Java binding (" + from + ") was built for ABI " + compiled
                    + ", but the library that it found has ABI " + loaded + ", version " + Native.text(Native.version())
                    + ", loaded from " + Native.text(Native.libraryPath()) + ". Use a binding and a library of the"
                    + " same release; -D" + PATH_PROPERTY + "=DIR selects a directory with both.");
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
                throw new UnsatisfiedLinkError("-D" + PATH_PROPERTY + "=" + explicit + ": " + path + " does not exist");
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
            hint = " The file system of " + path.getParent() + " is probably mounted noexec; choose another directory"
                    + " with -D" + DIR_PROPERTY + "=DIR.";
        } else if (text.contains("cannot open shared object file")) {
            hint = " Install the missing library.";
        }
        return (UnsatisfiedLinkError) new UnsatisfiedLinkError(
                "Tessera's native library " + path + " (" + how + ") cannot be loaded: " + text + "." + hint).initCause(error);
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
                    + base + ": " + error + ". Choose another directory with -D" + DIR_PROPERTY + "=DIR.").initCause(error);
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

    /** The directory of the unpacked files: accessible only to this user, named after its content. */
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
        // Locks on files are the JVM's, which may have several of this class: one of them at a time.
        synchronized (("dev.tessera.Loader " + home).intern()) {
            FileChannel door = null;
            try {
                door = FileChannel.open(home.resolve(DOOR), CREATE, WRITE);
            } catch (IOException readOnly) {
                log("cannot remove what other versions unpacked into " + home + ": " + readOnly);
            }
            try (FileChannel held = door) {
                final boolean alone = held != null && locked(held, false);
                write(files, directory);
                if (held != null && use(directory) && alone) {
                    removeOthers(home, directory);
                }
            }
        }
        return directory;
    }

    /**
     * Locks the file until the channel is closed. Others have it exclusively for a moment only; where one is stopped in that, or
     * this file system locks no files, nothing is removed.
     */
    private static boolean locked(FileChannel channel, boolean shared) {
        final long deadline = System.nanoTime() + PATIENCE_NS;
        try {
            while (channel.tryLock(0, Long.MAX_VALUE, shared) == null) {
                if (System.nanoTime() - deadline > 0) {
                    return false;
                }
                LockSupport.parkNanos(1_000_000);
            }
            return true;
        } catch (IOException | OverlappingFileLockException none) {
            return false;
        }
    }

    /** Says that this process uses the directory, until it ends; whether that was said now. */
    private static boolean use(Path directory) {
        try {
            final FileChannel mark = FileChannel.open(directory.resolve(MARK), CREATE, READ, WRITE);
            // Also if another loader of this JVM has the lock, which would go with any channel of the file that is closed.
            USED.add(mark);
            return locked(mark, true);
        } catch (IOException readOnly) {
            return false;
        }
    }

    /**
     * Removes what other versions unpacked and no process uses any more. One without a mark is an older version's, of which
     * that is not known. Called behind the door, so that nobody begins to use one meanwhile.
     */
    private static void removeOthers(Path home, Path own) {
        try (DirectoryStream<Path> others = Files.newDirectoryStream(home, Loader::isVersion)) {
            for (Path other : others) {
                if (!other.equals(own) && Files.isRegularFile(other.resolve(MARK), LinkOption.NOFOLLOW_LINKS)) {
                    removeIfUnused(other);
                }
            }
        } catch (IOException | DirectoryIteratorException left) {
            log("cannot remove what other versions unpacked into " + home + ": " + left);
        }
    }

    private static boolean isVersion(Path path) {
        return path.getFileName().toString().matches("[0-9a-f]{16}") && Files.isDirectory(path, LinkOption.NOFOLLOW_LINKS);
    }

    private static void removeIfUnused(Path directory) throws IOException {
        final FileChannel mark = FileChannel.open(directory.resolve(MARK), READ, WRITE);
        try {
            if (mark.tryLock() == null) {
                mark.close();
                return;
            }
        } catch (OverlappingFileLockException here) {
            USED.add(mark); // this JVM's; closing the channel would let go of that lock
            return;
        }
        try (mark; DirectoryStream<Path> files = Files.newDirectoryStream(directory)) {
            for (Path file : files) {
                Files.delete(file);
            }
        }
        Files.delete(directory);
    }

    private static void log(String what) {
        System.getLogger("dev.tessera").log(System.Logger.Level.DEBUG, what);
    }

    private static void write(Map<String, byte[]> files, Path directory) throws IOException {
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
