package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Ranks as processes, started by {@code tessera run}, and what a process tells its launcher. */
class LaunchTest {
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

    /** A rank that works until all ranks are told to stop. */
    public static final class Preempted {
        private Preempted() {}

        public static void main(String[] args) {
            try (Comm comm = Comm.fromEnv()) {
                System.out.println("running");
                final Tensor told = Tensor.zeros(DType.F32, 1);
                final long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(Patience.seconds(60));
                while (told.floats().get(0) == 0 && System.nanoTime() < end) {
                    told.floats().put(0, Launch.preemptRequested() ? 1 : 0);
                    comm.allReduce(told, ReduceOp.MIN);
                }
                comm.finish();
                System.out.println("rank " + comm.rank() + " preempted " + Launch.preemptRequested());
            }
        }
    }

    /** A rank that ends by an exception that nobody catches; "default": the program has a default handler of its own. */
    public static final class Uncaught {
        private Uncaught() {}

        public static void main(String[] args) {
            if (args[0].equals("default")) {
                Thread.setDefaultUncaughtExceptionHandler((thread, error) -> System.out.println("the program's own handler: "
                        + error.getMessage()));
            }
            try (Comm comm = Comm.fromEnv()) {
                Comm.fromEnv(new CommOptions()).close(); // a second one changes nothing
                if (comm.rank() == 1) {
                    fail();
                }
                comm.barrier();
            }
        }

        private static void fail() {
            throw new IllegalStateException("the data is empty", new java.io.IOException("no such bucket"));
        }
    }

    /** Rank 1 does not come where the others wait for it. */
    public static final class Absent {
        private Absent() {}

        public static void main(String[] args) throws Exception {
            if (System.getenv("TESSERA_RANK").equals("1")) {
                new CountDownLatch(1).await(); // until it is ended
            }
            Comm.fromEnv(new CommOptions().timeout(Duration.ofSeconds(Patience.seconds(2)))).close();
        }
    }

    /** A thread with a handler of its own keeps it. */
    public static final class OwnHandler {
        private OwnHandler() {}

        public static void main(String[] args) {
            Thread.currentThread().setUncaughtExceptionHandler((thread, error) -> System.out.println("mine alone"));
            try (Comm comm = Comm.fromEnv()) {
                throw new IllegalStateException("not told by rank " + comm.rank());
            }
        }
    }

    @Test
    void ranksAsProcesses() throws Exception {
        final String out = Jvm.run(0, Jvm.launched(Rank.class.getName()));
        assertTrue(out.contains("rank 0 of 2 sum 1.0 preempted false"), out);
        assertTrue(out.contains("rank 1 of 2 sum 1.0 preempted false"), out);
    }

    @Test
    void ranksSeeThatTheJobIsToldToStop() throws Exception {
        final Process job = new ProcessBuilder(Jvm.launched(Preempted.class.getName()))
                .redirectError(ProcessBuilder.Redirect.INHERIT).start();
        try (BufferedReader out = new BufferedReader(new InputStreamReader(job.getInputStream()))) {
            for (int rank = 0; rank < 2; ++rank) {
                assertTrue(String.valueOf(out.readLine()).contains("running"));
            }
            job.toHandle().destroy(); // by SIGTERM; job.destroy() would close what is read, too
            final String rest = out.lines().collect(Collectors.joining("\n"));
            assertTrue(rest.contains("rank 0 preempted true"), rest);
            assertTrue(rest.contains("rank 1 preempted true"), rest);
        } finally {
            job.destroyForcibly().waitFor();
        }
    }

    @Test
    void theLauncherHearsOfAFailure() throws Exception {
        final String out = Jvm.run(1, Jvm.launched(Rank.class.getName(), "a failure of the test"));
        assertTrue(out.contains("IllegalStateException: a failure of the test"), out);
    }

    @Test
    void theLauncherHearsOfARankThatDoesNotCome() throws Exception {
        final String out = Jvm.run(1, Jvm.launched(Absent.class.getName()));
        assertTrue(out.contains("the job failed: rank 1 was late and other ranks timed out waiting for it: "), out);
    }

    @Test
    void theLauncherHearsOfWhatNobodyCatches() throws Exception {
        for (String way : new String[] {"plain", "default"}) {
            final String out = Jvm.run(1, Jvm.launched(Uncaught.class.getName(), way));
            final String summary = out.substring(out.indexOf("the job failed"));
            // Rank 1 ended with exit code 1, or was ended before it came to that.
            assertTrue(summary.startsWith("the job failed: rank 1 "), out);
            assertTrue(summary.lines().findFirst().orElse("")
                    .endsWith(": java.lang.IllegalStateException: the data is empty"), out);
            assertTrue(summary.contains("at dev.tessera.LaunchTest$Uncaught.fail(LaunchTest.java:"), out);
            assertTrue(summary.contains("Caused by: java.io.IOException: no such bucket"), out);
            // It also goes where it went before.
            final String before = way.equals("default") ? "the program's own handler: the data is empty"
                    : "Exception in thread \"main\" java.lang.IllegalStateException";
            assertTrue(out.contains(before), out);
        }
    }

