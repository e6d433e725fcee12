package dev.tessera;

import java.io.PrintWriter;
import java.io.StringWriter;

/** Communication with the launcher, {@code tessera run}: preemption requests and error reports. */
public final class Launch {
    private Launch() {}

    /** A program whose failure is reported to the launcher. */
    @FunctionalInterface
    public interface Program {
        /**
         * Run the program.
         *
         * @throws Exception if it fails
         */
        void run() throws Exception;
    }

    /**
     * Whether the launcher was asked to stop; then save and return soon. Cheap: reads a flag.
     *
     * @return always false outside {@code tessera run}
     */
    public static boolean preemptRequested() {
        return Native.preemptRequested();
    }

    /**
     * Report to the launcher why this process fails, for its error summary. Only the first call of a process counts.
     * Does nothing outside a launcher.
     *
     * @param message what went wrong; only the first line is shown where space is limited
     */
    public static void recordError(String message) {
        Native.recordError(Native.utf8(message, "message"), null);
    }

    /**
     * Report to the launcher why this process fails, with the stack trace. A program needs this only for exceptions that
     * it catches itself (before {@code System.exit}, for example): an exception that ends the thread {@code main} after
     * its first use of Tessera, or a thread that called {@link Comm#fromEnv()}, is reported automatically, unless that
     * thread has its own uncaught exception handler.
     *
     * @param error the exception
     */
    public static void recordError(Throwable error) {
        final StringWriter trace = new StringWriter();
        error.printStackTrace(new PrintWriter(trace));
        Native.recordError(plainText(error.toString()), plainText(trace.toString()));
    }

    /**
     * Report to the launcher an error that the program itself detected, for example while its ranks connect without the
     * library.
     *
     * @param message what went wrong
     * @param code of {@link ErrorCode#TIMEOUT}, {@link ErrorCode#PEER_LOST} and {@link ErrorCode#ABORTED} {@code peer} is
     *     the cause, not this rank
     * @param peer the rank that the error is about, by its {@code TESSERA_RANK}; the first of several; -1 if none or
     *     unknown
     */
    public static void recordError(String message, ErrorCode code, int peer) {
        Native.recordErrorAbout(Native.utf8(message, "message"), null, code.number(), peer);
    }

    /**
     * Run {@code program}; an exception is recorded and rethrown.
     *
     * @param program the body of a {@code main} method
     * @throws Exception the program's exception
     */
    public static void record(Program program) throws Exception {
        try {
            program.run();
        } catch (Throwable error) {
            recordError(error);
            throw error;
        }
    }

    /** {@link #recordUncaught} for the main thread, before it joins: errors of other threads may be handled. */
    static void recordUncaughtOfMain() {
        if (Thread.currentThread().getName().equals("main")) {
            recordUncaught();
        }
    }

    /**
     * Under a launcher: report to it exceptions that end the calling thread. They also go to the previous handler, and
     * a thread's own handler is kept.
     */
    static void recordUncaught() {
        final Thread thread = Thread.currentThread();
        final boolean launched =
                System.getenv("TESSERA_ERROR_FILE") != null || System.getenv("TORCHELASTIC_ERROR_FILE") != null;
        if (!launched || thread.getUncaughtExceptionHandler() != thread.getThreadGroup()) {
            return;
        }
        thread.setUncaughtExceptionHandler((dying, error) -> {
            try {
                recordError(error);
            } catch (RuntimeException | LinkageError refused) { // the native library may not load
                error.addSuppressed(refused);
            }
            dying.getThreadGroup().uncaughtException(dying, error); // the default handler, or standard error
        });
    }

    private static byte[] plainText(String text) { // an exception's, so anything is taken
        return text.replace('\0', ' ').getBytes(java.nio.charset.StandardCharsets.UTF_8);
    }
}
