package dev.tessera;

import java.io.PrintWriter;
import java.io.StringWriter;

/** What {@code tessera run} tells the ranks, and what they tell it. */
public final class Launch {
    private Launch() {}

    /** A program whose failure the launcher shall hear of. */
    @FunctionalInterface
    public interface Program {
        /**
         * Runs it.
         *
         * @throws Exception how it fails
         */
        void run() throws Exception;
    }

    /**
     * Whether the launcher was asked to stop: save and return soon. Reads a flag, costs nothing.
     *
     * @return always false outside {@code tessera run}
     */
    public static boolean preemptRequested() {
        return Native.preemptRequested();
    }

    /**
     * Tell the launcher why this process fails, for its error summary. The first call of a process counts. Outside a
     * launcher it does nothing.
     *
     * @param message what went wrong; its first line stands for it where there is room for one
     */
    public static void recordError(String message) {
        Native.recordError(Native.utf8(message, "message"), null);
    }

    /**
     * Tell the launcher why this process fails, with the stack trace. A program that began with {@link Comm#fromEnv()} needs
     * this only for what it catches itself (before {@code System.exit}, say): what ends the thread that called it is told
     * without, unless that thread has an uncaught exception handler of its own.
     *
     * @param error what was thrown
     */
    public static void recordError(Throwable error) {
        final StringWriter trace = new StringWriter();
        error.printStackTrace(new PrintWriter(trace));
        Native.recordError(plainText(error.toString()), plainText(trace.toString()));
    }

    /**
     * Tell the launcher of an error that the program found by itself, as where its ranks meet without the library.
     *
     * @param message what went wrong
     * @param code of {@link ErrorCode#TIMEOUT}, {@link ErrorCode#PEER_LOST} and {@link ErrorCode#ABORTED} {@code peer} is
     *     the cause, not this rank
     * @param peer the rank that it is about, by its {@code TESSERA_RANK}: of several the first; -1: none, or not known
     */
    public static void recordError(String message, ErrorCode code, int peer) {
        Native.recordErrorAbout(Native.utf8(message, "message"), null, code.number(), peer);
    }

    /**
     * Run {@code program}; what it throws is recorded and thrown on.
     *
     * @param program the body of a {@code main} method
     * @throws Exception what the program throws
     */
    public static void record(Program program) throws Exception {
        try {
            program.run();
        } catch (Throwable error) {
            recordError(error);
            throw error;
        }
    }

    /**
     * Under a launcher: tell it of what ends the calling thread. That goes to whom it went before, too, and a handler of the
     * thread's own is left alone.
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
            } catch (RuntimeException refused) {
                error.addSuppressed(refused);
            }
            dying.getThreadGroup().uncaughtException(dying, error); // the default handler, or standard error
        });
    }

    private static byte[] plainText(String text) { // an exception's, so anything is taken
        return text.replace('\0', ' ').getBytes(java.nio.charset.StandardCharsets.UTF_8);
    }
}