    /** A rank that fails when its resources are closed, in several lines. */
    public static final class FailsAtTheEnd {
        private FailsAtTheEnd() {}

        @SuppressWarnings("try") // the resource is there to be closed
        public static void main(String[] args) throws Exception {
            try (AutoCloseable failing = () -> {
                throw new IllegalStateException("2 differences:\n  the first\n  the second");
            }; Comm comm = Comm.fromEnv()) {
                comm.finish();
            }
        }
    }

    @Test
    void theLauncherHearsOfWhatTheEndOfTheBlockThrows() throws Exception {
        final String out = Jvm.run(1, Jvm.launched(FailsAtTheEnd.class.getName()));
        final String summary = out.substring(out.indexOf("the job failed"));
        assertTrue(summary.contains("java.lang.IllegalStateException: 2 differences: the first"), out);
        assertTrue(summary.contains("the second"), out);
        assertTrue(summary.contains("'s traceback"), out);
    }

    /** Fails before it joins: when it wraps a buffer, or in a native call after one of its threads failed. */
    public static final class Early {
        private Early() {}

        public static void main(String[] args) throws Exception {
            if (args[0].equals("buffer")) {
                Params.of("w", java.nio.FloatBuffer.allocate(4));
            }
            final Thread helper = new Thread(() -> Tensor.zeros(DType.F32, -1));
            helper.start();
            helper.join(); // the program goes on without it
            Checkpoint.open(Path.of(args[1]));
        }
    }

    @Test
    void theLauncherHearsOfWhatFailsBeforeTheProgramJoins(@TempDir Path directory) throws Exception {
        final String buffer = Jvm.run(1, Jvm.launched(Early.class.getName(), "buffer"));
        final String headline = buffer.substring(buffer.indexOf("the job failed")).lines().findFirst().orElse("");
        assertTrue(headline.contains(": java.lang.IllegalArgumentException: parameter \"w\": the FloatBuffer is on the heap"),
                buffer);
        final Path file = directory.resolve("error.json");
        final String nowhere = directory.resolve("nowhere").toString();
        Jvm.run(1, Jvm.command(Early.class.getName(), "natively", nowhere), "TESSERA_ERROR_FILE=" + file);
        final String text = Files.readString(file);
        assertTrue(text.contains("TesseraNotFoundException") && !text.contains("negative size"), text);
    }

    @Test
    void aThreadsOwnHandlerIsLeftAlone(@TempDir Path directory) throws Exception {
        final Path file = directory.resolve("error.json");
        final String out = Jvm.run(1, Jvm.command(OwnHandler.class.getName()), "TESSERA_ERROR_FILE=" + file);
        assertTrue(out.contains("mine alone"), out);
        assertFalse(Files.exists(file));
    }

    @Test
    void theErrorFileHasMessageAndTrace(@TempDir Path directory) throws Exception {
        final Path file = directory.resolve("error.json");
        final Path script = directory.resolve("Fails.java");
        Files.writeString(script, "public class Fails { public static void main(String[] a) throws Exception {"
                + " dev.tessera.Launch.recordError(\"first\");"
                + " dev.tessera.Launch.record(() -> { throw new java.io.IOException(\"second\"); }); } }");
        Jvm.run(1, Jvm.command(script.toString()), "TESSERA_ERROR_FILE=" + file);
        final String text = Files.readString(file);
        assertTrue(text.contains("first"), text);
        assertFalse(text.contains("second"), "only the first error counts: " + text);
    }

    @Test
    void theErrorFileHasCodeAndPeer(@TempDir Path directory) throws Exception {
        final Path file = directory.resolve("error.json");
        final Path script = directory.resolve("Waits.java");
        Files.writeString(script, "public class Waits { public static void main(String[] a) {"
                + " dev.tessera.Launch.recordError(\"late\", dev.tessera.ErrorCode.TIMEOUT, 3); } }");
        Jvm.run(0, Jvm.command(script.toString()), "TESSERA_ERROR_FILE=" + file);
        final String text = Files.readString(file);
        assertTrue(text.contains("\"code\":\"TIMEOUT\"") && text.contains("\"peer\":3,"), text);
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
        assertThrows(TesseraInvalidArgumentException.class, () -> Launch.recordError("late", ErrorCode.UNKNOWN, 1));
    }
}
