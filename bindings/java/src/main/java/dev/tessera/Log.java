package dev.tessera;

import java.util.Objects;
import java.util.function.BiConsumer;

/** The native library's log, one per process. It goes to standard error unless a handler is set. */
public final class Log {
    /** Importance of a line. */
    public enum Level {
        /** For developers of Tessera. */
        DEBUG,
        /** Normal events. */
        INFO,
        /** Possible problems. */
        WARNING,
        /** Errors. */
        ERROR,
        /** No lines. */
        OFF
    }

    private Log() {}

    /**
     * Drop lines below {@code level}. Initially TESSERA_LOG in the environment (debug, info, warning, error, off), else
     * WARNING.
     *
     * @param level the lowest level that is logged
     */
    public static void setLevel(Level level) {
        Native.logSetLevel(level.ordinal() + 1);
    }

    /**
     * Send the lines to {@code handler}, which may be called from any thread, possibly from several at once. It must
     * not call Tessera; its exceptions are dropped.
     *
     * @param handler takes level and line; null restores standard error
     */
    public static void setHandler(BiConsumer<Level, String> handler) {
        Native.logSetHandler(handler);
    }

    /** Called by the shims. */
    static void line(Object handler, int level, byte[] line) {
        try {
            @SuppressWarnings("unchecked")
            final BiConsumer<Level, String> target = (BiConsumer<Level, String>) Objects.requireNonNull(handler);
            target.accept(Level.values()[level - 1], Native.text(line));
        } catch (Throwable dropped) { // it must not reach the library's thread
            System.getLogger("dev.tessera").log(System.Logger.Level.WARNING, "the handler of Tessera's log failed", dropped);
        }
    }
}
